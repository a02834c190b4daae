"""The labels and kinds of findings: the same in every report, as text, on pages and in notebooks."""

from __future__ import annotations

from typing import Final

from memtriage.model.findings import FindingKind
from memtriage.playbook.entries import PLAYBOOK as ENTRIES

KEPT_ALIVE_BY: Final = "kept alive by"
ALSO_KEPT_ALIVE_BY: Final = "also kept alive by"
STORED_AT: Final = "stored at"
ALLOCATED_AT: Final = "allocated at"
SIZE: Final = "size"
RUNS_OUT: Final = "runs out"
DETECTED: Final = "detected"
WHY: Final = "why"
FIX: Final = "fix"
TO_CONFIRM: Final = "to confirm"
EVIDENCE: Final = "evidence"
PLAYBOOK: Final = "playbook"
UNLIKELY: Final = "unlikely to help"

KINDS: Final[dict[FindingKind, str]] = {
    "leak": "leak",
    "garbage_cycle": "garbage cycle",
    "residue": "residue",
    "fragmentation": "fragmentation",
    "private_pool": "private pool",
    "stream_pool": "stream pool",
    "out_of_memory": "out of memory",
    "pinned_rounding": "pinned-memory rounding",
    "malloc_retention": "memory kept by malloc",
    "worker_copy_on_write": "workers un-share memory",
    "shared_memory": "shared memory",
    "host_limit": "host memory at its limit",
    "rank_differs": "rank differs",
}
"""Kinds of findings in words."""


def playbook_entry(name: str, dot: str) -> str:
    """Return a playbook entry's name, its subject and the command that prints it, `dot` between them."""
    entry = ENTRIES.get(name)
    return name if entry is None else f"{name}{dot}{entry.subject}{dot}memtriage explain {name}"


def size_label(step: int | None) -> str:
    """Return the label of a size that a headline leaves out.

    >>> size_label(1200)
    'size at step 1,200'
    """
    return SIZE if step is None else f"{SIZE} at step {step:,}"


def detected(step: int | None, phase: str | None) -> str:
    """Return when a finding was made; empty where that is unknown.

    >>> detected(12, "forward"), detected(None, "forward"), detected(None, None)
    ('at step 12, in forward', 'in forward', '')
    """
    at = "" if step is None else f"at step {step:,}"
    where = "" if phase is None else phase if phase.startswith("after ") else f"in {phase}"
    return ", ".join(part for part in (at, where) if part)
