"""What `test_memory.py` runs: resident and peak bytes of this process around optimizers of 20M parameters.

Prints a JSON object: for each kind of optimizer what `measure` returns, in bytes.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import Parameter

from memtriage import OffloadedAdamW

COUNT = 5_000_000
PARAMETERS = 4
TILE = 1 << 16
KINDS: dict[str, dict[str, Any]] = {
    "fp32 moments": {},
    "bf16 moments": {"state_dtype": torch.bfloat16},
    "gradients on the host": {"gradients": "host"},
}


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def anonymous() -> int:
    return _status("RssAnon")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(weights: list[Parameter], settings: dict[str, Any]) -> dict[str, int]:
    """Growth over the model and its gradients, which are there before."""
    gradients = [torch.ones_like(weight) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    optimizer = OffloadedAdamW(weights, tile_elements=TILE, **settings)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does; there is nothing in it yet
    made = resident()
    for _ in range(4):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    stepped = resident()
    highest = peak()
    reserved = optimizer.host_bytes
    optimizer.close()
    del optimizer
    return {
        "made": made - before,
        "stepped": stepped - before,
        "peak": highest - before,
        "closed": resident() - before,
        "reserved": reserved,
    }


def loading(weights: list[Parameter]) -> dict[str, int]:
    """Anonymous memory that loading a checkpoint adds to an optimizer that has all its own."""
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = OffloadedAdamW(weights, tile_elements=TILE)
    optimizer.step()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "state")
        before = anonymous()
        torch.save(optimizer.state_dict(), file)
        saved = anonymous()
        optimizer.load_state_dict(torch.load(file, mmap=True))
        gc.collect()
        return {"saved": saved - before, "loaded": anonymous() - before}


def main() -> None:
    torch.set_num_threads(1)
    weights = [Parameter(torch.ones(COUNT, dtype=torch.bfloat16)) for _ in range(PARAMETERS)]
    small = [Parameter(torch.ones(1000, dtype=torch.bfloat16))]
    measure(small, {})  # libraries load, the heap grows
    found: dict[str, dict[str, int]] = {kind: measure(weights, KINDS[kind]) for kind in KINDS}
    found["checkpoint"] = loading(weights)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
