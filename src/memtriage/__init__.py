"""memtriage: where every byte of GPU and host memory is in a PyTorch training run, and who holds it.

    memtriage run train.py

watches an unchanged training script. The functions here are for use inside a program; they cost nothing, and
do nothing, while no watch is on (but `census()` and `ledger()`, which always look).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memtriage import _active

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from memtriage.account.host_step import host_step
    from memtriage.integrations.metric_writer import MetricWriter
    from memtriage.model.census import Census
    from memtriage.model.explanation import Explanation
    from memtriage.model.holders import Cleared, Condition, HolderKind
    from memtriage.model.ledger import Ledger
    from memtriage.model.plan import Plan
    from memtriage.model.prediction import Prediction
    from memtriage.model.recording import Recording
    from memtriage.observe.holders.registered import Registration
    from memtriage.report.metrics.prometheus import MetricsServer
    from memtriage.session.run import Watch
    from memtriage.treat.compact import Compaction
    from memtriage.treat.deepspeed import ExactHostMemory
    from memtriage.treat.host_tuning import Trimmed
    from memtriage.treat.offload import OffloadedAdamW
    from memtriage.treat.park import Moved, Parked
    from memtriage.treat.phase import Phase, PhasePolicy

# Loaded now, while it is empty: at its first import a package takes its name in here, which is to be the
# function's.
importlib.import_module("memtriage.predict")

__version__ = "0.1.0"
__all__ = [
    "MetricWriter",
    "OffloadedAdamW",
    "PhasePolicy",
    "__version__",
    "census",
    "clear_caches",
    "compact",
    "deepspeed_exact_host_memory",
    "explain",
    "host_step",
    "ledger",
    "load_snapshot",
    "malloc_settings",
    "malloc_trim",
    "mark",
    "metrics",
    "otel_gauges",
    "park",
    "phase",
    "plan",
    "predict",
    "register_holder",
    "release_parking",
    "serve_metrics",
    "step",
    "unpark",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Classes are loaded when they are first asked for: `OffloadedAdamW` needs torch."""
    if name == "host_step":
        from memtriage.account.host_step import host_step

        return host_step
    if name == "MetricWriter":
        from memtriage.integrations.metric_writer import MetricWriter

        return MetricWriter
    if name == "OffloadedAdamW":
        from memtriage.treat.offload import OffloadedAdamW

        return OffloadedAdamW
    if name == "PhasePolicy":
        from memtriage.treat.phase import PhasePolicy

        return PhasePolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memtriage`: see docs/notebooks.md."""
    from memtriage.integrations.notebook import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext memtriage`."""
    from memtriage.integrations.notebook import unload

    unload(shell)


def watch(
    directory: str | os.PathLike[str] | None = None, *, quiet: bool = False, listen: bool = False
) -> Watch:
    """A context manager that watches the block inside it, as `memtriage run` watches a script.

    Marks are made by `torch.autograd.backward` and by optimizer steps. One census is taken for the ledger (at
    the third step, or at the end of a shorter run), others only when growth or an out-of-memory error asks
    for one. On exit everything installed is removed, the report is printed to
    stderr, and the result (`memtriage.model.RunReport`) stands in the watch's `report`.

    Args:
        directory: where the record goes; `$MEMTRIAGE_DIR` or `memtriage-run` by default.
        quiet: print nothing.
        listen: meanwhile answer `memtriage census --pid N`, as `memtriage run --listen` does.

    Raises:
        RuntimeError: on entering, when this process is watched already.

    Limits: one watch at a time in a process. Steps of compiled optimizers and of optimizers that are no
    `torch.optim.Optimizer`, and replays of CUDA graphs, make no marks: call `step()` after each.
    """
    from memtriage.session.run import Watch

    return Watch(directory, quiet=quiet, listen=listen)


def mark(name: str) -> None:
    """Names this instant: the counters are read and recorded under `name`. Does nothing without a watch.

    Costs well under 0.2 ms and synchronises nothing, so on CUDA the allocator's counters are those of the
    calls made so far, finished or not.

    Args:
        name: any text, e.g. `after refit`; growth is not judged at these marks.
    """
    if _active.session is not None:
        _active.session.mark(name)


def step() -> None:
    """Says that one training step is complete. Does nothing without a watch.

    Only loops whose steps cannot be seen need it (CUDA graphs, compiled or foreign optimizers). From the
    first call on, optimizer hooks no longer count steps.
    """
    if _active.session is not None:
        _active.session.user_step()


def metrics() -> dict[str, float]:
    """Where memory stands, by name, for whatever a training loop logs to. Empty without a watch.

        wandb.log({"loss": loss, **memtriage.metrics()})

    Names as `memtriage/cuda_0/allocated_bytes`; docs/metrics.md has them all. Figures are those of the last
    mark, in bytes; nothing is synchronised, and no census is taken. Costs one or two milliseconds, and every
    ten seconds or so some 10 to 30 ms more for the classes of host memory.
    """
    from memtriage.integrations.metrics import scalars

    return scalars()


def serve_metrics(port: int = 9400, host: str = "127.0.0.1") -> MetricsServer | None:
    """Serves Prometheus metrics of this process over HTTP, until the process ends or `close()` is called.

    While nothing watches the process (`memtriage run`, `memtriage.watch()`) the page is empty. `memtriage run
    --metrics PORT` does the same without code.

    Args:
        port: of the first rank on a machine; the others listen at this one plus their local rank. 0 for any
            that is free: see the result's `url`.
        host: by default this machine alone can ask; `0.0.0.0` lets everybody who can reach it.

    Returns:
        The server, with its `url`; None where the port is taken or prometheus-client is not installed: one
        line on stderr says so, and the program goes on.
    """
    from memtriage.integrations.metrics import serve

    return serve(port, host)


def otel_gauges(meter_provider: MeterProvider | None = None) -> None:
    """Makes an OpenTelemetry observable gauge of each metric. Call it once in a process.

    Args:
        meter_provider: yours, with its readers and exporters; None for the global one.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    from memtriage.integrations.metrics import observe

    observe(meter_provider)


