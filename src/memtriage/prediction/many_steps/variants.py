"""What other settings, inputs and orders would give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from memtriage.model.prediction import HorizonVariant
from memtriage.prediction.many_steps.run import LongRun, MemoryLimits
from memtriage.prediction.many_steps.shapes import Shape


def variants(run: LongRun, memory: MemoryLimits, full: bool) -> Iterable[HorizonVariant]:
    """What other settings, shapes and orders would give."""
    if not memory.settings.expandable_segments:
        settings = msgspec.structs.replace(memory.settings, expandable_segments=True, max_split_size=None)
        yield _variant("expandable_segments:True", run, replace(memory, settings=settings))
    by_volume = sorted(set(run.step) & set(run.shapes), key=lambda shape: shape.volume)
    if len({shape.volume for shape in by_volume}) < 2:
        return
    longest_first = run.with_later(lambda shapes: sorted(shapes, key=lambda shape: -shape.volume))
    yield _variant("longest batches first", longest_first, memory)
    cap = _cap_that_fits(run, memory, by_volume) if full else None
    if cap is not None and cap.volume < by_volume[-1].volume:
        yield _variant(f"no batch larger than {cap.text}", _capped(run, by_volume, cap), memory)


def _variant(name: str, run: LongRun, memory: MemoryLimits) -> HorizonVariant:
    peak = max(outcome.peak_reserved for outcome in run.outcomes(memory))
    full_at = run.end(memory).full_at if peak > memory.reservable else None
    return HorizonVariant(name=name, peak_reserved=peak, full_at=full_at)


def _capped(run: LongRun, by_volume: Sequence[Shape], cap: Shape) -> LongRun:
    """Larger shapes become the largest of their form that is no larger than this one."""

    def at_most(shape: Shape) -> Shape:
        if shape.volume <= cap.volume:
            return shape
        smaller = [each for each in by_volume if each.form == shape.form and each.volume <= cap.volume]
        return smaller[-1] if smaller else cap

    return run.with_later(lambda shapes: map(at_most, shapes))


def _cap_that_fits(run: LongRun, memory: MemoryLimits, by_volume: Sequence[Shape]) -> Shape | None:
    """The largest shape with which the run ends; None where none does."""
    low, high = 0, len(by_volume) - 1  # of the smaller ones none is known, the largest does not fit
    if _capped(run, by_volume, by_volume[0]).end(memory).full_at is not None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = _capped(run, by_volume, by_volume[middle]).end(memory).full_at is None
        low, high = (middle, high) if fits else (low, middle)
    return by_volume[low]
