"""Ledgers as a page draws them: a bar and a table, each row with its color."""

from __future__ import annotations

from itertools import cycle
from typing import Any, Final

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.report.run.words import ledger_rows, ledger_summary
from memtriage.report.snapshot.words import OWNER_LOOKS

_OWNER_COLORS: Final = {
    **{owner: look.color for owner, look in OWNER_LOOKS.items()},
    "buffer": "hue-12",
    "known cache": "hue-7",
    "garbage": "hue-4",
}
_ROW_COLORS: Final = {
    "rounding": "hue-10",
    "awaiting stream events": "awaiting",
    "releasable": "releasable",
    "stranded": "stranded",
    "context": "hue-11",
    "outside the allocator": "hue-7",
    "other processes": "hue-9",
    "no visible process": "hue-past",
    "foreign memory": "hue-8",
    "malloc in use": "hue-12",
    "malloc retained": "releasable",
    "Python objects": "hue-4",
    "other anonymous memory": "hue-past",
    "libraries": "hue-11",
    "mapped files": "hue-10",
    "shared memory": "hue-7",
    "shared anonymous memory": "hue-8",
}
_OTHER: Final = "hue-other"
_IN_TURN: Final = ("hue-1", "hue-9", "hue-3", "hue-10", "hue-2", "hue-8", "hue-5", "hue-12")
"""Of rows named by the program's own processes."""
_HATCHED: Final = "stranded"
_LONGEST_DETAIL: Final = 600


def ledger(ledger: Ledger, steps: int = 0) -> dict[str, Any]:
    """Return a ledger of a run as `assets/run.js` draws it; of a long one small rows are drawn together."""
    rows = ledger_rows(ledger.rows)
    in_turn = cycle(_IN_TURN if ledger.device == "job" else [_OTHER])
    return {
        "device": ledger.device,
        "total": ledger.total,
        "source": ledger.source,
        "summary": ledger_summary(ledger.total, ledger.step, steps),
        "rows": [_row(row, next(in_turn)) for row in rows],
    }


def _row(row: LedgerRow, other: str) -> dict[str, Any]:
    return {
        "row": row.row,
        "owner": row.owner,
        "bytes": row.bytes,
        "detail": None if row.detail is None else row.detail[:_LONGEST_DETAIL],
        "color": row_color(row, other),
        "hatched": row.row == _HATCHED,
    }


def row_color(row: LedgerRow, other: str = _OTHER) -> str:
    """Return the name of a row's color in `assets/page.css`: its owner's, its kind's, or else `other`."""
    if row.owner is not None:
        return _OWNER_COLORS.get(row.owner, other)
    return _ROW_COLORS.get(row.row, other)
