"""Byte counts in words, as every report and every sentence of evidence writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
UNKNOWN: Final = "n/a"
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size(count: int | float | None) -> str:
    """Return bytes with one decimal in the largest binary unit that keeps the number below 1,024.

    >>> size(171966464), size(512), size(-2048), size(None)
    ('164.0 MiB', '512 B', '-2.0 KiB', 'n/a')
    """
    if count is None:
        return UNKNOWN
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if round(abs(value), 1) < 1024 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def parse_size(given: int | str, name: str) -> int:
    """Bytes of a size as people write it: `80GiB`, `24000MB` (powers of 1000 without the i) or a number.

    Args:
        given: the size.
        name: what it is, for the error.

    Raises:
        ValueError: it is none, or not positive.
    """
    if isinstance(given, str):
        found = _SIZE.fullmatch(given)
        if found is None:
            raise ValueError(f"{name} {given!r} is no size; expected one as 80GiB, 24000MB or 85899345920")
        number, unit, binary, _ = found.groups()
        given = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if given <= 0:
        raise ValueError(f"{name}={given}; expected a positive number of bytes")
    return given


def rank_list(ranks: Iterable[int]) -> str:
    """Return rank numbers with runs drawn together.

    >>> rank_list([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = [[rank] for rank in ordered[:1]]
    for before, rank in pairwise(ordered):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
