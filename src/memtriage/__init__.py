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
    from memtriage.account.host_step import host_step
    from memtriage.model.census import Census
    from memtriage.model.explanation import Explanation
    from memtriage.model.ledger import Ledger
    from memtriage.model.plan import Plan
    from memtriage.model.prediction import Prediction
    from memtriage.model.recording import Recording
    from memtriage.session.run import Watch
    from memtriage.treat.host_tuning import Trimmed
    from memtriage.treat.offload import OffloadedAdamW

# Loaded now, while it is empty: at its first import a package takes its name in here, which is to be the
# function's.
importlib.import_module("memtriage.predict")

__version__ = "0.1.0"
__all__ = [
    "OffloadedAdamW",
    "__version__",
    "census",
    "explain",
    "host_step",
    "ledger",
    "load_snapshot",
    "malloc_settings",
    "malloc_trim",
    "mark",
    "plan",
    "predict",
    "step",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Classes are loaded when they are first asked for: `OffloadedAdamW` needs torch."""
    if name == "host_step":
        from memtriage.account.host_step import host_step

        return host_step
    if name == "OffloadedAdamW":
        from memtriage.treat.offload import OffloadedAdamW

        return OffloadedAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def watch(directory: str | os.PathLike[str] | None = None, *, quiet: bool = False) -> Watch:
    """A context manager that watches the block inside it, as `memtriage run` watches a script.

    Marks are made by `torch.autograd.backward` and by optimizer steps. One census is taken for the ledger (at
    the third step, or at the end of a shorter run), others only when growth or an out-of-memory error asks
    for one. On exit everything installed is removed, the report is printed to
    stderr, and the result (`memtriage.model.RunReport`) stands in the watch's `report`.

    Args:
        directory: where the record goes; `$MEMTRIAGE_DIR` or `memtriage-run` by default.
        quiet: print nothing.

    Raises:
        RuntimeError: on entering, when this process is watched already.

    Limits: one watch at a time in a process. Steps of compiled optimizers and of optimizers that are no
    `torch.optim.Optimizer`, and replays of CUDA graphs, make no marks: call `step()` after each.
    """
    from memtriage.session.run import Watch

    return Watch(directory, quiet=quiet)


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
