"""Attribute recorded blocks to known holders, by a library's function in the allocation stack.

A recording has no objects: a block that such a function allocated may be kept by something else as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from memtriage.catalogue.catalogue import SPECIFIC
from memtriage.catalogue.entry import Holder
from memtriage.model.units import size
from memtriage.snapshots.view import DeviceView, Mask

_FRAME: Final = re.compile(r"^(?P<path>.*):\d+ in (?P<function>\S+)$")


def entry_of_stack(frames: Iterable[str]) -> Holder | None:
    """Return the entry whose library function is innermost in a stack.

    Args:
        frames: `path/file.py:line in function`, innermost first.
    """
    for frame in frames:
        match = _FRAME.match(frame)
        if match is not None:
            entry = _entry_of(match["path"], match["function"])
            if entry is not None:
                return entry
    return None


def _entry_of(path: str, function: str) -> Holder | None:
    for entry in SPECIFIC:
        if any(function in site.functions and site.path in path for site in entry.sites):
            return entry
    return None


def entries_of_stacks(stacks: Sequence[Iterable[str]]) -> dict[int, Holder]:
    """Return the entry of each stack that has one, by its number."""
    entries = ((number, entry_of_stack(frames)) for number, frames in enumerate(stacks))
    return {number: entry for number, entry in entries if entry is not None}


def known_bytes(view: DeviceView, lives: Mask) -> list[tuple[Holder, int]]:
    """Return bytes of the marked lives by entry of the catalogue of known holders, biggest first."""
    entries = entries_of_stacks([stack.frames for stack in view.stacks])
    sums: dict[str, tuple[Holder, int]] = {}
    for number, entry in entries.items():
        held = view.total(lives & (view.replayed.stack == number))
        if held:
            sums[entry.name] = entry, sums.get(entry.name, (entry, 0))[1] + held
    return sorted(sums.values(), key=lambda pair: -pair[1])


def known_words(known: Sequence[tuple[Holder, int]]) -> list[str]:
    """Return a sentence of evidence; none where no entry is known."""
    if not known:
        return []
    parts = ", ".join(f"{entry.name} {size(held)}" for entry, held in known)
    return [f"known holders among them, by the functions that made them: {parts}"]
