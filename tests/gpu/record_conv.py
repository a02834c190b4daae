"""Convolutions and the buffers that they allocate beside their results: `record_conv.py --out FILE.json`.

Each layer is run forward, then for the gradient of its input and that of its weight alone, in several types
and layouts, with the allocator's history on; the profiler names the kernels. Layers come in an order that
mixes all kinds, so that a run cut short by `--seconds` has seen some of each.

FILE has `made_with`, `layers` (by number: [batch, channels, size..., filters, kernel..., stride, padding,
dilation, groups, transposed]), `kernels` (by number, the name) and `rows`:
[layer, mode, operation, buffers of the first call, buffers of the second, kernels of the second]. A buffer is
[bytes asked for, 1 if it outlives the operation else 0].
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, square in all its dimensions."""

    batch: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    dims: int = 2
    transposed: bool = False

    @property
    def source(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *[self.size] * self.dims)

    @property
    def weight(self) -> tuple[int, ...]:
        first, second = (self.channels, self.filters) if self.transposed else (self.filters, self.channels)
        return (first, second // self.groups, *[self.kernel] * self.dims)


@dataclass(frozen=True, slots=True)
class Mode:
    """A type and a layout."""

    dtype: torch.dtype
    channels_last: bool = False
    tf32: bool = True


MODES = {
    "fp32": Mode(torch.float32),
    "bf16": Mode(torch.bfloat16),
    "bf16-last": Mode(torch.bfloat16, channels_last=True),
    "fp32-last": Mode(torch.float32, channels_last=True),
    "fp16": Mode(torch.float16),
    "fp32-ieee": Mode(torch.float32, tf32=False),
}
SELDOM = ("fp16", "fp32-ieee")
"""Modes that only every other layer is run in."""


def bottlenecks(batch: int, image: int = 224) -> Iterator[Layer]:
    """The layers of ResNet-50."""
    yield Layer(batch, 3, image, 64, 7, 2, 3)
    entry, size = 64, image // 4
    for number, width in enumerate((64, 128, 256, 512)):
        stride = 2 if number else 1
        yield Layer(batch, entry, size, width, 1)
        yield Layer(batch, width, size, width, 3, stride, 1)
        yield Layer(batch, entry, size, 4 * width, 1, stride)
        size //= stride
        yield Layer(batch, width, size, width, 3, 1, 1)
        yield Layer(batch, width, size, 4 * width, 1)
        yield Layer(batch, 4 * width, size, width, 1)
        entry = 4 * width


def convnext(batch: int, widths: tuple[int, ...] = (96, 192, 384, 768)) -> Iterator[Layer]:
    yield Layer(batch, 3, 224, widths[0], 4, 4)
    size = 56
    for number, width in enumerate(widths):
        if number:
            yield Layer(batch, widths[number - 1], size, width, 2, 2)
            size //= 2
        yield Layer(batch, width, size, width, 7, 1, 3, groups=width)
        yield Layer(batch, width, size, 4 * width, 1)
        yield Layer(batch, 4 * width, size, width, 1)


def mobile(batch: int) -> Iterator[Layer]:
    """The layers of MobileNetV2 and EfficientNet."""
    for width, size, stride in (
        (32, 112, 1),
        (96, 112, 2),
        (144, 56, 1),
        (192, 28, 2),
        (576, 14, 1),
        (960, 7, 1),
    ):
        yield Layer(batch, width, size, width, 3, stride, 1, groups=width)
        yield Layer(batch, width, size, width // 2, 1)
    yield Layer(batch, 240, 28, 240, 5, 2, 2, groups=240)


def diffusion(batch: int) -> Iterator[Layer]:
    """The layers of a UNet and an autoencoder."""
    for width, size in ((320, 64), (640, 32), (1280, 16)):
        yield Layer(batch, width, size, width, 3, 1, 1)
        yield Layer(batch, width, size, width, 3, 2, 1)
        yield Layer(batch, 2 * width, size, width, 3, 1, 1)
        yield Layer(batch, 2 * width, size, width, 1)
    yield Layer(batch, 4, 64, 320, 3, 1, 1)
    yield Layer(batch, 320, 64, 4, 3, 1, 1)
    yield Layer(batch, 128, 256, 128, 3, 1, 1)


def patches() -> Iterator[Layer]:
    """First layers of transformers of images."""
    yield Layer(64, 3, 224, 768, 16, 16)
    yield Layer(32, 3, 224, 768, 32, 32)
    yield Layer(16, 3, 336, 1024, 14, 14)
    yield Layer(64, 3, 224, 128, 4, 4)
    yield Layer(8, 3, 512, 64, 7, 4, 3)


def sounds() -> Iterator[Layer]:
    """Layers in one dimension: Whisper, wav2vec 2.0, Mamba."""
    yield Layer(8, 80, 3000, 512, 3, 1, 1, dims=1)
    yield Layer(8, 512, 3000, 512, 3, 2, 1, dims=1)
    yield Layer(16, 80, 3000, 768, 3, 1, 1, dims=1)
    yield Layer(4, 1, 160000, 512, 10, 5, dims=1)
    yield Layer(4, 512, 31999, 512, 3, 2, dims=1)
    yield Layer(4, 768, 499, 768, 128, 1, 64, groups=16, dims=1)
    yield Layer(4, 1536, 1024, 1536, 4, 1, 3, groups=1536, dims=1)


def grid() -> Iterator[Layer]:
    """All sorts."""
    for channels, size, batch in ((64, 56, 32), (128, 28, 64), (256, 28, 32), (512, 14, 32), (1024, 7, 64)):
        yield Layer(batch, channels, size, channels, 3, 1, 1)
        yield Layer(batch, channels, size, 2 * channels, 3, 2, 1)
        yield Layer(batch, channels, size, channels, 1)
        yield Layer(batch, channels, size, channels, 5, 1, 2)
        yield Layer(batch, channels, size, channels, 3, 1, 1, groups=32)
    for channels in (40, 72, 100, 200):
        yield Layer(32, channels, 28, 2 * channels, 3, 1, 1)
        yield Layer(32, channels, 28, 2 * channels, 1)
    yield Layer(128, 3, 160, 64, 7, 2, 3)
    yield Layer(128, 64, 40, 128, 3, 1, 1)
    yield Layer(128, 128, 40, 256, 5, 2, 2)
    yield Layer(128, 256, 20, 256, 3, 1, 1, groups=256)
    yield Layer(128, 256, 20, 512, 1)
    yield Layer(256, 3, 32, 64, 3, 1, 1)
    yield Layer(256, 64, 32, 64, 3, 1, 1)
    yield Layer(16, 256, 32, 256, 3, 1, 2, dilation=2)
    yield Layer(8, 512, 64, 256, 3, 1, 6, dilation=6)
    yield Layer(16, 256, 32, 128, 2, 2, transposed=True)
    yield Layer(16, 512, 16, 256, 4, 2, 1, transposed=True)
    yield Layer(4, 32, 32, 64, 3, 1, 1, dims=3)
    yield Layer(2, 128, 16, 128, 3, 1, 1, dims=3)


def layers() -> list[Layer]:
    """Every layer once; those of the first networks first, the others in mixed order."""
    first = [*bottlenecks(64), *convnext(64)]
    others = [
        *bottlenecks(32), *bottlenecks(128, 160), *convnext(32, (128, 256, 512, 1024)), *mobile(64),
        *diffusion(4), *patches(), *sounds(), *grid(),
    ]  # fmt: skip
    random.Random(3).shuffle(others)
    return list(dict.fromkeys([*first, *others]))


class Watch:
    """What one call allocates."""

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()

    def __call__(self, call: Callable[[], Any]) -> tuple[list[list[int]], Any]:
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=10_000)
        result = call()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][self.device]
        buffers: list[list[int]] = []
        lying: dict[int, list[int]] = {}
        for event in trace:
            if event["action"] == "alloc":
                lying[event["addr"]] = [event["size"], 1]
                buffers.append(lying[event["addr"]])
            elif event["action"] == "free_requested" and event["addr"] in lying:
                lying.pop(event["addr"])[1] = 0
        return buffers, result


