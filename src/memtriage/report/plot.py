"""Small area charts made of characters."""

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
    most = min(len(values), width)
    bounds = [index * len(values) // most for index in range(most + 1)]
    highest = (max(values[start:end]) for start, end in pairwise(bounds))
    return [value for value in highest for _ in range(width // most)]


def _line(columns: Sequence[int], row: int, marks: str) -> str:
    full = len(marks) - 1
    return "".join(marks[min(full, max(0, level - row * full))] for level in columns)