def census() -> Census:
    """Every storage that is alive now: what it is, who holds it, how large. Sizes in bytes.

    Takes about two seconds for a million Python objects and 100,000 autograd nodes; other threads wait
    meanwhile, in so far as they need the interpreter. Nothing stays alive through the result.

    Not seen: memory that only C++ holds and that no autograd node leads to (it is in `ledger()` as a row of
    its own on CUDA).
    """
    from memtriage.account.census import take_census

    return take_census()


def ledger(device: str | None = None) -> list[Ledger]:
    """Closed ledgers, with owners by a census: of each CUDA device in use, and of the host.

    The rows of a ledger never overlap and sum to its `total`, in bytes: the device's use as the driver
    counts it, or the resident set of this process.

    Args:
        device: `cuda:N` or `host` for that one alone; None for all of these. `job`: this process and all its
            children, by process; sums to their proportional sets, so that shared pages count once.

    Raises:
        ValueError: when there is no such ledger, naming those that there are.
    """
    from memtriage.account.census import Look
    from memtriage.account.host_reading import read_host
    from memtriage.account.ledgers import take_ledgers

    if device == "job":
        from memtriage.account.job_ledger import take_job_ledger

        return [take_job_ledger()]
    on_host = read_host()
    with Look() as view:
        found = view.census()
        ledgers = take_ledgers(found.storages, on_host=on_host, parameters=found.parameters)
    if device is None:
        return ledgers
    chosen = [one for one in ledgers if one.device == device]
    if not chosen:
        there = ", ".join(one.device for one in ledgers)
        raise ValueError(f"no ledger for device {device!r}: this process has one for {there}, job")
    return chosen


def clear_caches(
    kinds: Iterable[str] | None = None, *, between_steps: bool = False, empty_cache: bool = True
) -> Cleared:
    """Have known holders (`memtriage holders`) let go of what can be made again. Sizes in bytes.

    Every CUDA device in use is synchronised first. Then garbage is collected and the allocator's cache
    emptied. What must not be cleared now is skipped, with the reason: while CUDA graphs are captured that
    may be replayed, while a backward is under way or pending, and always what the program could not make
    again. What fails is reported, and the others go on.

    Args:
        kinds: kinds or names of holders, as `memtriage holders` lists them, or the first parts of names
            (`te`). What is cleared `on request` only needs its kind or name here. None for all others; the
            generic detectors are left out then.
        between_steps: the caller says that no graph which is still alive will be run backward: a phase ends.
            Otherwise such a graph counts as a pending backward.
        empty_cache: give free segments back to the driver at the end.

    Raises:
        ValueError: there is no such kind or holder.

    Limits: a capture or a backward in another thread is not seen.
    """
    from memtriage.treat.caches import clear_caches

    return clear_caches(kinds, between_steps=between_steps, empty_cache=empty_cache)


