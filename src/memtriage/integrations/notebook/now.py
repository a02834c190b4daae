"""Show what holds memory now, and release what IPython keeps: the work of the one-line magics."""

from __future__ import annotations

import gc
from typing import Any

from memtriage.account.census import Look
from memtriage.account.host_reading import read_host
from memtriage.account.ledgers import take_ledgers
from memtriage.diagnose import cells
from memtriage.integrations.notebook.outputs import behind_variables, drop_outputs, output_holds
from memtriage.integrations.notebook.tracebacks import free_tracebacks
from memtriage.integrations.notebook.watched_cell import freed_since, held_by_traceback
from memtriage.integrations.notebook.words import census_in_words
from memtriage.model.cell import Freed, MemoryNow, OutputHold
from memtriage.model.census import Census


def look(shell: Any) -> tuple[Census, list[OutputHold]]:
    """Return a census of this instant, under a notebook's names, and what `Out` alone holds."""
    behind_variables(shell.user_ns)
    gc.collect()
    with Look() as view:
        return census_in_words(view.census()), output_holds(view, shell.user_ns.get("_oh", {}))


def memory_now(shell: Any, top: int) -> MemoryNow:
    """Return the ledgers, and the `top` largest holders."""
    on_host = read_host()  # before the census, which takes memory itself
    census, outputs = look(shell)
    holders = cells.holders(census)
    more: dict[str, int] = {}
    for holder in holders[top:]:
        more[holder.device] = more.get(holder.device, 0) + holder.bytes
    return MemoryNow(
        ledgers=take_ledgers(census.storages, on_host=on_host, parameters=census.parameters),
        holders=holders[:top],
        more=more,
        outputs=outputs[:top],
        traceback=held_by_traceback(census),
    )


def free_now(shell: Any, *, outputs: bool) -> tuple[Freed, list[OutputHold]]:
    """Free the last traceback, and where asked the outputs that alone hold tensors; with what others hold."""
    before, held = look(shell)
    numbers = [output.number for output in held] if outputs else []
    frames = free_tracebacks(shell)
    drop_outputs(shell, numbers)
    freed, _ = freed_since(before, frames)
    freed.outputs = sorted(numbers)
    return freed, [] if outputs else held
