"""Small area charts made of characters, and what charts of every kind share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

FLAT_SHARE: Final = 0.02
"""A course within this share of its highest value is flat: drawn large, its noise would look like growth."""
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII: Final = " ._-=#"


def is_flat(values: Sequence[int]) -> bool:
    """Return whether values vary too little for a chart."""
    return max(values) - min(values) < FLAT_SHARE * max(values)


def thin(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` values: the highest of each of so many equal stretches."""
    if len(values) <= most:
        return list(values)
    bounds = [index * len(values) // most for index in range(most + 1)]
    return [max(values[start:end]) for start, end in pairwise(bounds)]


def axis_labels(lines: int, high: str, low: str) -> list[str]:
    """Return the label of each line of a chart, padded: the highest value at the top, the lowest below."""
    width = max(len(high), len(low))
    labels = [high, *[""] * (lines - 2), low][:lines]
    return [f"{label:>{width}}" for label in labels]


def area(values: Sequence[int], *, width: int, height: int = 4, ascii_only: bool = False) -> list[str]:
    """Return the chart's lines, top first, `width` characters or fewer.

    The axis runs from the lowest value to the highest. A column shows the highest of the
    values that fall on it; where there is room, a value is drawn several columns wide.

    Raises:
        ValueError: there is nothing to draw, or no room.
    """
    if not values or width < 1 or height < 1:
        raise ValueError(f"cannot draw {len(values)} values on {width} x {height} characters")
    marks = _ASCII if ascii_only else _BLOCKS
    low = min(values)
    high = max(max(values), low + 1)
    levels = height * (len(marks) - 1)
    # The lowest value still shows one level: an empty column would read as "no figure".
    columns = [1 + round((value - low) / (high - low) * (levels - 1)) for value in _columns(values, width)]
    return [_line(columns, row, marks).rstrip() for row in reversed(range(height))]


def _columns(values: Sequence[int], width: int) -> list[int]:
    drawn = thin(values, width)
    return [value for value in drawn for _ in range(width // len(drawn))]


def _line(columns: Sequence[int], row: int, marks: str) -> str:
    full = len(marks) - 1
    return "".join(marks[min(full, max(0, level - row * full))] for level in columns)