def register_holder(
    name: str,
    values: Callable[[], Any],
    clear: Callable[[], object] | None = None,
    *,
    holds: str = "",
    refills: str = "",
    forbidden: Iterable[Condition] = ("graphs", "backward"),
    kind: HolderKind = "registered",
    automatic: bool = True,
) -> Registration:
    """Put a cache of the program itself into the catalogue, to be named, measured and cleared like others.

    Args:
        name: how it is to be called; an entry registered under the same name is replaced.
        values: gives the cache, in which tensors are looked for (containers, objects, tensors), or None while
            there is none. Called at each census too: it must be quick, and must not make tensors.
        clear: empties it; None for a cache that is only told of.
        holds, refills: words for reports: what it keeps, and how it fills again.
        forbidden: when it must not be cleared: `graphs` (CUDA graphs captured), `backward` (one is pending).
        kind: the group by which `clear_caches(kinds=...)` chooses.
        automatic: False to have it cleared only when its kind or name is asked for.

    Returns:
        A handle whose `remove()` takes it out again.

    Raises:
        ValueError: the name is a kind's or empty, or a condition or the kind is unknown.
    """
    from memtriage.observe.holders.registered import register_holder

    return register_holder(
        name, values, clear, holds=holds, refills=refills, forbidden=forbidden, kind=kind, automatic=automatic
    )


def compact(devices: Any = None, *, dry_run: bool = False, keep: Iterable[Any] = ()) -> Compaction:
    """Move the few live storages that strand mostly empty segments; give the memory back to the driver.

    Every tensor, view, saved tensor and alias keeps its values and stays valid: storages move, their objects
    stay. Afterwards nothing releasable is cached either. For the end of a phase or of a step: no other thread
    may be using the device.

    Args:
        devices: CUDA devices (`0`, `"cuda:1"`, a `torch.device`, or several); all that are in use by default.
        dry_run: move nothing; the result's `predicted` is what moving would come to.
        keep: tensors or storages that must stay where they are.

    Returns:
        Per device: allocated and reserved before, predicted and after; bytes moved; what could not be moved,
        and why. Empty, with a note, where CUDA is not in use. Sizes in bytes.

    Raises:
        memtriage.treat.compact.CompactionError: memory that storages had given up for the move was taken by
            somebody else before they had it back. The error holds their values; see its `restore()`.
        ValueError: there is no such device.
        RuntimeError: the device failed; values are in place. Running out of memory is no error: the result's
            `stopped` says so.

    Limits: nothing moves while a CUDA graph is alive. Addresses handed out (DLPack to another library, raw
    pointers) cannot be seen: name such tensors in `keep`. See docs/compact.md.
    """
    from memtriage.treat.compact import compact

    return compact(devices, dry_run=dry_run, keep=keep)


def park(*what: Any, despite_graphs: bool = False) -> Parked:
    """Moves storages to page-locked host memory and gives their device memory back. Sizes in bytes.

    Every view and alias stays valid, as the storage objects stay: they are empty meanwhile. Using a parked
    tensor raises `memtriage.treat.park.ParkedError`. The host memory is kept for the next time;
    `release_parking()` gives it back.

    Args:
        what: models, optimizers, tensors, storages, and containers of these. A model stands for its
            parameters, gradients and buffers, an optimizer for its state. The names `parameters`,
            `gradients`, `buffers` and `optimizer_state` among them restrict models and optimizers to these.
        despite_graphs: the caller says that no captured CUDA graph that is still alive uses any of it.
            Otherwise nothing is parked while there is one.

    Returns:
        What was moved; also a context manager that brings it back.

    Raises:
        memtriage.treat.park.ParkError: something of it is parked already, or is nothing that can be parked; a
            RuntimeError. Nothing was moved.
        MemoryError: the host has too little memory. Nothing was moved.
        Whatever else interrupts has a note that says what is parked and what is on the device.

    Limits: waits for all work on the device. CPU storages are parked only in a process without CUDA.
    Memory whose address somebody keeps (a captured CUDA graph, DLPack) must not be parked; see docs/park.md.
    """
    from memtriage.treat.park import park

    return park(*what, despite_graphs=despite_graphs)


