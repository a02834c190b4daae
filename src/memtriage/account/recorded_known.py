"""Which entry of the catalogue of known holders keeps a recorded block: by a library's function in its stack.

A recording has no objects: a block that such a function made may be kept by something else as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from memtriage.observe.holders.catalogue import SPECIFIC
from memtriage.observe.holders.entry import Holder

_FRAME: Final = re.compile(r"^(?P<path>.*):\d+ in (?P<function>\S+)$")


def entry_of_stack(frames: Iterable[str]) -> Holder | None:
    """The entry whose library function is innermost in a stack.

    Args:
        frames: `path/file.py:line in function`, innermost first.
    """
    for frame in frames:
        found = _FRAME.match(frame)
        if found is not None:
            entry = _entry_of(found["path"], found["function"])
            if entry is not None:
                return entry
    return None


def _entry_of(path: str, function: str) -> Holder | None:
    for entry in SPECIFIC:
        if any(function in site.functions and site.path in path for site in entry.sites):
            return entry
    return None


def entries_of_stacks(stacks: Sequence[Iterable[str]]) -> dict[int, Holder]:
    """The entry of each stack that has one, by its number."""
    found = ((number, entry_of_stack(frames)) for number, frames in enumerate(stacks))
    return {number: entry for number, entry in found if entry is not None}
