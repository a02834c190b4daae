"""The largest batch, or length, with which a step fits: few traces, and the next larger one is traced too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

MOST_TRIED: Final = 40
"""Sizes that one search tries: memory that is linear in the size needs about six."""
_GROWS: Final = 8
"""An estimate is at most so many times the largest size that fits: further on, the line may be another."""


@dataclass(slots=True)
class SizeBounds:
    """What is known of the sizes between which the largest lies.

    Attributes:
        needs: bytes that each tried size needs.
        below: the largest that fits; 0 while none is known.
        above: the smallest that does not fit; None while none is known.
    """

    needs: dict[int, int] = field(default_factory=dict)
    below: int = 0
    above: int | None = None


def largest(
    measure: Callable[[int], int],
    start: int,
    budget: int,
    unit: int = 1,
    known: Mapping[int, int] = MappingProxyType({}),
) -> SizeBounds:
    """Find the largest multiple of a unit whose needs are within a budget, and the next one, which is not.

    Memory is piecewise linear in the size, so the next size to try is where the line through the two known
    ones meets the budget, and then the one next to it.

    Args:
        measure: returns the bytes that a size needs.
        start: the first size to try, where none is known.
        budget: bytes.
        unit: sizes are multiples of it.
        known: bytes that sizes need, from searches with other budgets.
    """
    search = SizeBounds()
    for size, needs in known.items():
        _note(search, size, needs, budget)
    size, turn, tried = max(unit, start // unit * unit), 0, 0
    while tried < MOST_TRIED:
        if tried or not known:
            _note(search, size, measure(size), budget)
        tried += 1
        if search.above is not None and search.above - search.below == unit:
            break
        if search.above is None or not search.below:
            size = _outward(search, budget, unit)
            continue
        # By the line, next to what it gave, and, where it misleads, in the middle.
        guess = (
            _on_the_line(search.needs, search.below, search.above, budget),
            size,  # which is a bound by now
            (search.below + search.above) // 2,
        )[turn % 3]
        turn += 1
        size = min(max(guess // unit * unit, search.below + unit), search.above - unit)
    return search


def _note(search: SizeBounds, size: int, needs: int, budget: int) -> None:
    search.needs[size] = needs
    if needs <= budget:
        search.below = max(search.below, size)
    else:
        search.above = size if search.above is None else min(search.above, size)


def _outward(search: SizeBounds, budget: int, unit: int) -> int:
    """The next size while all that were tried fit, or none does."""
    known = sorted(search.needs)
    if search.above is None:
        if len(known) == 1:
            return 2 * known[0]
        guess = _on_the_line(search.needs, known[-2], known[-1], budget) // unit * unit + unit
        return min(max(guess, known[-1] + unit), _GROWS * known[-1])
    guess = known[0] // 2 if len(known) == 1 else _on_the_line(search.needs, known[0], known[1], budget)
    return min(max(unit, guess // unit * unit), known[0] - unit)


def _on_the_line(needs: dict[int, int], first: int, second: int, budget: int) -> int:
    """The size at which the line through two sizes meets the budget; the middle if it does not rise."""
    slope = (needs[second] - needs[first]) / (second - first)
    if slope <= 0:
        return (first + second) // 2
    return int(first + (budget - needs[first]) / slope)
