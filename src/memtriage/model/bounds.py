"""Bounds of numbers in untrusted files. They are checked when a file is read, not in memory."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MOST_RANKS: Final = 1 << 20
"""More processes than any job has had; what loops over the ranks that are missing stays fast."""
_LONGEST_S: Final = 1e10
"""Three hundred years: longer than a run, and as Unix time later than any."""

Seconds = Annotated[float, msgspec.Meta(ge=-_LONGEST_S, le=_LONGEST_S)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A size in bytes or a count. Reports draw them with numbers of 64 bits, and with floats."""
