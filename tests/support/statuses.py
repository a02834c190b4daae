"""A rank on a GPU, as metrics see it: every gauge has a value."""

from __future__ import annotations

from typing import Any

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.run_status import RunStatus
from support.runs import GIB, MIB, leak


def mark(name: str, device: str, allocated: int | None, reserved: int | None = None, **fields: Any) -> Mark:
    known = {"step": 12, "microbatch": 0, "rank": None, "time_s": 40.0}
    return Mark(name=name, device=device, allocated=allocated, reserved=reserved, **(known | fields))


def status(rank: int | None = None, **changes: Any) -> RunStatus:
    """The status of a rank with one GPU; `changes` replace fields."""
    device = f"cuda:{rank or 0}"
    ledger = Ledger(
        device=device,
        total=7 * GIB,
        source="cudaMemGetInfo",
        rows=[
            LedgerRow(row="requested", bytes=2 * GIB, owner="parameter"),
            LedgerRow(row="requested", bytes=GIB, owner="gradient"),
            LedgerRow(row="requested", bytes=GIB, owner="parameter", detail="in a private pool"),
            LedgerRow(row="stranded", bytes=3 * GIB),
        ],
    )
    known: dict[str, Any] = {
        "rank": rank,
        "steps": 12,
        "marked_at": 1_700_000_040.0,
        "latest": (
            mark("step", "cpu", 2 * GIB, 3 * GIB),
            mark("step", device, 4 * GIB, 7 * GIB, requested=4 * GIB - MIB, outside=600 * MIB),
        ),
        "named": (mark("step", device, 4 * GIB, 7 * GIB), mark("after refit", device, GIB, 7 * GIB)),
        "stranded": {device: 3 * GIB},
        "peak_allocated": {device: 5 * GIB},
        "passing": {device: GIB},
        "limits": {device: 80 * GIB, "host": 512 * GIB},
        "growth": {device: 164.0 * MIB, "cpu": 0.0},
        "host_rss": 5 * GIB,
        "host_pinned": 512 * MIB,
        "host_classes": {"malloc in use": 2 * GIB, "libraries": 3 * GIB},
        "ledgers": (ledger,),
        "ledgers_at": 1_700_000_012.0,
        "leaks": (leak(device=device),),
    }
    return RunStatus(**(known | changes))
