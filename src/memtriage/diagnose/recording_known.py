"""Known holders among the blocks of a recording. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memtriage.account.recorded_known import entries_of_stacks
from memtriage.diagnose.recording_view import Mask, View
from memtriage.model.units import size
from memtriage.observe.holders.entry import Holder


def known_bytes(view: View, lives: Mask) -> list[tuple[Holder, int]]:
    """Bytes of the marked lives by entry of the catalogue of known holders, biggest first."""
    entries = entries_of_stacks([stack.frames for stack in view.stacks])
    sums: dict[str, tuple[Holder, int]] = {}
    for number, entry in entries.items():
        held = view.total(lives & (view.replayed.stack == number))
        if held:
            sums[entry.name] = entry, sums.get(entry.name, (entry, 0))[1] + held
    return sorted(sums.values(), key=lambda pair: -pair[1])


def known_words(known: Sequence[tuple[Holder, int]]) -> list[str]:
    """A sentence of evidence; none where there is nothing known."""
    if not known:
        return []
    parts = ", ".join(f"{entry.name} {size(held)}" for entry, held in known)
    return [f"known holders among them, by the functions that made them: {parts}"]
