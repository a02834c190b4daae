"""Measures the programs of the rungs, as they are and changed: `measure.py M5 M7` prints a JSON line each.

On a GPU the peaks are the allocator's, over the steps after the first. On a CPU (`--tiny`) each program runs
in a process forked for it, and its peak is the resident set's high-water mark over what it was before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from programs import RANKS, RUNGS, Build, Rung, one_of_ranks

WARM_UP = 2
TIMED = 5
TIMED_ON_CPU = 2
KIB = 1024


@contextmanager
def job(ranks: int) -> Iterator[None]:
    """This process as one rank of a job, where it has several."""
    if ranks == 1:
        yield
        return
    one_of_ranks()
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def on_gpu(build: Build) -> dict[str, Any]:
    """Peaks in bytes, and the median time of a step."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, _, step = build("cuda")
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - 1):
        step()
    took = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "left_by_others": before,
        "step_s": statistics.median(took),
    }


def on_cpu(build: Build) -> dict[str, Any]:
    """The same on the host, in a child process: nothing of it stays here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_on_cpu(build)).encode())
        except BaseException as error:
            os.write(writer, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        report: dict[str, Any] = json.loads(answer.read() or '{"error": "the process died"}')
    os.waitpid(child, 0)
    return report


def _on_cpu(build: Build) -> dict[str, Any]:
    before = _resident("VmRSS")
    _, _, step = build("cpu")
    step()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    took = []
    for _ in range(TIMED_ON_CPU):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return {"resident": _resident("VmHWM") - before, "step_s": min(took)}


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/self/status has no {name}")


def measured(rung: Rung, *, changed: bool, tiny: bool) -> dict[str, Any]:
    """One of a rung's two programs."""
    build = rung.build(changed=changed, tiny=tiny)
    if tiny:
        return on_cpu(build)
    try:
        with job(rung.ranks if changed else 1):
            return on_gpu(build)
    except Exception as error:  # another rung's turn comes in any case
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entries", nargs="+", choices=list(RUNGS))
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--only", choices=["before", "after"], help="one of the two programs")
    options = parser.parse_args()
    torch.manual_seed(0)
    for entry in options.entries:
        results: dict[str, Any] = {"entry": entry, "ranks": RANKS}
        for which, changed in (("before", False), ("after", True)):
            if options.only in (None, which):
                results[which] = measured(RUNGS[entry], changed=changed, tiny=options.tiny)
        print(json.dumps(results), flush=True)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
