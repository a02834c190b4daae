"""Sizes as messages print them, in text without white space."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

# The look-behind and the bounds keep a long run of digits from costing quadratic time.
NUMBER: Final = r"(?<!\d)(?<!\d\.)\d[\d,]{0,30}(?:\.\d{0,9})?"
SIZE: Final = rf"({NUMBER})(bytes?|[KMGTPE]i?B)"
"""Two groups: number and unit. KB, MB and GB are powers of 1024 too wherever these messages use them."""

_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("b", "k", "m", "g", "t", "p", "e"))}
_UNLIMITED: Final = 2**63
"""Figures from here on are a driver's "unknown" (2**64 bytes) or an unset limit."""


def to_bytes(number: str, unit: str) -> int | None:
    """Bytes of a printed size, to the nearest; None for a number that means "unknown".

    >>> to_bytes("2.87", "GiB"), to_bytes("153,700,88", "kB"), to_bytes("17179869184.00", "GiB")
    (3081639035, 15738970112, None)
    """
    # Exact: as a float, a figure in GiB could be rounded to the other neighbor.
    exact = Decimal(number.replace(",", "")) * _UNITS[unit[0].lower()]
    return None if exact >= _UNLIMITED else int(exact.to_integral_value())


def exact_bytes(digits: str) -> int | None:
    """A count of bytes that is printed in full; None where it is more than 64 bits can hold."""
    count = int(digits.replace(",", ""))
    return count if count < 2**64 else None


def first_size(pattern: re.Pattern[str], text: str) -> int | None:
    """The size that a pattern finds; None without one. The pattern's groups that match are a `SIZE`."""
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return to_bytes(number, unit)


def as_printed(nbytes: int) -> str:
    """Bytes as torch prints them (`format_size`): the step to the next unit is above 1024, not at it.

    >>> as_printed(3081639035), as_printed(1024**3), as_printed(0)
    ('2.87 GiB', '1024.00 MiB', '0 bytes')
    """
    unit = printed_unit(nbytes)
    name = {1: "bytes", 1024: "KiB", 1024**2: "MiB", 1024**3: "GiB"}[unit]
    return f"{nbytes} {name}" if unit == 1 else f"{nbytes / unit:.2f} {name}"


def printed_unit(nbytes: int) -> int:
    """Bytes of the unit that torch prints a size in."""
    for unit in (1024, 1024**2):
        if abs(nbytes) <= 1024 * unit:
            return unit if abs(nbytes) > 1024 else 1
    return 1024**3
