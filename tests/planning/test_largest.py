"""The largest size within a budget, of programs whose memory is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtriage.planning.largest import MOST_TRIED, largest

GRAIN = 2 << 20
"""What programs need is known to so many bytes."""


@given(
    fixed=st.integers(0, 1 << 33),
    each=st.integers(1 << 21, 1 << 29),
    more=st.integers(0, 1 << 29),
    kink=st.integers(1, 300),
    unit=st.sampled_from([1, 8, 64]),
    start=st.sampled_from([1, 8, 512]),
    units=st.integers(1, 2000),
)
def test_the_size_found_fits_and_the_next_one_does_not(
    fixed: int, each: int, more: int, kink: int, unit: int, start: int, units: int
) -> None:
    """Memory is piecewise linear: above some size, each sample needs more."""

    def needs(size: int) -> int:
        return -(-(fixed + each * size + more * max(0, size - kink)) // GRAIN) * GRAIN

    found = largest(needs, start * unit, needs(units * unit), unit)
    assert found.below % unit == 0
    assert found.below >= units * unit  # the next may need no more, to the grain
    assert needs(found.below) <= needs(units * unit)
    assert found.above == found.below + unit
    assert needs(found.above) > needs(units * unit)


def test_a_straight_line_takes_few_traces() -> None:
    for size in (1, 7, 24, 100, 5000):
        found = largest(lambda n: 1000 + 10 * n, 8, 1009 + 10 * size)
        assert (found.below, found.above) == (size, size + 1)
        assert len(found.needs) <= 6


def test_sizes_known_from_another_budget_are_not_tried_again() -> None:
    tried: list[int] = []

    def needs(size: int) -> int:
        tried.append(size)
        return 1000 + 10 * size

    small = largest(needs, 1, 1000 + 10 * 24)
    tried.clear()
    large = largest(needs, 1, 1000 + 10 * 5000, known=small.needs)
    assert (large.below, large.above) == (5000, 5001)
    assert not small.needs.keys() & set(tried)
    tried.clear()
    assert largest(needs, 1, 1000 + 10 * 24, known=large.needs).below == 24
    assert not tried


def test_nothing_fits() -> None:
    found = largest(lambda n: 100 + n, 8, 100)
    assert (found.below, found.above) == (0, 1)


def test_memory_that_does_not_depend_on_the_size_is_given_up() -> None:
    found = largest(lambda n: 100, 8, 1000)
    assert (found.above, len(found.needs)) == (None, MOST_TRIED)
