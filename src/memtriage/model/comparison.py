"""What changed between two recordings, in bytes; None if a recording does not say or lacks the device."""

from __future__ import annotations

import msgspec

from memtriage.model.findings import Finding


class ValueChange(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in the first recording and in the second."""

    before: int | None
    after: int | None

    @property
    def by(self) -> int | None:
        """How much more it is in the second; None when either is unknown."""
        return None if self.before is None or self.after is None else self.after - self.before


class FigureChange(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a device.

    Attributes:
        name: e.g. `peak allocated`, `stranded`; those without `peak` are of the moment of the snapshot.
    """

    name: str
    bytes: ValueChange


class OwnerChange(msgspec.Struct, frozen=True, kw_only=True):
    """What one owner holds, at the peak and at the snapshot: 0 where a recording has nothing of it."""

    owner: str
    at_peak: ValueChange
    at_end: ValueChange


class SiteChange(msgspec.Struct, frozen=True, kw_only=True):
    """What one allocation site holds. A site that a recording does not have holds 0.

    Attributes:
        site: `file.py:line in function` in the second recording, or in the first when the second has none.
        was: the site's name in the first recording, when the line moved; None otherwise.
        owner: what most of its bytes are.
        at_peak, at_end: bytes alive at the peak and at the snapshot.
        per_step: growth from step to step; unknown in a recording without steps.
        allocations: number of allocations.
    """

    site: str
    was: str | None
    owner: str
    at_peak: ValueChange
    at_end: ValueChange
    per_step: ValueChange
    allocations: ValueChange


class DeviceChange(msgspec.Struct, frozen=True, kw_only=True):
    """What changed on one device.

    Attributes:
        device: `cuda:N`.
        in_before, in_after: whether the recordings have this device.
        figures: totals.
        owners, sites: those that differ, the biggest change first.
        gone, new, same: findings of the first alone, of the second alone, and of both (as in the second).
    """

    device: str
    in_before: bool
    in_after: bool
    figures: list[FigureChange]
    owners: list[OwnerChange]
    sites: list[SiteChange]
    gone: list[Finding]
    new: list[Finding]
    same: list[Finding]


class RecordingChange(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one recording to another.

    Attributes:
        before, after: the files.
        devices: every device that either has.
    """

    schema: int = 1
    before: str
    after: str
    devices: list[DeviceChange]