def unpark(*what: Any) -> Moved:
    """Brings parked storages back to the device that they came from, bit for bit. Sizes in bytes.

    Args:
        what: as for `park`, or what `park` returned; nothing for all that is parked.

    Raises:
        memtriage.treat.park.ParkError: nothing of it is parked, or something got device memory from elsewhere
            meanwhile; a RuntimeError.
        torch.OutOfMemoryError: too little device memory. What was brought back stays; the rest is still
            parked, and the call can be repeated.
    """
    from memtriage.treat.park import unpark

    return unpark(*what)


def release_parking() -> int:
    """Gives host memory that `park` keeps for the next time back to the system.

    Returns:
        Its bytes. What holds parked storages stays.
    """
    from memtriage.treat.park import release_parking

    return release_parking()


def phase(name: str, policy: PhasePolicy | None = None) -> Phase:
    """A context manager whose end makes the devices as empty as they can be. Sizes in bytes.

        with memtriage.phase("train", policy=memtriage.PhasePolicy(park=(model, optimizer))):
            train()

    At the end transient caches of known holders are cleared, garbage is collected, what the policy names is
    parked on the host, and the rest is compacted; then one line for each device is printed, in the
    frameworks' own
    words, with what stays below it:

        GPU Memory after train: 0.02GB allocated, 0.04GB reserved

    In a watched run the end is a mark (`after train`), and what stays is a finding of kind `residue`.

    Args:
        name: of the phase, one line.
        policy: what to bring back at the beginning, and what to do at the end; `PhasePolicy()` by default,
            which parks nothing.

    Raises:
        ValueError, TypeError: the name or the policy is none.
        Exception: at the end, what failed of it, after the rest was done and the line printed; an exception
            of the block goes first.
    """
    from memtriage.treat.phase import DEFAULT, Phase

    return Phase(name, DEFAULT if policy is None else policy)


def malloc_trim() -> Trimmed:
    """Give memory that was freed, and that the C library keeps, back to the system. Sizes in bytes.

    For the end of a phase: after loading a checkpoint, after evaluation. Freed tensors up to 32 MiB stay
    resident otherwise; `gc.collect()` does not change that. What is alive is not touched.

    Limits: does nothing (and says so: `supported`) where malloc is not glibc's.
    """
    from memtriage.treat.host_tuning import malloc_trim

    return malloc_trim()


def malloc_settings() -> dict[str, str]:
    """Environment variables under which freed host memory goes back to the system, for a launcher to set.

    `memtriage run --host-tuning` starts a script with them. malloc reads them when a process begins: setting
    them in `os.environ` helps processes that are started later, not this one.

    Limits: glibc only. A model trained on the CPU gets slower, for every temporary tensor is faulted in anew.
    """
    from memtriage.treat.host_tuning import MALLOC_SETTINGS

    return dict(MALLOC_SETTINGS)


def deepspeed_exact_host_memory(*, share_gradient_sums: bool = False) -> ExactHostMemory:
    """Have DeepSpeed's ZeRO-1/2 optimizer offload take 16 bytes of host memory a parameter, for 18 to 28.

    Call it before `deepspeed.initialize`. Pinned memory takes its exact size, the 16-bit staging copy gives
    way to small tiles, malloc is trimmed after the first step. No result changes by a bit.

    Args:
        share_gradient_sums: with gradient accumulation, keep the 16-bit sums of the micro-batches in the
            memory of the fp32 gradients: 16 bytes rather than 18. Raises `SumsLost` in a step in which
            parameters go unused in some of the micro-batches.

    Returns:
        What takes it back: `undo()`, or the end of its `with` block.

    Raises:
        ImportError: DeepSpeed is not installed.
        memtriage.treat.deepspeed.UnknownDeepSpeed: its parts are not those that are known; nothing changed.
        RuntimeError: it is on already.

    Limits: see `memtriage.treat.deepspeed.ExactHostMemory`. Engines made before stay as they are.
    """
    from memtriage.treat.deepspeed import ExactHostMemory

    return ExactHostMemory(share_gradient_sums=share_gradient_sums)


