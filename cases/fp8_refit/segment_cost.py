"""What expandable segments cost: mapping memory, apart from sending it through CUDA IPC. Needs a GPU.

    python segment_cost.py [--out FILE]

Each setting of the allocator runs in a fresh process. Per setting, medians over the rounds:

- `map`, `unmap`: seconds to get so many bytes from the driver, in blocks, and to give them back
  (`torch.empty` on an empty cache; `empty_cache`), as each step does around offload and refit;
- `export`: seconds of `reduce_tensor` for a bucket; `open`: until the other process has mapped it; `copy`:
  until its bytes are copied out there; `close`: until it is released.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

import engine

SETTINGS: Final = {
    "default": "",
    "expandable": "expandable_segments:True",
    "expandable, 256 MiB pages": "expandable_segments:True,large_segment_size_mb:256",
}
_MIB: Final = 1 << 20
_BLOCK: Final = 512 * _MIB


def main() -> None:
    """Run every setting, or the one that `--one` names, in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=24, help="memory that is mapped and unmapped a round")
    parser.add_argument("--bucket", type=int, default=1024, help="MiB of a bucket")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.gib, asked.bucket * _MIB, asked.rounds)))
        return
    costs = {}
    for name, setting in SETTINGS.items():
        costs[name] = _in_fresh_process(name, setting)
        print(f"{name:26} {_line(costs[name])}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(costs, indent=1), encoding="utf-8")


def measure(gib: int, bucket: int, rounds: int) -> dict[str, float]:
    """Median seconds of each part under this process's setting. The first round is not counted."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        _map_and_unmap(gib * (1024 * _MIB) // _BLOCK, times)
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    with engine.without_allocator_settings():
        other = spawning.Process(target=_receive, args=(theirs, bucket), daemon=True)
        other.start()
    engine.allow_fd_transfer(other.pid)
    pipe.recv()
    for _ in range(rounds + 1):
        _send_one(pipe, bucket, times)
    pipe.send(None)
    other.join(30)
    return {name: median(values[1:]) for name, values in times.items()}


def _map_and_unmap(blocks: int, times: dict[str, list[float]]) -> None:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    held = [torch.empty(_BLOCK, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
    torch.cuda.synchronize()
    mapped = time.perf_counter()
    held.clear()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    times.setdefault("map", []).append(mapped - begun)
    times.setdefault("unmap", []).append(time.perf_counter() - mapped)


def _send_one(pipe: Connection, bucket: int, times: dict[str, list[float]]) -> None:
    tensor = torch.ones(bucket, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    handle = reduce_tensor(tensor)
    times.setdefault("export", []).append(time.perf_counter() - begun)
    pipe.send(handle)
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"in the receiving process: {answer}")
    for name, seconds in answer.items():
        times.setdefault(name, []).append(seconds)
    del tensor, handle
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _receive(pipe: Connection, bucket: int) -> None:
    torch.cuda.set_device(0)
    own = torch.empty(bucket, dtype=torch.uint8, device="cuda")
    pipe.send("ready")
    while (handle := pipe.recv()) is not None:
        try:
            pipe.send(_take(handle, own))
        except Exception as error:  # told to the sender, which stops
            pipe.send(f"{type(error).__name__}: {error}")


def _take(handle: tuple[Any, tuple[Any, ...]], own: torch.Tensor) -> dict[str, float]:
    rebuild, arguments = handle
    begun = time.perf_counter()
    tensor = rebuild(*arguments)
    opened = time.perf_counter()
    own.copy_(tensor)
    torch.cuda.synchronize()
    copied = time.perf_counter()
    del tensor
    torch.cuda.ipc_collect()
    return {"open": opened - begun, "copy": copied - opened, "close": time.perf_counter() - copied}


def _in_fresh_process(name: str, setting: str) -> dict[str, float] | str:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def _line(found: dict[str, float] | str) -> str:
    if isinstance(found, str):
        return f"failed: {found}"
    return "  ".join(f"{part} {seconds * 1000:8.2f} ms" for part, seconds in found.items())


if __name__ == "__main__":
    main()
