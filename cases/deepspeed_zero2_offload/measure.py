"""One training run with its optimizer on the host, and what it cost in host memory. Started by `run.py`.

    python measure.py '{"optimizer": "deepspeed", "layers": 12, "width": 4096, ...}'

Prints one JSON object: see `Measured`. A process measures once: memory that an earlier run left behind would
count for the later one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

import memtriage
from memtriage.account.host_reading import read_host
from memtriage.model.host_step import HostStep
from memtriage.model.paths import in_words
from memtriage.observe.host import rss
from memtriage.observe.host_peak import PeakMeter

ROWS: Final = 4
STEPS: Final = 4
TINY: Final = 64
BUCKET: Final = 5_000_000
"""Elements of DeepSpeed's reduction buckets, small: on a machine without a GPU they are host memory."""

TENSORS: Final = frozenset(
    {"CPU tensors", "pinned tensors", "tensors in shared memory", "tensors in mapped files"}
)

SHOWN: Final = 0.004
"""Bytes per parameter below which a tensor is summed up with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does.

    Attributes:
        optimizer: `deepspeed` (ZeRO-2 with `offload_optimizer`) or `memtriage` (`OffloadedAdamW`).
        layers, width: of the model, a stack of bias-free `Linear(width, width)` in bfloat16.
        device: `cuda` or `cpu`.
        pin: DeepSpeed's `offload_optimizer.pin_memory`.
        remedy: under `memtriage.deepspeed_exact_host_memory()`.
        share: with the remedy, its `share_gradient_sums`.
        state: type of the moments, `float32` or `bfloat16`; OffloadedAdamW only.
        micro_batches: gradient accumulation steps.
        calls: measure single calls by `memtriage.host_step`. It trims malloc before each.
        port, rank, ranks: for the process group.
    """

    name: str
    optimizer: str
    layers: int
    width: int
    device: str
    pin: bool = True
    remedy: bool = False
    share: bool = False
    state: str = "float32"
    micro_batches: int = 1
    calls: bool = False
    port: int = 0
    rank: int = 0
    ranks: int = 1

    @property
    def parameters(self) -> int:
        return self.layers * self.width * self.width


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one process saw. Bytes; what comes after `start` is growth over `baseline`.

    Attributes:
        job: as given.
        parameters: of the whole model.
        imported: resident set when torch and memtriage are imported, and nothing has been used.
        baseline: resident set with libraries loaded, CUDA and the process group set up, and the model made.
        start: rows of the host ledger then.
        after: resident set after `initialize` and each step.
        peak: highest resident set, by the same names.
        rows: growth of each row of the host ledger after the last step; sums to `ledger`.
        ledger: growth of the ledger's total.
        retained: what `malloc_trim` gave back at the end.
        trimmed: growth that is left then.
        calls: the texts and figures of `host_step`.
        digest: of the weights after the last step.
        step_s: seconds of the last step.
    """

    job: dict[str, Any]
    parameters: int
    imported: int = 0
    baseline: int = 0
    start: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    ledger: int = 0
    retained: int = 0
    trimmed: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model with its optimizer; `owned` is kept so that the census can name what it holds."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]
    owned: Any

    def micro_batch(self, rows: torch.Tensor) -> None:
        self.backward(self.forward(rows).float().square().mean())


def make_model(job: Job, layers: int, width: int) -> torch.nn.Sequential:
    """Weights that neither shrink nor blow up what passes through, so that every layer has a gradient."""
    generator = torch.Generator(device=job.device).manual_seed(0)
    model = torch.nn.Sequential()
    for _ in range(layers):
        layer = torch.nn.Linear(width, width, bias=False, device=job.device, dtype=torch.bfloat16)
        torch.nn.init.normal_(layer.weight, std=width**-0.5, generator=generator)
        model.append(layer)
    return model


def batch(job: Job, number: int) -> torch.Tensor:
    """The rows of a micro-batch; each rank has its own."""
    generator = torch.Generator(device=job.device).manual_seed(1000 * number + job.rank)
    rows = torch.randn(ROWS, job.width, device=job.device, generator=generator)
    return rows.to(torch.bfloat16)


def deepspeed_trainer(job: Job, model: torch.nn.Module) -> Trainer:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": job.micro_batches,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "offload_optimizer": {"device": "cpu", "pin_memory": job.pin},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return Trainer(engine, engine.backward, engine.step, engine)


def offloaded_trainer(job: Job, model: torch.nn.Module) -> Trainer:
    optimizer = memtriage.OffloadedAdamW(
        model.parameters(),
        lr=1e-4,
        state_dtype=getattr(torch, job.state),
        process_group=dist.group.WORLD if job.ranks > 1 else None,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, lambda loss: loss.backward(), step, optimizer)


def trainer(job: Job, model: torch.nn.Module) -> Trainer:
    return (deepspeed_trainer if job.optimizer == "deepspeed" else offloaded_trainer)(job, model)


def resident() -> int:
    """The resident set, after everybody has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    gc.collect()
    return rss() or 0


