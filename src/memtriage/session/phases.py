"""Phases of a watched run: what stayed at their ends, as findings of the run."""

from __future__ import annotations

from collections.abc import Iterable

from memtriage.model.findings import Finding


class PhaseResidue:
    """The residue found so far, one finding for each phase, device and holder: the latest."""

    def __init__(self) -> None:
        self._found: dict[tuple[str | None, str, str | None], Finding] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """What a phase left at one of its ends."""
        for finding in findings:
            self._found[finding.phase, finding.device, finding.holder] = finding

    def findings(self) -> list[Finding]:
        """All of them, largest first."""
        return sorted(self._found.values(), key=lambda finding: -(finding.bytes or 0))
