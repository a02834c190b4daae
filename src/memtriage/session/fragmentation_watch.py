"""Follow what each GPU has reserved beyond the peak, and look closer when that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from memtriage.account.gpu_ledger import STRANDED
from memtriage.diagnose.fragmentation import ReservedCourse, ReservedGrowth, fragmentation_finding
from memtriage.model.findings import Finding
from memtriage.model.units import count, size
from memtriage.observe import cuda
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.marks import MarkPoint
from memtriage.session.record import SessionRecord, never_raises


@dataclass(frozen=True, slots=True)
class CloserLookPolicy:
    """How often a device with growing fragmentation is examined.

    Attributes:
        again: examine it again when what is reserved beyond the peak has grown by this factor since the last
            time. That takes a census and a dry run of compaction, together about a second.
    """

    again: float = 1.5


LOOK: Final = CloserLookPolicy()
Predict = Callable[[str], str | None]
"""Returns in words what compacting a device would cost and free now."""


def predicted_compaction(device: str) -> str | None:
    """Return in words what `memtriage.compact()` would cost and free now; None if it can do nothing.

    Args:
        device: `cuda:N`.
    """
    from memtriage.treat.compaction.api import compact

    of_device = next(iter(compact(device, dry_run=True).devices), None)
    if of_device is None:
        return None
    return (
        f"would move {size(of_device.moved)} in {count(of_device.storages, 'storage')}, and lower reserved "
        f"from {size(of_device.before.reserved)} to {size(of_device.predicted.reserved)}"
    )


@dataclass(slots=True)
class FragmentationWatch:
    """Follows the GPUs at the ends of steps.

    Args:
        rank: whose findings they are.
        record: gets a note if an examination fails.
        ledgers: asked for a census when something grows; its ledger says what pins segments.
        predict: called at the end of a step to predict a compaction.
    """

    rank: int | None
    record: SessionRecord
    ledgers: LedgerKeeper
    predict: Predict = predicted_compaction
    _courses: dict[str, ReservedCourse] = field(default_factory=dict)
    _looked: dict[str, int] = field(default_factory=dict)
    _asked_at: int | None = None
    _pinned: dict[str, str] = field(default_factory=dict)
    _compaction: dict[str, str] = field(default_factory=dict)

    def at_mark(self, mark: MarkPoint) -> None:
        """Take the counters of a step. A device that has reserved more since the last one may be examined."""
        if mark.name != "step":
            return
        self._note_pins()
        for reading in mark.readings:
            counters, device = reading.counters, reading.device
            if counters is None or counters.reserved is None or counters.peak_allocated is None:
                continue
            course = self._courses.setdefault(device, ReservedCourse())
            step = mark.position.step
            if course.add(step, counters.reserved, counters.peak_allocated):
                self._look_closer(device, course.growth(), step)

    @never_raises
    def _look_closer(self, device: str, growth: ReservedGrowth | None, step: int) -> None:
        if growth is None or growth.beyond < LOOK.again * self._looked.get(device, 0):
            return
        self._looked[device] = growth.beyond
        self.ledgers.ask()
        self._asked_at = step
        would = self.predict(device)
        if would is not None:
            self._compaction[device] = f"memtriage.compact() at the end of step {step:,} {would}"

    def findings(self) -> list[Finding]:
        """Return a finding for each device whose fragmentation grows, the worst first."""
        self._note_pins()
        found = [
            fragmentation_finding(
                device,
                growth,
                self._pinned.get(device),
                self._compaction.get(device),
                cuda.expandable_segments(),
            )
            for device, course in self._courses.items()
            if (growth := course.growth()) is not None
        ]
        for finding in found:
            finding.rank = self.rank
        return sorted(found, key=lambda finding: -(finding.bytes or 0))

    def _note_pins(self) -> None:
        """Keep what the requested ledger says about pinned segments: a later one may be of the end."""
        if self._asked_at is None or all(ledger.step != self._asked_at for ledger in self.ledgers.last):
            return
        self._asked_at = None
        for ledger in self.ledgers.last:
            for row in ledger.rows:
                if row.row == STRANDED and row.bytes and row.detail:
                    self._pinned[ledger.device] = f"at step {ledger.step:,}: {row.detail}"
