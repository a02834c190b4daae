"""One word for a run, from its findings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memtriage.model import Finding, FindingKind, Verdict
from memtriage.model.findings import GROWING

_IN_ORDER: Final[tuple[tuple[Verdict, frozenset[FindingKind]], ...]] = (
    ("leak", GROWING),
    ("residue", frozenset({"residue"})),
    ("fragmentation", frozenset({"fragmentation"})),
)


def verdict(findings: Iterable[Finding], died_of_memory: bool) -> Verdict:
    """Return the verdict: the first that holds of out_of_memory, leak, residue, fragmentation, clean.

    Findings of other kinds are worth reading and change no verdict. Whether a process was killed, or
    memtriage could not judge, is not to be seen from findings.

    Args:
        findings: of all devices and ranks.
        died_of_memory: whether the script ended because memory ran out.
    """
    if died_of_memory:
        return "out_of_memory"
    kinds = {finding.kind for finding in findings}
    return next((word for word, causes in _IN_ORDER if kinds & causes), "clean")
