"""A run of many steps: what it does, and how it ends in the memory that there is."""

from __future__ import annotations

import pytest

from memtriage.allocator.settings import AllocatorSettings
from memtriage.prediction.many_steps.run import LongRun, MemoryLimits, RunEnd
from memtriage.prediction.many_steps.shapes import Shape, input_of
from memtriage.prediction.many_steps.step_trace import Other, StepTrace

MIB = 1 << 20
GIB = 1 << 30


def shape(length: int) -> Shape:
    return input_of(length).shape


def step(mib: int) -> StepTrace:
    return StepTrace([mib * MIB, -1], names=["mul"])


BUILD = StepTrace([20 * MIB], left={("build", "empty", 0): 0}, names=["empty"])
RUN = LongRun(
    [BUILD, step(30), step(40)],
    {shape(1): step(50), shape(2): step(100)},
    [shape(each) for each in (3, 4, 1, 1, 2, 1)],
)


def memory(free: int = 100 * GIB, limit: int | None = None, fraction: float | None = None) -> MemoryLimits:
    return MemoryLimits(AllocatorSettings(memory_fraction=fraction), 100 * GIB, free, limit)


def test_the_first_steps_come_as_they_were_and_the_others_by_shape() -> None:
    assert [each.peak() // MIB for each in RUN.steps()] == [20, 30, 40, 50, 50, 100, 50]
    turned = RUN.with_later(reversed)
    assert turned.shapes == [shape(each) for each in (3, 4, 1, 2, 1, 1)]
    assert (turned.before, turned.step) == (RUN.before, RUN.step)
    assert [outcome.peak_reserved // MIB for outcome in RUN.outcomes(memory())] == [
        *(20, 50, 90, 140, 140, 240, 240)
    ]


def test_blocks_of_the_oldest_step_that_any_frees_are_followed() -> None:
    old = Other("free", block=(2, ("build", "empty", 0)))
    last = StepTrace([old, 5 * MIB], names=["mul"])
    run = LongRun([BUILD, step(30)], {shape(1): last}, [shape(3), shape(1)])
    assert [outcome.end_allocated // MIB for outcome in run.outcomes(memory())] == [20, 20, 5]
    before = LongRun([BUILD, step(30), last], {shape(1): step(5)}, [shape(3), shape(4), shape(1)])
    assert [outcome.end_allocated // MIB for outcome in before.outcomes(memory())] == [20, 20, 5, 5]


@pytest.mark.parametrize(
    ("limits", "reservable", "end"),
    [
        (memory(), 100 * GIB, RunEnd(None)),
        (memory(limit=240 * MIB), 240 * MIB, RunEnd(None)),
        (memory(limit=239 * MIB), 239 * MIB, RunEnd(None, 5)),
        (memory(limit=120 * MIB), 120 * MIB, RunEnd(None, 3)),
        (memory(free=120 * MIB), 120 * MIB, RunEnd(None, 3)),
        (memory(free=120 * MIB, limit=130 * MIB), 120 * MIB, RunEnd(None, 3)),
        (memory(fraction=120 * MIB / (100 * GIB)), 120 * MIB, RunEnd(None, 3)),
    ],
)
def test_the_cache_is_flushed_in_the_first_step_that_needs_it(
    limits: MemoryLimits, reservable: int, end: RunEnd
) -> None:
    assert limits.reservable == reservable
    assert RUN.end(limits) == end


@pytest.mark.parametrize(("limit", "full_at"), [(119, 5), (69, 3), (59, 2), (49, 1), (19, 0)])
def test_a_run_ends_in_the_step_whose_memory_is_not_there(limit: int, full_at: int) -> None:
    end = RUN.end(memory(limit=limit * MIB))
    assert end.full_at == full_at
    assert end.failed is not None
    assert end.failed.operator == ("mul" if full_at else "empty")
    assert max(outcome.peak_reserved for outcome in RUN.outcomes(memory(limit=limit * MIB))) == 240 * MIB
