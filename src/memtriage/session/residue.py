"""What phases of training leave on the devices: one finding per device and holder."""

from __future__ import annotations

from collections.abc import Sequence

from memtriage.model.findings import Finding
from memtriage.model.paths import HolderPath
from memtriage.session.progress import TrainingProgress
from memtriage.session.record import SessionRecord


class PhaseResidue:
    """Collects the residue of phases.

    Memory that one phase leaves is still there at the ends of later phases. Its finding keeps the name of the
    first phase and takes the latest figures.

    Args:
        rank: whose findings they are.
        progress: where training stands.
        record: gets each finding when it is found, or found again.
    """

    def __init__(self, rank: int | None, progress: TrainingProgress, record: SessionRecord) -> None:
        self._rank = rank
        self._progress = progress
        self._record = record
        self._findings: dict[tuple[str, HolderPath | str | None], Finding] = {}

    def add(self, findings: Sequence[Finding]) -> None:
        """Take the findings made at the end of a phase."""
        for finding in findings:
            key = (finding.device, finding.held_at)
            if key in self._findings:
                finding.phase = self._findings[key].phase
            self._findings[key] = finding
            finding.rank, finding.step = self._rank, self._progress.position.step
        self._record.findings(findings, final=False)

    def findings(self) -> list[Finding]:
        """Return all findings, largest first."""
        return sorted(self._findings.values(), key=lambda finding: -(finding.bytes or 0))