def prepare(job: Job) -> None:
    """Set up CUDA and the process group, and have libraries load what they load on first use."""
    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
    os.environ |= {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }
    backend = "nccl" if job.device == "cuda" else "gloo"
    if job.optimizer == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(backend, verbose=False)
    elif job.ranks > 1:
        dist.init_process_group(backend)
    wide = make_model(job, 1, job.width)
    wide(torch.ones(ROWS, job.width, device=job.device, dtype=torch.bfloat16)).sum().backward()
    del wide
    tiny = make_model(job, 1, TINY)
    first = trainer(job, tiny)
    for _ in range(2):
        for _ in range(job.micro_batches):
            first.micro_batch(torch.ones(ROWS, TINY, device=job.device, dtype=torch.bfloat16))
            if job.optimizer == "deepspeed":
                first.step()
        if job.optimizer != "deepspeed":
            first.step()
    if job.optimizer == "deepspeed":
        first.owned.destroy()
    else:
        first.owned.close()


def known_buffers(model: torch.nn.Module, owned: Any) -> dict[int, str]:
    """What large tensors on the host are, by address: DeepSpeed's attributes and the model's weights."""
    known = {parameter.untyped_storage().data_ptr(): "weights" for parameter in model.parameters()}
    zero = getattr(owned, "optimizer", None)
    if not hasattr(zero, "single_partition_of_fp32_groups"):
        return known

    def add(tensors: Iterable[Any], label: str) -> None:
        known.update(
            (tensor.untyped_storage().data_ptr(), label)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
        )

    # First: they may be in the gradients, which are named then.
    add(zero.accumulated_grads_in_cpu.values(), "16-bit gradient sums of micro-batches")
    masters = zero.single_partition_of_fp32_groups
    add(masters, "fp32 master weights")
    add((master.grad for master in masters), "fp32 gradients")
    for moment in ("exp_avg", "exp_avg_sq"):
        add((state.get(moment) for state in zero.optimizer.state.values()), moment)
    add(zero.param_buffer_of_bit16_for_cpu_offload_groups, "16-bit staging copy")
    add([zero.temp_grad_buffer_for_cpu_offload], "gradient buffer that nothing uses")
    add([zero.temp_grad_buffer_for_gpu_offload], "gradient buffer of the device")
    return known


def ledger_rows(model: torch.nn.Module, owned: Any) -> tuple[dict[str, int], int]:
    """The host ledger's rows, large tensors by what they are or who holds them, and its total; bytes.

    The counters are read first: what the census needs is in none of them.
    """
    reading = read_host()
    assert reading is not None, "needs /proc/self/smaps"
    on_host = [storage for storage in memtriage.census().storages if storage.device == "cpu"]
    known = known_buffers(model, owned)
    rows: dict[str, int] = defaultdict(int)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ledger = reading.ledger(on_host)
    for row in ledger.rows:
        if row.row not in TENSORS:
            rows[row.row] += row.bytes
    for place in reading.places(on_host):
        holder = (in_words(place.path) if place.path else place.owner).replace(
            "frame ledger_rows(): owned", "optimizer"
        )
        label = known.get(place.address, holder)
        kind = "pinned" if place.row == "pinned tensors" else "pageable"
        shown = place.nbytes >= SHOWN * parameters
        rows[f"{label}, {kind}" if shown else "smaller tensors"] += place.resident
    return dict(rows), ledger.total


def weights_digest(model: torch.nn.Module) -> str:
    sums = hashlib.sha256()
    for parameter in model.parameters():
        sums.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()[:16]


def plain(call: HostStep) -> dict[str, Any]:
    """A `host_step` as numbers and as the text that memtriage prints."""
    return {
        "name": call.name,
        "added": call.added,
        "transient": call.transient,
        "text": str(call),
        "rows": {
            f"{delta.row} ({delta.owner})" if delta.owner else delta.row: delta.bytes for delta in call.deltas
        },
    }


def measure(job: Job) -> Measured:
    """Train and measure, in this process."""
    measured = Measured(job=asdict(job), parameters=job.parameters, imported=rss() or 0)
    prepare(job)
    gc.collect()  # what was tried out holds itself in cycles
    model = make_model(job, job.layers, job.width)
    ledger_rows(model, None)  # for the second time it needs no new memory
    memtriage.malloc_trim()
    before, total_before = ledger_rows(model, None)
    memtriage.malloc_trim()
    measured.baseline, measured.start = resident(), before

    @contextmanager
    def phase(name: str, *, call: bool) -> Iterator[None]:
        watch = memtriage.host_step(name) if call and job.calls else None
        meter = PeakMeter()
        meter.start()
        with watch or nullcontext():
            yield
        measured.peak[name] = meter.stop() - measured.baseline
        measured.after[name] = resident() - measured.baseline
        if watch is not None:
            measured.calls.append(plain(watch.result))

    with phase("initialize", call=True):
        subject = trainer(job, model)
    for number in range(1, STEPS + 1):
        first = number == 1
        with phase(f"backward {number}", call=first):
            for micro_batch in range(job.micro_batches):
                subject.micro_batch(batch(job, number * job.micro_batches + micro_batch))
                if job.optimizer == "deepspeed" and micro_batch + 1 < job.micro_batches:
                    subject.step()
        began = time.perf_counter()
        with phase(f"step {number}", call=first):
            subject.step()
            resident()
        measured.step_s = time.perf_counter() - began
    after, total_after = ledger_rows(model, subject.owned)
    measured.rows = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    measured.ledger = total_after - total_before
    measured.retained = memtriage.malloc_trim().returned
    measured.trimmed = resident() - measured.baseline
    measured.digest = weights_digest(model)
    return measured


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    with (
        memtriage.deepspeed_exact_host_memory(share_gradient_sums=job.share) if job.remedy else nullcontext()
    ):
        measured = measure(job)
        print(json.dumps(asdict(measured)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
