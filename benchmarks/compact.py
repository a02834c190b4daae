"""Compaction of a fragmented GPU, with a round trip through the host as its peer.

    python benchmarks/compact.py [--only SHAPE ...] [--repeats N] [--out FILE]

Three shapes of memory, each as a phase leaves it: what was freed is still cached.

small  8,000 blocks of 4 to 36 KB (0.16 GB), one in four of what was allocated
mixed  2,000 blocks of 4 KiB to 8 MiB, log-uniform (2 GB), one in six of what was allocated
large  400 blocks of 4 to 40 MiB (9 GB), cut from cached segments of 80 MiB

Each is built again for every measurement. What was imported is frozen first (`gc.freeze()`), as training
loops do that look after the collector: finding storages goes through all that the collector lists. Columns:

reserved     before and after `memtriage.compact()`
predicted    reserved, as the dry run foretells it
whole        the call, median of the repeats
unfrozen     one call without `gc.freeze()`
copies       its copies on the device alone, as the profiler times kernels and memcpys on the device
of peak      their rate beside the rate of a plain 4 GiB copy in the same run. Bytes are counted as read plus
             written: 2 a byte moved directly, 4 a byte moved by way of scratch.
driver       the driver's calls alone: those that the allocator made during a compaction (freeing and making
             segments, as its history records them), made again in the same order by `cuMemFree`, `cuMemAlloc`
allocator    the same calls by way of PyTorch's allocator: segments of the same sizes in the same order, taken
             with `caching_allocator_alloc` and given back by `empty_cache`
host         the peer: every storage to host memory, resized to 0, the cache emptied, resized, copied back

Above the table, of each shape: where the host's time went in one more compaction, in all and in order. What
runs in two threads at once counts twice in the sums. The profiler comes last: it slows the driver for good.

Limits, each printed with pass or fail: reserved <= 1.02 x allocated + 64 MB; copies at half of the peak rate
or more; whole <= copies + 1.2 x driver, and the same with the allocator's calls; the small shape in 60 ms;
ten times faster than the host (mixed, large). Values are compared by checksum before and after. A missed
limit is a line in the table, no exit status. How many times what is allowed the whole took is also told pair
by pair, a compaction and the driver's calls made right behind it, with an interval of that median.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

import memtriage
from compact_calls import (
    Recording,
    Seconds,
    allocator_seconds,
    driver_seconds,
    recorded,
    seconds_to_empty,
)
from compact_stages import WORTH_TELLING_S, Stage, stages, told
from memtriage.model.units import size
from memtriage.prove.statistics import ratio
from memtriage.treat.device import copy_kernel
from memtriage.treat.device.cuda import CudaDevice

MB: Final = 10**6
MIB: Final = 1 << 20
SEED: Final = 6
PEAK_BYTES: Final = 4 << 30
WORD: Final = 8

RESERVED_SHARE: Final = 1.02
RESERVED_SLACK: Final = 64 * MB
LEAST_RATE: Final = 0.5
DRIVER_FACTOR: Final = 1.2
SMALL_LIMIT_S: Final = 0.060
HOST_FACTOR: Final = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """How memory is fragmented: sizes drawn, how many, how many stay; segments made beforehand."""

    name: str
    draw: Callable[[random.Random], int]
    count: int
    kept: int
    segments: int = 0
    segment_size: int = 0


SHAPES: Final = (
    Shape("small", lambda r: r.randrange(4_000, 36_000), count=32_000, kept=8_000),
    Shape("mixed", lambda r: int(4096 * 2048 ** r.random()), count=12_000, kept=2_000),
    Shape(
        "large",
        lambda r: r.randrange(4 * MIB, 40 * MIB),
        count=2_000,
        kept=400,
        segments=600,
        segment_size=80 * MIB,
    ),
)


def fragment(shape: Shape) -> list[torch.Tensor]:
    """Allocate, free most of it, and fill what stays with random words."""
    clean()
    dice = random.Random(SEED)
    sizes = [shape.draw(dice) // WORD * WORD for _ in range(shape.count)]
    blank = [torch.empty(shape.segment_size, dtype=torch.uint8, device="cuda") for _ in range(shape.segments)]
    del blank
    everything = [torch.empty(nbytes // WORD, dtype=torch.int64, device="cuda") for nbytes in sizes]
    kept = [everything[index] for index in sorted(dice.sample(range(shape.count), shape.kept))]
    del everything
    generator = torch.Generator("cuda").manual_seed(SEED)
    for tensor in kept:
        tensor.random_(generator=generator)
    torch.cuda.synchronize()
    return kept


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def checksum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A weighted sum of the words of each tensor."""
    most = max(tensor.numel() for tensor in tensors)
    weights = torch.arange(1, 2 * most, 2, device="cuda")
    sums = torch.stack([(tensor * weights[: tensor.numel()]).sum() for tensor in tensors]).cpu()
    del weights
    return sums


