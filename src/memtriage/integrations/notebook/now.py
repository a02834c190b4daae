"""Show what holds memory now, and release what IPython keeps: the work of the one-line magics."""

from __future__ import annotations

from typing import Any

from memtriage.account.host_reading import read_host
from memtriage.account.ledgers import take_ledgers
from memtriage.diagnose import cells
from memtriage.integrations.notebook.outputs import drop_outputs
from memtriage.integrations.notebook.tracebacks import free_tracebacks
from memtriage.integrations.notebook.watched_cell import freed_since, kept_by, look, tidy
from memtriage.model.cell import Freed, MemoryNow
from memtriage.model.paths import SegmentKind


def memory_now(shell: Any, top: int) -> MemoryNow:
    """Return the ledgers, and the `top` largest holders."""
    on_host = read_host()  # before the census, which takes memory itself
    tidy(shell)
    census = look()
    holders = cells.holders(census)
    more: dict[str, int] = {}
    for holder in holders[top:]:
        more[holder.device] = more.get(holder.device, 0) + holder.bytes
    return MemoryNow(
        ledgers=take_ledgers(census.storages, on_host=on_host, parameters=census.parameters),
        holders=holders[:top],
        more=more,
        outputs=kept_by(census, SegmentKind.OUTPUT),
        traceback=kept_by(census, SegmentKind.LAST_TRACEBACK),
    )


def free_now(shell: Any, *, outputs: bool) -> Freed:
    """Free the last traceback, and where asked what `Out` keeps."""
    tidy(shell)
    before = look()
    frames = free_tracebacks(shell)
    if outputs:
        drop_outputs(shell)
    return freed_since(before, frames)[0]
