"""A small area chart made of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII: Final = " ._-=#"


def area(
    values: Sequence[int], *, width: int, height: int = 4, ascii_only: bool = False, low: int | None = None
) -> list[str]:
    """Return the chart's lines, top first, `width` characters or fewer.

    The axis runs from `low`, or else from the lowest value, to the highest. A column shows the highest of the
    values that fall on it; where there is room, a value is drawn several columns wide.

    Raises:
        ValueError: there is nothing to draw, or no room.
    """
    if not values or width < 1 or height < 1:
        raise ValueError(f"cannot draw {len(values)} values on {width} x {height} characters")
    marks = _ASCII if ascii_only else _BLOCKS
    low = min(values) if low is None else low
    high = max(max(values), low + 1)
    levels = height * (len(marks) - 1)
    # The lowest value still shows one level: an empty column would read as "no figure".
    columns = [1 + round((value - low) / (high - low) * (levels - 1)) for value in _columns(values, width)]
    return [_line(columns, row, marks).rstrip() for row in reversed(range(height))]


def _columns(values: Sequence[int], width: int) -> list[int]:
    if len(values) <= width:
        return [value for value in values for _ in range(width // len(values))]
    bounds = [index * len(values) // width for index in range(width + 1)]
    return [max(values[start:end]) for start, end in pairwise(bounds)]


def _line(columns: Sequence[int], row: int, marks: str) -> str:
    full = len(marks) - 1
    return "".join(marks[min(full, max(0, level - row * full))] for level in columns)
