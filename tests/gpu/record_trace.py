"""Programs whose allocator history is recorded: `python record_trace.py NAME FILE.pickle.gz`.

Run with `PYTORCH_CUDA_ALLOC_CONF` set. Beside the recording a JSON file says what it was made with. No stacks
are recorded, so that files stay small.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

LIVE = 60
SLEEP_CYCLES = 2_000_000
"""About a millisecond on a side stream: long enough for frees to await it."""


def churn(count: int = 2500, *, largest: float = 28.3, streams: int = 1, flushes: bool = True) -> None:
    """Allocate and free tensors of sizes that come again and again, on some streams, sharing some of them."""
    chance = random.Random(7)
    sizes = [int(2 ** chance.uniform(6, largest)) for _ in range(30)]
    lanes = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(streams - 1))]
    live: list[torch.Tensor] = []
    for step in range(count):
        if flushes and step % 500 == 499:
            torch.cuda.empty_cache()
        if live and chance.random() < len(live) / LIVE:
            live.pop(chance.randrange(len(live)))
            continue
        lane = chance.choice(lanes)
        try:
            with torch.cuda.stream(lane):
                tensor = torch.empty(chance.choice(sizes), dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            del live[: len(live) // 4]
            continue
        live.append(tensor)
        if streams > 1 and chance.random() < 0.3:
            other = chance.choice(lanes)
            with torch.cuda.stream(other):
                torch.cuda._sleep(SLEEP_CYCLES)
            tensor.record_stream(other)


def train(steps: int = 4) -> None:
    """A small transformer with a sequence length of its own in each step."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.randn(8, 128 * (1 + step * 3 % 4), 512, device="cuda")
        model(tokens).square().mean().backward()
        optimizer.step()
    del tokens
    torch.cuda.empty_cache()


def pools() -> None:
    """Allocations in a `MemPool`, in another that may not split, and in a captured CUDA graph; all kept."""
    mine = torch.cuda.MemPool()
    outside = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (1, 5, 30)]
    with torch.cuda.use_mem_pool(mine):
        inside = [torch.empty(size << 18, dtype=torch.uint8, device="cuda") for size in (1, 3, 9, 50, 120)]
        del inside[1], inside[2]
        inside.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
    del outside[1]
    weights = [torch.randn(1024, 1024, device="cuda") for _ in range(3)]
    entry = torch.randn(256, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            _layers(entry, weights)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result = _layers(entry, weights)
    graph.replay()
    del inside[0]
    torch.cuda.empty_cache()
    outside.append(torch.empty(7 << 20, dtype=torch.uint8, device="cuda"))
    _save.keep += [mine, inside, outside, weights, graph, result]


def _layers(value: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        value = torch.relu(value @ weight)
    return value


PROGRAMS: dict[str, Callable[[], None]] = {
    "churn": churn,
    "churn_on_streams": lambda: churn(streams=3),
    "churn_of_large": lambda: churn(1500, largest=29.5),
    "churn_without_flushes": lambda: churn(flushes=False),
    "train": train,
    "pools": pools,
}


class _Save:
    """Writes the recording; keeps alive what should be alive in it."""

    def __init__(self) -> None:
        self.keep: list[object] = []

    def __call__(self, program: str, path: Path) -> None:
        snapshot = torch.cuda.memory._snapshot()
        with gzip.open(path, "wb", compresslevel=9) as file:
            pickle.dump(snapshot, file)
        made_with = {
            "program": program,
            "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "device_memory": torch.cuda.get_device_properties(0).total_memory,
        }
        path.with_name(path.name.replace(".pickle.gz", ".json")).write_text(
            json.dumps(made_with, indent=1) + "\n"
        )


_save = _Save()


def main(program: str, path: Path) -> None:
    """Run a program from its first allocation on under recording."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    PROGRAMS[program]()
    torch.cuda.synchronize()
    _save(program, path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
