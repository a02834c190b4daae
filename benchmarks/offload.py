"""Step time and host memory of CPU-offloaded AdamW, side by side.

    python benchmarks/offload.py [--layers N] [--width N] [--steps N] [--ranks N] [--only NAME ...]
                                 [--tile ELEMENTS] [--out FILE]

A stack of bias-free `Linear(width, width)` in bfloat16 is trained with micro-batches of four rows; each
optimizer in a process of its own, one after another:

offloaded         `memtriage.OffloadedAdamW`
offloaded bf16    the same with bfloat16 moments
offloaded behind  the same, stepped behind the backward pass
deepspeed         DeepSpeed ZeRO-2 with `offload_optimizer` (DeepSpeedCPUAdam), pinned; if it is installed
deepspeed pageable
deepspeed exact    the first under `memtriage.deepspeed_exact_host_memory()`
torch on the CPU  `torch.optim.AdamW(fused=True)` on float32 CPU parameters: the arithmetic alone
GPU               the same on float32 masters on the GPU: what offloading is compared with

step         optimizer.step() (engine.step()) and waiting for the device, median; from the third step on.
iteration    forward, backward and step, median.
limit        the time that a plain copy between two host buffers takes for as many bytes as a step must move
             over the memory bus: 28 a parameter (master and moments read and written, 24; gradient read and
             weight written in bfloat16, 4). A copy's bytes are those it reads and those it writes.
init, held, peak   growth of the resident set over the model on its device, in bytes per parameter: after the
             optimizer was made, after the last step, at its highest. Each process first steps a small
             optimizer of the same kind, so that libraries do not count. `n/a`: the system does not say.

With `--ranks N` (as many GPUs) `offloaded` runs partitioned over N processes, and its bytes are the sum.
Without a GPU it runs on the CPU, smaller, to try it out; DeepSpeed is left out then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

import offload_deepspeed
from memtriage.treat.offload.settings import TILE_ELEMENTS

BYTES_MOVED: Final = 28
ROWS: Final = 4
NARROW: Final = 64
UNTIMED_STEPS: Final = 2
VARIANTS: Final = (
    "offloaded",
    "offloaded bf16",
    "offloaded behind",
    *offload_deepspeed.VARIANTS,
    "torch on the CPU",
    "GPU",
)
TIME_LIMIT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Job:
    """One optimizer on one model, in this process."""

    variant: str
    layers: int
    width: int
    steps: int
    tile: int
    rank: int = 0
    ranks: int = 1
    meeting: str = ""

    @property
    def parameters(self) -> int:
        return self.layers * self.width * self.width


@dataclass(frozen=True, slots=True)
class Result:
    """What one process measured. Bytes are of the process."""

    variant: str
    parameters: int
    step_s: float
    iteration_s: float
    init: int
    held: int
    peak: int | None
    copy_bytes_per_s: float


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def begin_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak(since: int) -> int | None:
    """Highest resident set since `begin_peak`, if the system forgot the peak before it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            highest = int(line.split()[1]) * 1024
            return highest if highest >= since else None
    return None


def copy_speed() -> float:
    """Bytes read and written a second by a plain copy of host memory, best of five: 1 GiB (CPU: 128 MiB)."""
    import torch

    count = (1 << 28) if torch.cuda.is_available() else (1 << 25)
    source, target = torch.ones(count), torch.zeros(count)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def make_model(job: Job, device: str, layers: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Linear(job.width, job.width, bias=False, device=device, dtype=torch.bfloat16)
            for _ in range(layers)
        )
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model and its optimizer, in the way in which they are used together."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any]
    step: Callable[[], Any]

    def micro_batch(self, rows: Any) -> None:
        self.backward(self.forward(rows).float().square().mean())


def plain_backward(loss: Any) -> None:
    loss.backward()


def offloaded(job: Job, model: Any) -> Trainer:
    import torch
    import torch.distributed as dist

    from memtriage import OffloadedAdamW

    optimizer = OffloadedAdamW(
        model.parameters(),
        lr=1e-4,
        tile_elements=job.tile,
        state_dtype=torch.bfloat16 if job.variant.endswith("bf16") else torch.float32,
        overlap_backward=job.variant.endswith("behind"),
        process_group=dist.group.WORLD if job.ranks > 1 else None,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, plain_backward, step)


def deepspeed(job: Job, model: Any) -> Trainer:
    engine = offload_deepspeed.make_engine(model, ROWS, job.variant)
    return Trainer(engine, engine.backward, engine.step)


def masters(job: Job, model: Any) -> Trainer:
    """float32 masters on the CPU or the GPU; the model's gradients stay where they are for the former."""
    import torch

    on_gpu = job.variant == "GPU"
    weights = list(model.parameters())
    copies = [
        torch.nn.Parameter(weight.detach().to("cuda" if on_gpu else "cpu", torch.float32))
        for weight in weights
    ]
    optimizer = torch.optim.AdamW(copies, lr=1e-4, fused=True)
    if not on_gpu:
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)

    def step() -> None:
        if on_gpu:
            for buffer, weight in zip(copies, weights, strict=True):
                buffer.grad = weight.grad.float()
                weight.grad = None
        optimizer.step()
        if on_gpu:
            with torch.no_grad():
                torch._foreach_copy_(weights, copies)

    return Trainer(model, plain_backward, step)