def calls(layer: Layer, mode: Mode) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The three operations of a layer."""

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.randn(shape, dtype=mode.dtype, device="cuda")
        last = mode.channels_last and layer.dims == 2
        return tensor.to(memory_format=torch.channels_last) if last else tensor

    torch.backends.cudnn.allow_tf32 = mode.tf32
    source, weight = drawn(layer.source), drawn(layer.weight)
    settings = (
        [layer.stride] * layer.dims, [layer.padding] * layer.dims, [layer.dilation] * layer.dims,
        layer.transposed, [0] * layer.dims, layer.groups,
    )  # fmt: skip
    forward = aten.convolution.default
    yield "forward", lambda: forward(source, weight, None, *settings)
    gradient = torch.ones_like(forward(source, weight, None, *settings))
    for name, wanted in (("input", [True, False, False]), ("weight", [False, True, False])):
        yield (
            name,
            lambda wanted=wanted: aten.convolution_backward.default(
                gradient, source, weight, None, *settings, wanted
            ),
        )


def measure(deadline: float) -> tuple[list[Layer], list[list[Any]], list[tuple[int, int]]]:
    """Layers, rows without kernels, and when (ns) the second call of each row began and ended."""
    watch, seen = Watch(), layers()
    rows: list[list[Any]] = []
    spans: list[tuple[int, int]] = []
    for number, layer in enumerate(seen):
        for mode_name, mode in MODES.items():
            if time.monotonic() > deadline:
                print(f"cut short at layer {number} of {len(seen)}", flush=True)
                return seen, rows, spans
            if number % 2 and mode_name in SELDOM:
                continue
            try:
                for name, call in calls(layer, mode):
                    first, result = watch(call)
                    del result
                    begun = time.time_ns()
                    second, result = watch(call)
                    spans.append((begun, time.time_ns()))
                    del result
                    rows.append([number, mode_name, name, first, second])
            except RuntimeError as error:
                print(f"{mode_name} {layer}: {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()
        if number % 20 == 0:
            print(f"layer {number}: {len(rows)} rows, {deadline - time.monotonic():.0f} s left", flush=True)
    return seen, rows, spans


def kernels_of(profiler: Any, spans: list[tuple[int, int]]) -> list[list[str]]:
    """The kernels that ran in each span."""
    ran = sorted(
        (event.start_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("Mem")
    )
    found: list[list[str]] = []
    at = 0
    for begun, ended in spans:
        while at < len(ran) and ran[at][0] < begun:
            at += 1
        found.append([])
        while at < len(ran) and ran[at][0] <= ended:
            found[-1].append(ran[at][1])
            at += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=35.0)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    torch.cuda.init()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            seen, rows, spans = measure(deadline)
        names = kernels_of(profiler, spans)
    except (RuntimeError, AttributeError) as error:
        print(f"no kernel names: {error}", flush=True)
        if "rows" not in locals():
            seen, rows, spans = measure(deadline)
        names = [[] for _ in rows]
    table = {
        name: number for number, name in enumerate(dict.fromkeys(each for name in names for each in name))
    }
    made_with = {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
    }
    written = {
        "made_with": made_with,
        "layers": [astuple(layer) for layer in seen],
        "kernels": list(table),
        "rows": [[*row, [table[name] for name in each]] for row, each in zip(rows, names, strict=True)],
    }
    options.out.write_text(json.dumps(written, separators=(",", ":")) + "\n")
    print(f"{len(rows)} rows of {len(seen)} layers, {len(table)} kernels: {options.out}", flush=True)


if __name__ == "__main__":
    main()
