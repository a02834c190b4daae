"""Where one rank of a run stands: what metrics are made of."""

from __future__ import annotations

from typing import Final

import msgspec

from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark

MOST_NAMES: Final = 32
"""Names of marks that are reported, the first ones: a program may give every mark a name of its own."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rank at one instant. Sizes in bytes; what is unknown is None, or has no entry.

    Attributes:
        rank: None in a run without ranks.
        steps: completed optimizer steps.
        marked_at: Unix time of the last mark, in seconds.
        latest: of each device, the last mark that has figures of it.
        named: of each mark name (the first `MOST_NAMES` of them) and device, the last mark.
        stranded: reserved bytes that are free and cannot go back to the driver, by CUDA device.
        peak_allocated: the allocator's highest `allocated` since its start or the script's last reset.
        passing: how far memory rose between two marks and fell again, by CUDA device: room that a
            step needs; no entry before a peak was seen to rise.
        limits: bytes that the process may have: of each CUDA device, and of the `host`.
        growth: by device, bytes per step by which the lowest figures of the recent steps rise; 0 when they do
            not; no entry before there are enough steps to tell.
        host_rss, host_pinned: resident set; what the pinned-memory allocator has.
        host_classes: the rows of a host ledger; they sum to the resident set.
        ledgers: the closed ledgers, with owners, of the last census that made some.
        ledgers_at: Unix time of that, in seconds.
        leaks: what grows and has been named so far. A suspicion may still turn out to be none.
    """

    rank: int | None
    steps: int
    marked_at: float
    latest: tuple[Mark, ...] = ()
    named: tuple[Mark, ...] = ()
    stranded: dict[str, int] = msgspec.field(default_factory=dict)
    peak_allocated: dict[str, int] = msgspec.field(default_factory=dict)
    passing: dict[str, int] = msgspec.field(default_factory=dict)
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    growth: dict[str, float] = msgspec.field(default_factory=dict)
    host_rss: int | None = None
    host_pinned: int | None = None
    host_classes: dict[str, int] = msgspec.field(default_factory=dict)
    ledgers: tuple[Ledger, ...] = ()
    ledgers_at: float | None = None
    leaks: tuple[Finding, ...] = ()


def rows_of(ledger: Ledger) -> dict[str, int]:
    """A ledger's rows summed over owners, in its order."""
    sums: dict[str, int] = {}
    for row in ledger.rows:
        sums[row.row] = sums.get(row.row, 0) + row.bytes
    return sums
