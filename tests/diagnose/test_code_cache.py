"""Growth of native memory that comes with generated code, and growth that does not."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.diagnose.code_cache import POLICY, fills_with_code
from memtriage.diagnose.growth.track import Floats, Points

MIB = 1024 * 1024
KERNEL = 2 * MIB  # address space that oneDNN takes for a primitive of a new shape
PRIMITIVE = 700_000  # what it takes from malloc for it


def series(values: Floats) -> Points:
    return Points(np.arange(1.0, len(values) + 1), values, values)


def shapes(steps: int, different: int, seed: int = 0) -> Floats:
    """How many shapes have been met by each step, of so many different ones."""
    drawn = np.random.default_rng(seed).integers(different, size=steps)
    return np.array([len(set(drawn[: step + 1])) for step in range(steps)], dtype=np.float64)


def noisy(values: Floats, seed: int = 0) -> Floats:
    """The counter of a loop whose batches have varying lengths."""
    return values + np.random.default_rng(seed).normal(0, 500_000, len(values))


@pytest.mark.parametrize("different", [30, 100, 10_000])
def test_cache_per_shape_is_recognized_by_its_code(different: int) -> None:
    met = shapes(120, different)
    memory, code = series(noisy(met * PRIMITIVE)), series(met * KERNEL)
    assert fills_with_code(memory, code, since=0)


@pytest.mark.parametrize("different", [30, 60])
def test_a_leak_goes_on_where_no_new_code_comes(different: int) -> None:
    met = shapes(200, different)
    leak = np.arange(200.0) * PRIMITIVE / 2
    assert not fills_with_code(series(noisy(met * PRIMITIVE + leak)), series(met * KERNEL), since=0)


def test_a_leak_goes_on_in_the_half_of_the_time_without_new_code() -> None:
    steps = np.arange(160.0)
    code = series(np.minimum(steps, 80.0) * KERNEL)
    assert not fills_with_code(series(steps * PRIMITIVE / 3), code, since=0)
    assert fills_with_code(series(np.minimum(steps, 80.0) * PRIMITIVE / 3), code, since=0)


def test_without_code_nothing_is_a_cache_of_code() -> None:
    grows = series(np.arange(100.0) * PRIMITIVE)
    assert not fills_with_code(grows, series(np.zeros(100)), since=0)
    assert not fills_with_code(grows, series(np.array([])), since=0)


def test_memory_that_takes_more_than_its_code_is_something_else() -> None:
    steps = np.arange(100.0)
    assert not fills_with_code(series(steps * KERNEL), series(steps * KERNEL), since=0)


def test_a_bounded_cache_cannot_fill_for_ever() -> None:
    steps = np.arange(2.0 * POLICY.entries)
    memory, code = series(steps * PRIMITIVE), series(steps * KERNEL)
    assert not fills_with_code(memory, code, since=0)
    assert fills_with_code(memory, code, since=1.5 * POLICY.entries)


def test_a_few_readings_of_the_code_are_enough() -> None:
    met = shapes(200, 10_000)
    code = Points(np.arange(1.0, 201.0)[::16], (met * KERNEL)[::16], (met * KERNEL)[::16])
    assert fills_with_code(series(noisy(met * PRIMITIVE)), code, since=0)


def test_only_what_grew_between_readings_of_the_code_is_compared() -> None:
    steps = np.arange(1.0, 201.0)
    memory = steps * PRIMITIVE
    memory[:40] -= 4096 * MIB  # a model was loaded before the code was first read
    memory[160:] += 4096 * MIB
    compared = slice(40, 160)
    code = Points(steps[compared], steps[compared] * KERNEL, steps[compared] * KERNEL)
    assert fills_with_code(series(memory), code, since=0)
    assert not fills_with_code(series(memory), series(steps * KERNEL), since=0)


def test_readings_may_come_more_often_at_some_times() -> None:
    met = shapes(240, 60)
    often = np.concatenate([np.arange(0, 120, 4), np.arange(120, 240)])
    memory = Points(often + 1.0, (met * PRIMITIVE)[often], (met * PRIMITIVE)[often])
    assert fills_with_code(memory, series(met * KERNEL), since=0)