def trainer(job: Job, model: Any) -> Trainer:
    if job.variant.startswith("offloaded"):
        return offloaded(job, model)
    return deepspeed(job, model) if job.variant.startswith("deepspeed") else masters(job, model)


def measure(job: Job) -> Result:
    """Train in this process."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = f"cuda:{job.rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(job.rank)
    if job.meeting:
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{job.meeting}",
            rank=job.rank,
            world_size=job.ranks,
        )

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    speed = copy_speed()
    # Narrow: what torch's allocator keeps of pinned memory would be there for the model that is measured.
    small = make_model(replace(job, width=NARROW), device, 1)
    rows = torch.randn(ROWS, job.width, device=device, dtype=torch.bfloat16)
    first = trainer(job, small)
    first.micro_batch(rows[:, :NARROW])
    first.step()
    wait()
    del small, first

    model = make_model(job, device, job.layers)
    Trainer(model, plain_backward, wait).micro_batch(rows)
    wait()
    before = resident()
    begin_peak()
    subject = trainer(job, model)
    made = resident()
    model.zero_grad()
    steps_s, iterations_s = [], []
    for _ in range(UNTIMED_STEPS + job.steps):
        wait()
        began = time.perf_counter()
        subject.micro_batch(rows)
        wait()
        half = time.perf_counter()
        subject.step()
        wait()
        ended = time.perf_counter()
        steps_s.append(ended - half)
        iterations_s.append(ended - began)
    highest = peak(before)
    return Result(
        variant=job.variant,
        parameters=job.parameters,
        step_s=statistics.median(steps_s[UNTIMED_STEPS:]),
        iteration_s=statistics.median(iterations_s[UNTIMED_STEPS:]),
        init=made - before,
        held=resident() - before,
        peak=None if highest is None else highest - before,
        copy_bytes_per_s=speed,
    )


def run(job: Job) -> Result | str:
    """Run a job in fresh processes, one a rank; the sum of their bytes, or why it failed."""
    with tempfile.TemporaryDirectory() as directory:
        distributed = job.ranks > 1 or job.variant.startswith("deepspeed")
        meeting = os.path.join(directory, "meeting") if distributed else ""
        running = []
        for rank in range(job.ranks):
            one = replace(job, rank=rank, meeting=meeting)
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(job.ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "29577",
                "NCCL_NVLS_ENABLE": "0",
            }
            if job.ranks > 1:
                environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // job.ranks))
            running.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--job", json.dumps(asdict(one))],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        try:
            outputs = [child.communicate(timeout=TIME_LIMIT_S) for child in running]
        except subprocess.TimeoutExpired:
            return f"took longer than {TIME_LIMIT_S} s"
        finally:
            for child in running:
                child.kill()
    results = []
    for process, (output, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            return errors.strip().splitlines()[-1] if errors.strip() else f"status {process.returncode}"
        results.append(Result(**json.loads(output.splitlines()[-1])))
    peaks = [result.peak for result in results if result.peak is not None]
    return replace(
        results[0],
        step_s=max(result.step_s for result in results),
        iteration_s=max(result.iteration_s for result in results),
        init=sum(result.init for result in results),
        held=sum(result.held for result in results),
        peak=sum(peaks) if len(peaks) == len(results) else None,
    )


def line(result: Result) -> str:
    limit_s = BYTES_MOVED * result.parameters / result.copy_bytes_per_s

    def per_parameter(count: int | None) -> str:
        return "n/a" if count is None else f"{count / result.parameters:.2f}"

    return (
        f"{result.variant:20}{result.step_s * 1e3:10.1f}{result.iteration_s * 1e3:14.1f}"
        f"{result.parameters / result.step_s / 1e9:10.2f}{limit_s * 1e3:10.1f}{result.step_s / limit_s:8.2f}"
        f"{per_parameter(result.init):>9}{per_parameter(result.held):>9}{per_parameter(result.peak):>9}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tile", type=int, default=TILE_ELEMENTS, help="elements of a tile")
    parser.add_argument("--only", nargs="+", choices=VARIANTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(asdict(measure(Job(**json.loads(options.job))))))
        return

    import torch

    on_gpu = torch.cuda.is_available()
    job = Job(
        "offloaded",
        layers=options.layers or (12 if on_gpu else 8),
        width=options.width or (4096 if on_gpu else 1024),
        steps=options.steps,
        tile=options.tile,
    )
    installed = on_gpu and offload_deepspeed.installed()
    variants = [
        name
        for name in (options.only or VARIANTS)
        if (installed or not name.startswith("deepspeed")) and (on_gpu or name != "GPU")
    ]
    device = torch.cuda.get_device_name() if on_gpu else "CPU only"
    print(
        f"{job.parameters / 1e6:.0f}M parameters, {device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {options.ranks} rank(s)"
    )
    print(f"{'':20}{'step ms':>10}{'iteration ms':>14}{'Gparam/s':>10}{'limit ms':>10}{'x limit':>8}", end="")
    print(f"{'init B/p':>9}{'held B/p':>9}{'peak B/p':>9}")
    figures = {}
    for variant in variants:
        ranks = options.ranks if variant == "offloaded" else 1
        result = run(replace(job, variant=variant, ranks=ranks))
        figures[variant] = result if isinstance(result, str) else asdict(result)
        print(f"{variant:20}{result}" if isinstance(result, str) else line(result), flush=True)
    if not installed:
        print("deepspeed: not measured (it is not installed, or there is no GPU)")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