def peak_rate() -> float:
    """Bytes read and written a second by a plain copy on the device, best of five."""
    source = torch.empty(PEAK_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * PEAK_BYTES / (begin.elapsed_time(end) / 1e3))
    return best


@contextmanager
def copied_bytes() -> Iterator[Counter[str]]:
    """Bytes that a compaction's copies read and write on the device."""
    counts: Counter[str] = Counter()
    copy, resize = CudaDevice.copy, CudaDevice.resize

    def counted_copy(device: Any, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        counts["bytes"] += 2 * int(sizes.sum())
        copy(device, targets, sources, sizes, stream)

    def counted_resize(device: Any, storages: Any, sizes: Any, stream: int) -> None:
        same = [nbytes for storage, nbytes in zip(storages, sizes, strict=True) if storage.nbytes() == nbytes]
        counts["bytes"] += 2 * sum(same)
        resize(device, storages, sizes, stream)

    with (
        mock.patch.object(CudaDevice, "copy", counted_copy),
        mock.patch.object(CudaDevice, "resize", counted_resize),
    ):
        yield counts


def profiled_copies() -> tuple[int, float]:
    """Bytes read plus written, and seconds on the device, of the copies of one compaction."""
    with (
        copied_bytes() as counted,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        memtriage.compact()
        torch.cuda.synchronize()
    microseconds = sum(
        event.time_range.elapsed_us()
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and ("copy_tiles" in event.name or "DtoD" in event.name)
    )
    return counted["bytes"], microseconds / 1e6


def through_host(tensors: list[torch.Tensor]) -> float:
    """The peer: all storages by way of host memory."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    copies = [tensor.cpu() for tensor in tensors]
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    for tensor, nbytes, copied in zip(tensors, sizes, copies, strict=True):
        tensor.untyped_storage().resize_(nbytes)
        tensor.copy_(copied)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one shape. Bytes and seconds."""

    shape: str
    blocks: int
    live: int
    reserved_before: int
    predicted: int
    allocated: int
    reserved: int
    whole_s: float
    unfrozen_s: float
    all_whole_s: list[float]
    copies_s: float
    copied_bytes: int
    rate: float
    peak: float
    driver_s: float
    all_driver_s: list[float]
    driver_calls: dict[str, int]
    driver_parts_s: dict[str, float]
    allocator_s: float
    allocator_parts_s: dict[str, float]
    stages_whole_s: float
    stages: list[Stage]
    host_s: float
    intact: bool
    stopped: str | None

    def allowed(self, calls_s: float) -> str:
        return f"{(self.copies_s + DRIVER_FACTOR * calls_s) * 1e3:.1f} ms"

    def of_allowed(self) -> str:
        """How many times what is allowed the whole took: each compaction beside the calls right behind it."""
        allowed = [self.copies_s + DRIVER_FACTOR * calls_s for calls_s in self.all_driver_s]
        time_ratio = ratio([self.all_whole_s], [allowed])
        assert time_ratio is not None
        middle, interval = time_ratio
        told = f"{middle:.3f} of what is allowed, the median of {len(allowed)} pairs"
        if interval is None:
            return told
        return f"{told} ({interval.low:.3f} to {interval.high:.3f}, {interval.confidence:.0%})"

    def limits(self) -> dict[str, bool]:
        timed_rows = {
            "values intact": self.intact,
            f"reserved <= {RESERVED_SHARE} x allocated + 64 MB": self.reserved
            <= RESERVED_SHARE * self.allocated + RESERVED_SLACK,
            "copies at half of the copy rate or more": self.rate >= LEAST_RATE * self.peak,
            f"whole <= copies + {DRIVER_FACTOR} x driver ({self.allowed(self.driver_s)})": self.whole_s
            <= self.copies_s + DRIVER_FACTOR * self.driver_s,
            f"whole <= copies + {DRIVER_FACTOR} x allocator ({self.allowed(self.allocator_s)})": self.whole_s
            <= self.copies_s + DRIVER_FACTOR * self.allocator_s,
        }
        if self.shape == "small":
            timed_rows["at most 60 ms"] = self.whole_s <= SMALL_LIMIT_S
        else:
            timed_rows["ten times faster than through the host"] = self.whole_s * HOST_FACTOR <= self.host_s
        return timed_rows


@dataclass(frozen=True, slots=True)
class Timed:
    """The call and its peer, with nothing else switched on: tracing slows the driver for good."""

    dry: memtriage.Compaction
    done: memtriage.Compaction
    live: int
    whole_s: list[float]
    unfrozen_s: float
    host_s: float
    intact: bool
    recording: Recording
    driver: Seconds
    all_driver_s: list[float]
    allocator: Seconds
    watched_s: float
    stages: list[Stage]


def time_it(shape: Shape, repeats: int) -> Timed:
    tensors = fragment(shape)
    dry = memtriage.compact(dry_run=True)
    print(f"{shape.name}: predicted\n{dry}", flush=True)
    recording = recorded()
    del tensors
    whole: list[float] = []
    driver: list[Seconds] = []
    allocator: list[Seconds] = []
    intact = True
    live = 0
    for _ in range(repeats):
        tensors = fragment(shape)
        sums = checksum(tensors)
        done, took = timed_compaction()
        whole.append(took)
        intact = intact and bool((checksum(tensors) == sums).all())
        live = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        # Beside each other: how fast the driver is changes from minute to minute.
        del tensors
        clean()
        driver.append(driver_seconds(recording))
        allocator.append(allocator_seconds(recording))
        print(
            f"{shape.name}: {done}; driver {driver[-1]['all'] * 1e3:.1f} ms, allocator "
            f"{allocator[-1]['all'] * 1e3:.1f} ms",
            flush=True,
        )
    for beside in (False, True):
        tensors = fragment(shape)
        del tensors
        count = len(torch.cuda.memory_snapshot())
        took = seconds_to_empty(beside)
        where = "a thread of its own" if beside else "this thread"
        print(
            f"{shape.name}: all {count} segments given back in {took * 1e3:.1f} ms from {where}", flush=True
        )
    tensors = fragment(shape)
    with stages() as found:
        _, watched_s = timed_compaction()
    found.sort(key=lambda one: one.start)
    print(f"{shape.name}: {told(watched_s, found)}", flush=True)
    del tensors
    tensors = fragment(shape)
    gc.unfreeze()
    _, unfrozen_s = timed_compaction()
    del tensors
    clean()
    gc.freeze()
    warm_up()
    tensors = fragment(shape)
    return Timed(
        dry=dry,
        done=done,
        live=live,
        whole_s=whole,
        unfrozen_s=unfrozen_s,
        host_s=through_host(tensors),
        intact=intact,
        recording=recording,
        driver=middle(driver),
        all_driver_s=[seconds["all"] for seconds in driver],
        allocator=middle(allocator),
        watched_s=watched_s,
        stages=found,
    )


def timed_compaction() -> tuple[memtriage.Compaction, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    done = memtriage.compact()
    torch.cuda.synchronize()
    return done, time.perf_counter() - began


def middle(several: list[Seconds]) -> Seconds:
    """The median by the sum."""
    return sorted(several, key=itemgetter("all"))[len(several) // 2]


def row_of(shape: Shape, timed: Timed, peak: float) -> Row:
    """All that there is to tell of a shape; its copies are profiled for it."""
    tensors = fragment(shape)
    copied, copies_s = profiled_copies()
    del tensors
    assert timed.done.after is not None
    return Row(
        shape=shape.name,
        blocks=shape.kept,
        live=timed.live,
        reserved_before=timed.done.before.reserved,
        predicted=timed.dry.predicted.reserved,
        allocated=timed.done.after.allocated,
        reserved=timed.done.after.reserved,
        whole_s=statistics.median(timed.whole_s),
        unfrozen_s=timed.unfrozen_s,
        all_whole_s=timed.whole_s,
        copies_s=copies_s,
        copied_bytes=copied,
        rate=copied / copies_s if copies_s else 0.0,
        peak=peak,
        driver_s=timed.driver["all"],
        all_driver_s=timed.all_driver_s,
        driver_calls=timed.recording.counts(),
        driver_parts_s=dict(timed.driver),
        allocator_s=timed.allocator["all"],
        allocator_parts_s=dict(timed.allocator),
        stages_whole_s=timed.watched_s,
        stages=[stage for stage in timed.stages if stage.seconds >= WORTH_TELLING_S],
        host_s=timed.host_s,
        intact=timed.intact,
        stopped=timed.done.devices[0].stopped,
    )


def line(row: Row) -> str:
    memory = (row.live, row.reserved_before, row.predicted, row.reserved)
    return (
        f"{row.shape:6}{row.blocks:7}{''.join(f'{size(nbytes):>11}' for nbytes in memory)}"
        f"{row.whole_s * 1e3:10.1f}{row.unfrozen_s * 1e3:10.1f}{row.copies_s * 1e3:10.2f}"
        f"{row.rate / 1e12:8.2f}{row.rate / row.peak:9.0%}{row.driver_s * 1e3:10.1f}"
        f"{row.allocator_s * 1e3:13.1f}{row.host_s * 1e3:10.1f}"
    )


def attempt(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives; None, and the traceback printed, where it fails."""
    try:
        return function(*arguments)
    except Exception:
        print(f"{what} failed", flush=True)
        traceback.print_exc()
        return None


def warm_up() -> None:
    """Compile the kernel, start the driver's machinery, have what is frozen looked up."""
    clean()
    tensors = [torch.zeros(5000, dtype=torch.int64, device="cuda") for _ in range(4000)]
    kept = tensors[::8]
    del tensors
    memtriage.compact()
    del kept
    clean()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/compact.py needs a CUDA device")
    torch.cuda.init()
    gc.collect()
    gc.freeze()
    warm_up()
    peak = peak_rate()
    clean()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy rate {peak / 1e12:.2f} TB/s",
        flush=True,
    )
    print(f"copy kernel: {'compiled' if copy_kernel.compiled(0) is not None else 'not available'}")
    shapes = [shape for shape in SHAPES if not options.only or shape.name in options.only]
    timed = {
        shape.name: attempt(f"{shape.name}: timing", time_it, shape, options.repeats) for shape in shapes
    }
    rows: list[Row] = []
    for shape in shapes:
        figures = timed[shape.name]
        if figures is not None:
            row = attempt(f"{shape.name}: profiling", row_of, shape, figures, peak)
            rows += [row] if row is not None else []
    print(
        f"\n{'':6}{'blocks':>7}{'live':>11}{'reserved':>11}{'predicted':>11}{'after':>11}{'whole ms':>10}"
        f"{'unfrozen':>10}{'copies ms':>10}{'TB/s':>8}{'of peak':>9}{'driver ms':>10}{'allocator ms':>13}"
        f"{'host ms':>10}"
    )
    for row in rows:
        print(line(row))
    for row in rows:
        parts = ", ".join(
            f"{count} {action}: driver {row.driver_parts_s[action] * 1e3:.1f} ms, allocator "
            f"{row.allocator_parts_s[action] * 1e3:.1f} ms"
            for action, count in row.driver_calls.items()
        )
        whole, driver = (
            ", ".join(f"{seconds * 1e3:.1f}" for seconds in each)
            for each in (row.all_whole_s, row.all_driver_s)
        )
        print(f"{row.shape}: {parts}; repeats, whole {whole}, driver {driver} ms; {row.of_allowed()}")
    for row in rows:
        for limit, held in row.limits().items():
            print(f"{'pass' if held else 'FAIL'}  {row.shape}: {limit}")
    if options.out:
        figures = [{**asdict(row), "limits": row.limits()} for row in rows]
        options.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
