"""Host memory of ZeRO-2 optimizer offload, byte by byte, and what two cures make of it.

    python cases/deepspeed_zero2_offload/run.py [--cpu] [--only NAME ...] [--out FILE]

Each measurement is a process of its own; a few run at a time, for none of them is timed. With a GPU: models
of 201 M, 285 M and 1007 M parameters, NCCL. Without one (or with `--cpu`): 50 M and 25 M, gloo. DeepSpeed's
CPU Adam is compiled at its first use: that takes a minute, or four on a small machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import page  # noqa: E402
from measure import Job  # noqa: E402

TIME_LIMIT_S: Final = 240
BUILD_LIMIT_S: Final = 600
AT_A_TIME: Final = 4
NOTABLE: Final = 10_000_000
"""Bytes from which a row of what was there before is told."""

BUILD: Final = """
import sys
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    get_accelerator().create_op_builder(name).load(verbose=False)
"""
BUILT: Final = {"cuda": ("CPUAdamBuilder",), "cpu": ("CPUAdamBuilder", "ShareMemCommBuilder")}
"""What DeepSpeed compiles at its first use of a device."""


Outcome = list[dict[str, Any]] | str
"""What each rank measured, or why there is nothing."""


def gpu_jobs(gpus: int) -> Iterator[Job]:
    small = Job(name="", optimizer="memtriage", layers=12, width=4096, device="cuda")
    large = replace(small, layers=60)
    their_small, their_large = (replace(options, optimizer="deepspeed") for options in (small, large))
    yield replace(large, name="OffloadedAdamW, 1B")
    yield replace(large, name="OffloadedAdamW bf16 states, 1B", state="bfloat16")
    yield replace(small, name="OffloadedAdamW, 200M")
    yield replace(small, name="OffloadedAdamW bf16 states, 200M", state="bfloat16")
    yield replace(small, name="OffloadedAdamW by call, 200M", calls=True)
    yield from both("DeepSpeed pinned", "1B", their_large)
    yield from both("DeepSpeed pinned", "200M", their_small)
    # Its flat buffers lie just above a power of two.
    yield from both("DeepSpeed pinned", "285M", replace(their_small, layers=17))
    yield from both("DeepSpeed pageable", "200M", replace(their_small, pin=False))
    yield from with_micro_batches("DeepSpeed pinned", "200M", their_small)
    yield from both("DeepSpeed pinned by call", "200M", replace(their_small, calls=True))
    if gpus > 1:
        yield replace(large, name="OffloadedAdamW 2 ranks, 1B", ranks=2)
        yield from both("DeepSpeed pinned 2 ranks", "1B", replace(their_large, ranks=2))


def cpu_jobs() -> Iterator[Job]:
    job = Job(name="", optimizer="memtriage", layers=12, width=2048, device="cpu", pin=False)
    theirs = replace(job, optimizer="deepspeed")
    yield replace(job, name="OffloadedAdamW, 50M")
    yield replace(job, name="OffloadedAdamW, 25M", layers=6)
    yield replace(job, name="OffloadedAdamW bf16 states, 50M", state="bfloat16")
    yield replace(job, name="OffloadedAdamW 2 ranks, 50M", ranks=2)
    yield replace(job, name="OffloadedAdamW 4 ranks, 50M", ranks=4)
    yield from both("DeepSpeed", "50M", theirs)
    yield from both("DeepSpeed", "25M", replace(theirs, layers=6))
    yield from with_micro_batches("DeepSpeed", "50M", theirs)
    yield from both("DeepSpeed 2 ranks", "50M", replace(theirs, ranks=2))
    yield from both("DeepSpeed by call", "50M", replace(theirs, calls=True))


def both(kind: str, size: str, job: Job) -> Iterator[Job]:
    """DeepSpeed as it is, and with the remedy."""
    yield replace(job, name=f"{kind}, {size}")
    yield replace(job, name=f"{kind} + remedy, {size}", remedy=True)


def with_micro_batches(kind: str, size: str, job: Job) -> Iterator[Job]:
    """With gradient accumulation, and the remedy in both its forms."""
    job = replace(job, micro_batches=2)
    yield from both(f"{kind} 2 micro-batches", size, job)
    yield replace(job, name=f"{kind} 2 micro-batches + remedy sharing sums, {size}", remedy=True, share=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(job: Job) -> dict[str, str]:
    # The script's own folder is on the path by itself; an interpreter that is not activated finds its ninja.
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    extra = {"PATH": path, "NCCL_NVLS_ENABLE": "0"}
    if job.device == "cpu":
        extra |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | extra


def run(job: Job) -> Outcome:
    """One job, in a fresh process for each rank."""
    job = replace(job, port=free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "measure.py"), json.dumps(asdict(replace(job, rank=rank)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(job),
        )
        for rank in range(job.ranks)
    ]
    try:
        with ThreadPoolExecutor(job.ranks) as readers:
            outputs = list(readers.map(lambda one: one.communicate(timeout=TIME_LIMIT_S), running))
    except subprocess.TimeoutExpired:
        return f"took longer than {TIME_LIMIT_S} s"
    finally:
        for child in running:
            child.kill()
    sizes = []
    for process, (output, errors) in zip(running, outputs, strict=True):
        lines = [line for line in output.splitlines() if line.startswith('{"job"')]
        if process.returncode or not lines:
            return "\n".join(errors.strip().splitlines()[-6:]) or f"status {process.returncode}"
        sizes.append(json.loads(lines[-1]))
    return sizes


def build(device: str) -> str:
    """Have DeepSpeed compile its parts, once for all jobs; what there is to say of it."""
    job = Job(name="", optimizer="", layers=0, width=0, device=device)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", BUILD, *BUILT[device]],
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT_S,
            env=environment(job),
        )
    except subprocess.TimeoutExpired:
        return f"DeepSpeed: not compiled within {BUILD_LIMIT_S} s"
    if done.returncode:
        return f"DeepSpeed: {done.stderr.strip().splitlines()[-1:]}"
    return f"DeepSpeed compiled (or found) its operators in {time.perf_counter() - began:.0f} s"


def summed(outcome: Outcome, name: str) -> dict[str, int]:
    """A table of figures, summed over the ranks."""
    totals: dict[str, int] = defaultdict(int)
    for rank in outcome if isinstance(outcome, list) else []:
        for key, nbytes in rank[name].items():
            totals[key] += nbytes
    return dict(totals)


def line(name: str, outcome: Outcome) -> str:
    """Growth after `initialize`, its peak, after the last step, peak of all steps, after a trim of malloc.

    Last what the ledger's rows miss of the last step. Bytes per parameter, summed over the ranks.
    """
    if isinstance(outcome, str):
        return f"{name:52} {outcome}"
    parameters = outcome[0]["parameters"]
    after, peak = summed(outcome, "after"), summed(outcome, "peak")
    held = after["step 4"]
    figures = (
        after["initialize"],
        peak["initialize"],
        held,
        max(nbytes for key, nbytes in peak.items() if key != "initialize"),
        sum(rank["trimmed"] for rank in outcome),
        held - sum(rank["ledger"] for rank in outcome),
    )
    return f"{name:52}" + "".join(f"{nbytes / parameters:10.2f}" for nbytes in figures)


def table(outcome: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The ledger's growth of the first rank, largest rows first; rows that sum to it."""
    first = outcome[0]
    start = ", ".join(
        f"{name} {nbytes / 1e6:.0f}"
        for name, nbytes in sorted(first["start"].items(), key=lambda item: -item[1])
        if nbytes > NOTABLE
    )
    imported, baseline = (f"{first[key] / 1e6:.0f} MB" for key in ("imported", "baseline"))
    yield f"  before: {imported} with torch imported, {baseline} when all is set up ({start})"
    rest = 0
    for name, nbytes in sorted(first["rows"].items(), key=lambda item: -item[1]):
        if abs(nbytes) < 0.01 * first["parameters"]:
            rest += nbytes
        else:
            yield f"  {nbytes / first['parameters']:8.2f}  {nbytes / 1e6:10.1f} MB  {name}"
    yield f"  {rest / first['parameters']:8.2f}  {rest / 1e6:10.1f} MB  rows below 0.01"
    total = first["ledger"]
    yield f"  {total / first['parameters']:8.2f}  {total / 1e6:10.1f} MB  growth of the resident set"


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="without a GPU, even if there is one")
    parser.add_argument("--only", nargs="+", default=(), help="jobs whose name contains one of these")
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()

    import torch

    gpus = 0 if options.cpu else torch.cuda.device_count()
    jobs = list(gpu_jobs(gpus) if gpus else cpu_jobs())
    if options.only:
        jobs = [job for job in jobs if any(word in job.name for word in options.only)]
    if importlib.util.find_spec("deepspeed") is None:
        say("deepspeed is not installed: measuring OffloadedAdamW alone")
        jobs = [job for job in jobs if job.optimizer != "deepspeed"]
    say(f"torch {torch.__version__}, {gpus} GPU(s), {torch.get_num_threads()} threads")
    began = time.perf_counter()
    results: dict[str, Outcome] = {}

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))

    columns = ("init", "init peak", "held", "peak", "trimmed", "- ledger")
    say(f"{'growth in bytes per parameter':52}" + "".join(f"{column:>10}" for column in columns))
    groups = [
        [job for job in jobs if job.optimizer != "deepspeed"],
        [job for job in jobs if job.optimizer == "deepspeed"],
    ]
    with ThreadPoolExecutor(1) as builder, ThreadPoolExecutor(options.at_a_time) as pool:
        built = builder.submit(build, "cuda" if gpus else "cpu") if groups[1] else None
        for group in groups:
            if group is groups[1] and built is not None:
                say(built.result())
            for job, outcome in zip(group, pool.map(run, group), strict=True):
                results[job.name] = outcome
                say(line(job.name, outcome))
                save()
    say("", "after a trim, from the smallest and the largest size:")
    for kind, (each, once) in page.slopes(results).items():
        say(f"{kind:52}{each:10.3f} B/param and {once / 1e6:.0f} MB")
    for name, outcome in results.items():
        if isinstance(outcome, list):
            say("", f"{name}, by buffer:", *table(outcome))
            say(*(call["text"] for call in outcome[0]["calls"]))
    say("", "weights after the last step:")
    say(*(f"{name:52} {result[0]['digest']}" for name, result in results.items() if isinstance(result, list)))
    say(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
