"""Byte counts in words, as every report and every sentence of evidence writes them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
UNKNOWN: Final = "n/a"


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
