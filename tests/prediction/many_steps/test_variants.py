"""What other settings, shapes and orders would give."""

from __future__ import annotations

import pytest

from memtriage.allocator.settings import AllocatorSettings
from memtriage.model.prediction import HorizonVariant
from memtriage.prediction.many_steps.run import LongRun, MemoryLimits
from memtriage.prediction.many_steps.shapes import Shape, input_of
from memtriage.prediction.many_steps.step_trace import StepTrace
from memtriage.prediction.many_steps.variants import variants

MIB = 1 << 20


def shape(length: int, more: bool = False) -> Shape:
    return input_of((length, 1) if more else length).shape


def step(mib: int) -> StepTrace:
    return StepTrace([mib * MIB, -1], names=["mul"])


def run(*lengths: int, forms: bool = False) -> LongRun:
    """A run whose first steps have the shape 1, and each later one takes as many times 20 MiB as its length.

    Args:
        forms: lengths that are odd have another form.
    """
    shapes = [shape(each, forms and each % 2 == 1) for each in lengths]
    steps = {each: step(20 * number) for each, number in zip(shapes, lengths, strict=True)}
    return LongRun([StepTrace(), step(20)], steps, [shape(1), *shapes])


def found(
    planned: LongRun, limit: int | None = None, full: bool = False, expandable: bool = False
) -> dict[str, tuple[int, int | None]]:
    """Peak in MiB and the step of the end, by variant."""
    settings = AllocatorSettings(expandable_segments=expandable)
    memory = MemoryLimits(settings, 80 << 30, 80 << 30, None if limit is None else limit * MIB)
    result = list(variants(planned, memory, full))
    assert all(isinstance(each, HorizonVariant) for each in result)
    return {each.name: (each.peak_reserved // MIB, each.full_at) for each in result}


@pytest.mark.parametrize(
    ("planned", "options", "expected"),
    [
        pytest.param(
            run(1, 3, 2, 5),
            {},
            {"expandable_segments:True": (100, None), "longest batches first": (120, None)},
            id="few shapes",
        ),
        pytest.param(
            run(1, 3, 2, 5),
            {"expandable": True},
            {"longest batches first": (100, None)},
            id="expandable already",
        ),
        pytest.param(
            run(1, 3, 2, 5, 4),
            {"limit": 90, "full": True},
            {
                "expandable_segments:True": (100, 5),
                "longest batches first": (120, 2),
                "no batch larger than 4": (160, None),
            },
            id="full",
        ),
        pytest.param(
            run(4, 3, 6, 9, forms=True),
            {"limit": 150, "full": True},
            {
                "expandable_segments:True": (180, 5),
                "longest batches first": (200, 2),
                "no batch larger than 6": (220, None),
            },
            id="full by one form",
        ),
    ],
)
def test_variants_say_their_peak_and_their_end(
    planned: LongRun, options: dict[str, int], expected: dict[str, tuple[int, int | None]]
) -> None:
    assert found(planned, **options) == expected
