"""Parking a model with its Adam state, and bringing it back, against a plain pinned copy in the same process.

    python benchmarks/park.py [--parameters N] [--cycles N] [--out FILE]

A decoder's weights in bfloat16 (vocabulary, attention and MLP matrices, norms) with two float32 moments for
each: 10 bytes per parameter. Nothing is trained: the values are random, and compared after the cycles.

copy      what `copy_` between one page-locked gibibyte and one on the device reaches, each way, median.
down, up  bytes moved by the time of the whole call (park gives the memory back to the driver too); cycles
          after the first. The first one has to map and page-lock the host memory, and is reported apart.
share     of the plain copy.
after     allocated and reserved bytes when all is parked.

Without a GPU it runs on the CPU, smaller, to try it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import memtriage
from memtriage.treat.offload.pinned import PinnedMemory

GIB: Final = 1 << 30
MIB: Final = 1 << 20
COPIES: Final = 7
WIDTH: Final = 2560
VOCABULARY: Final = 64_000
ON_CPU: Final = 2_000_000
TARGET: Final = 0.8


def main() -> int:
    """Measure, print and write the figures; 1 when a way is too slow on a GPU, or a value differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=2e9)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "torch": torch.__version__,
    }
    copied = plain_copy(device, GIB if on_gpu else 16 * MIB)
    figures["copy"] = copied
    say(f"{figures['device']}, torch {figures['torch']}")
    say(f"plain copy: down {rate(copied['down'])}, up {rate(copied['up'])}")
    count = int(options.parameters) if on_gpu else min(int(options.parameters), ON_CPU)
    model = Decoder(count, device)
    optimizer = with_moments(model)
    tensors = list(everything(model, optimizer))
    before = [fingerprint(tensor) for tensor in tensors]
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    figures |= {"parameters": model.count, "bytes": total, "storages": len(tensors)}
    say(f"{model.count / 1e9:.2f}B parameters, {total / GIB:.2f} GiB in {len(tensors):,} storages")
    figures["cycles"] = [cycle(number, model, optimizer, device) for number in range(options.cycles)]
    figures["identical"] = [fingerprint(tensor) for tensor in tensors] == before
    say(f"values after {options.cycles} cycles: {'identical' if figures['identical'] else 'DIFFERENT'}")
    warm = figures["cycles"][1:] or figures["cycles"]
    for way in ("down", "up"):
        best = statistics.median(reading[way] for reading in warm)
        figures[f"{way}_share"] = best / copied[way]
        say(f"{way}: {rate(best)}, {best / copied[way]:.0%} of the plain copy")
    figures["released"] = memtriage.release_parking()
    say(f"host memory given back: {figures['released'] / GIB:.2f} GiB")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))
    fast = min(figures["down_share"], figures["up_share"]) >= TARGET or not on_gpu
    return 0 if figures["identical"] and fast else 1


class Decoder(nn.Module):
    """Matrices of a decoder, about so many parameters in all, made on the device; it computes nothing."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        super().__init__()
        width = WIDTH if parameters > 100_000_000 else 128
        vocabulary = VOCABULARY if width == WIDTH else 1_000
        inner = 4 * width
        each = 4 * width * width + 3 * width * inner + 2 * width
        layers = max(1, -(-(parameters - 2 * vocabulary * width) // each))  # not fewer than asked for
        shapes = [(vocabulary, width), (vocabulary, width)]
        for _ in range(layers):
            shapes += [(3 * width, width), (width, width), (inner, width), (inner, width), (width, inner)]
            shapes += [(width,), (width,)]
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device)) for shape in shapes
        )
        self.count = sum(matrice.numel() for matrice in self.matrices)


def with_moments(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with float32 moments, as mixed-precision training keeps them."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = (torch.randn_like(parameter, dtype=torch.float32) for _ in range(2))
        optimizer.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    return optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors that are parked."""
    yield from (parameter.detach() for parameter in model.parameters())
    for state in optimizer.state.values():
        yield from state.values()


def fingerprint(tensor: Tensor) -> int:
    """A number that changes with the bits of any element."""
    return int(tensor.view(torch.int16).sum(dtype=torch.int64).item())


def cycle(
    number: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Park all, look at the device, bring all back."""
    parked = memtriage.park(model, optimizer)
    use = {"allocated": 0, "reserved": 0}
    if device.type == "cuda":
        use = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    back = memtriage.unpark()
    release = parked.seconds - parked.host_seconds - parked.copy_seconds
    say(
        f"cycle {number}: park {parked.seconds:.3f} s (host {parked.host_seconds:.3f}, copy "
        f"{parked.copy_seconds:.3f}, release {release:.3f}), unpark {back.seconds:.3f} s; after park "
        f"allocated {use['allocated'] / MIB:.1f} MiB, reserved {use['reserved'] / MIB:.1f} MiB"
    )
    return {
        "down": parked.nbytes / parked.seconds,
        "up": back.nbytes / back.seconds,
        "park_s": parked.seconds,
        "host_s": parked.host_seconds,
        "copy_s": parked.copy_seconds,
        "unpark_s": back.seconds,
        **use,
    }


def plain_copy(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes a second of one copy each way between page-locked memory and the device."""
    memory = PinnedMemory(nbytes, pin=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    figures = {
        "down": nbytes / timed(lambda: memory.bytes.copy_(there, non_blocking=True), device),
        "up": nbytes / timed(lambda: there.copy_(memory.bytes, non_blocking=True), device),
    }
    memory.close()
    return figures


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of some calls, each until the device is done."""
    seconds = []
    for _ in range(COPIES):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.1f} GB/s"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
