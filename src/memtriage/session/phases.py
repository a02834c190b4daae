"""Phases of a watched run: what stayed at their ends, as findings of the run."""

from __future__ import annotations

from collections.abc import Iterable

from memtriage.model.findings import Finding
from memtriage.model.paths import HolderPath


class PhaseResidue:
    """The residue found so far: one finding for each device and holder.

    What one phase leaves behind is there at the ends of later ones too: the finding names the first, and has
    the latest figures.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, HolderPath | str | None], Finding] = {}

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """What a phase left at its end; returns it under the phase that left it first."""
        told = []
        for finding in findings:
            key = (finding.device, finding.held_at)
            if key in self._found:
                finding.phase = self._found[key].phase
            self._found[key] = finding
            told.append(finding)
        return told

    def findings(self) -> list[Finding]:
        """All of them, largest first."""
        return sorted(self._found.values(), key=lambda finding: -(finding.bytes or 0))
