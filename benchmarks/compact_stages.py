"""For `compact.py`: what a compaction spends the host's time in."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from memtriage.treat.compaction import one_device
from memtriage.treat.compaction.storages import StorageFinder
from memtriage.treat.device import cuda as cuda_device
from memtriage.treat.device.cuda import CudaDevice

STAGES: Final = (
    (CudaDevice, "snapshot", "snapshot"),
    (cuda_device, "layout_of_raw", "layout_of_raw"),
    (one_device, "look", "look"),
    (one_device, "make_plan", "make_plan"),
    (StorageFinder, "__enter__", "list_objects"),
    (StorageFinder, "__call__", "find"),
    (CudaDevice, "allocate", "allocate"),
    (CudaDevice, "release", "release"),
    (CudaDevice, "resize", "resize"),
    (CudaDevice, "copy", "copy"),
    (CudaDevice, "synchronize", "synchronize"),
    (CudaDevice, "available", "available"),
    (CudaDevice, "empty_cache", "empty_cache"),
)
"""What a compaction spends its time in: whose, which attribute, what it is called. None calls another."""
WORTH_TELLING_S: Final = 0.0003


@dataclass(frozen=True, slots=True)
class Stage:
    """One call of a stage. Seconds, from the beginning of the compaction."""

    name: str
    start: float
    seconds: float


@contextmanager
def stages() -> Iterator[list[Stage]]:
    """The host's time in each stage, call by call."""
    found: list[Stage] = []
    began = time.perf_counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                found.append(Stage(name, start - began, time.perf_counter() - start))

        return call

    originals = [(*stage, getattr(*stage[:2])) for stage in STAGES]
    for owner, attribute, name, function in originals:
        setattr(owner, attribute, timed(name, function))
    try:
        yield found
    finally:
        for owner, attribute, _, function in originals:
            setattr(owner, attribute, function)


def told(whole_s: float, found: list[Stage]) -> str:
    """The stages' sums, the longest first, and then the long calls in order."""
    spent: dict[str, float] = defaultdict(float)
    for stage in found:
        spent[stage.name] += stage.seconds * 1e3
    inside, until = 0.0, 0.0
    for stage in found:
        end = stage.start + stage.seconds
        inside += max(0.0, end - max(stage.start, until))
        until = max(until, end)
    sums = ", ".join(
        f"{name} {took:.1f}" for name, took in sorted(spent.items(), key=itemgetter(1), reverse=True)
    )
    order = ", ".join(
        f"{stage.name} {stage.start * 1e3:.1f}+{stage.seconds * 1e3:.1f}"
        for stage in found
        if stage.seconds >= WORTH_TELLING_S
    )
    return (
        f"host ms of {whole_s * 1e3:.1f}: {sums}, outside of all {(whole_s - inside) * 1e3:.1f}\n"
        f"  in order, begin+ms: {order}"
    )