def explain(text: str, shapes: Mapping[str, int] | None = None) -> Explanation:
    """What an error text or a log proves of its first failure, with fixes in order of cost. Sizes in bytes.

    Looks at the text alone. Any text is accepted; one without a failure of memory is `unknown`.

    Args:
        text: an error message, a traceback, or a whole log of several ranks.
        shapes: sizes by name (batch, seq, vocab, hidden, heads, ...), to factor the failing request;
            `params`, `ranks` and `layers` serve to reckon savings.
    """
    from memtriage.diagnose.explain import explain_text

    return explain_text(text, shapes)


def load_snapshot(path: str | os.PathLike[str]) -> Recording:
    """A PyTorch memory snapshot, replayed and judged: timelines, owners, sites, segments, findings.

    The file can run nothing: what is not plain containers, text and numbers is refused.

    Args:
        path: what `torch.cuda.memory._dump_snapshot` wrote; also compressed with gzip, xz or zstd.

    Raises:
        memtriage.observe.snapshot_file.SnapshotError: the file is no snapshot, or is damaged; a ValueError.
        OSError: the file cannot be read.
    """
    from memtriage.diagnose.recording import read_recording

    return read_recording(path)


def predict(
    build: Callable[[Any], Any],
    *,
    steps: int = 2,
    allocator_conf: str = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
) -> Prediction:
    """The peak memory of a training step, without a GPU and without running it. Sizes in bytes.

    `build(device)` and its steps are run with tensors that have no data and pass for CUDA tensors.

    Args:
        build: returns `(model, optimizer, step)`; `step()` runs one optimizer step.
        steps: how many are traced; the peaks are those of the last one. The first lacks what the optimizer
            makes in it.
        allocator_conf: as in `PYTORCH_CUDA_ALLOC_CONF`, e.g. `expandable_segments:True`.
        gpu: kind of GPU: `h200`, `h100`, `a100`, `l4`, ...
        world_size, rank: ranks of the job (DDP, FSDP2, ...), and the one that is predicted.
        torch_version: whose allocator and kernels are meant, e.g. `2.11.0`; the installed one by default.

    Raises:
        ValueError: an argument is out of range, `build` returns something else, or the program raises; the
            text says what to change.

    Limits: one process on one GPU; `torch.compile` is traced as eager code; kernels from
    outside PyTorch (Triton, CUDA extensions) need a shape function.
    """
    from memtriage.predict.api import predict

    return predict(
        build,
        steps=steps,
        allocator_conf=allocator_conf,
        gpu=gpu,
        world_size=world_size,
        rank=rank,
        torch_version=torch_version,
    )


def plan(
    build: Callable[..., Any],
    budget: int | str,
    *,
    allocator_conf: str = "",
    gpu: str = "h200",
    torch_version: str | None = None,
    world_size: int = 1,
    allow: Iterable[str] = (),
) -> Plan:
    """The cheapest set of changes with which a training step fits a budget. Sizes in bytes.

    Every candidate is predicted anew, as by `predict`: the build function is run and changed many times.

    Args:
        build: returns `(model, optimizer, step)`; `step()` runs one optimizer step. Smaller micro-batches are
            tried where `build` or `step` has a keyword for the batch, such as `micro_batch=16`.
        budget: bytes that the process may use of the device in all, those outside the allocator included; or
            text, as `80GiB`. 5 % of it stay free.
        allocator_conf, gpu, torch_version: as in `predict`.
        world_size: GPUs of the job: with several, FSDP2 is tried too. The budget is that of one.
        allow: rungs that change the task and are tried only when asked for: `LoRA`, `shorter inputs`.

    Raises:
        ValueError: an argument is out of range, or the program itself cannot be predicted; the text says what
            to change. A change that makes the program fail is passed over.

    Limits: as of `predict`. 8-bit and offloaded optimizers are simulated by the states that they keep on the
    device; speed is told by operations counted, not by time.
    """
    from memtriage.predict.plan.api import plan

    return plan(
        build,
        budget,
        allocator_conf=allocator_conf,
        gpu=gpu,
        torch_version=torch_version,
        world_size=world_size,
        allow=allow,
    )
