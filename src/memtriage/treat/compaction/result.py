"""What `compact()` returns: figures and text, nothing that keeps memory alive. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from memtriage.model.units import size
from memtriage.treat.device.protocol import Use


@dataclass(frozen=True, slots=True)
class NotMoved:
    """Live memory that strands free bytes and was not moved.

    Attributes:
        reason: why not.
        bytes: the live bytes.
        blocks: in how many blocks.
        stranded: free bytes of the segments (pages) that hold them.
    """

    reason: str
    bytes: int
    blocks: int
    stranded: int


@dataclass(frozen=True, slots=True)
class DeviceCompaction:
    """One device.

    Attributes:
        device: `cuda:N`.
        before: allocated and reserved when called.
        predicted: allocated and reserved after the plan. A dry run carries the whole plan out on the
            allocator's simulator; else it is the plan's own sum, exact except for the last segment of each
            kind.
        after: allocated and reserved at the end; None for a dry run.
        moved: bytes moved, each counted once.
        storages: how many storages were moved.
        through_host: bytes of `moved` that went through host memory.
        refused: what could not be moved, the most stranded bytes first.
        stopped: why it ended early, in words; else None. All values are in place.
        seconds: time taken.
    """

    device: str
    before: Use
    predicted: Use
    after: Use | None
    moved: int = 0
    storages: int = 0
    through_host: int = 0
    refused: tuple[NotMoved, ...] = ()
    stopped: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        now = self.predicted if self.after is None else self.after
        would = "would move" if self.after is None else "moved"
        lines = [
            f"{self.device}: {would} {size(self.moved)} in {self.storages} storages, reserved "
            f"{size(self.before.reserved)} -> {size(now.reserved)} "
            f"(allocated {size(now.allocated)}), {self.seconds * 1e3:.1f} ms"
        ]
        lines += [
            f"  not moved: {size(row.bytes)} in {row.blocks} blocks, stranding {size(row.stranded)}: "
            f"{row.reason}"
            for row in self.refused
        ]
        if self.stopped is not None:
            lines.append(f"  stopped: {self.stopped}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Compaction:
    """What `compact()` did, or with `dry_run` would do.

    Attributes:
        devices: one entry for each device looked at.
        dry_run: nothing was moved.
        notes: why devices could not be examined, in words.
    """

    devices: tuple[DeviceCompaction, ...]
    dry_run: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def before(self) -> Use:
        """Allocated and reserved of all devices when called."""
        return _total([device.before for device in self.devices])

    @property
    def predicted(self) -> Use:
        """Allocated and reserved of all devices after the plans."""
        return _total([device.predicted for device in self.devices])

    @property
    def after(self) -> Use | None:
        """Allocated and reserved of all devices at the end; None for a dry run."""
        after = [device.after for device in self.devices if device.after is not None]
        return None if self.dry_run else _total(after)

    @property
    def moved(self) -> int:
        """Bytes moved."""
        return sum(device.moved for device in self.devices)

    @property
    def refused(self) -> tuple[NotMoved, ...]:
        """Refusals of all devices."""
        return tuple(row for device in self.devices for row in device.refused)

    @property
    def seconds(self) -> float:
        """Time taken."""
        return sum(device.seconds for device in self.devices)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.devices), *self.notes])


def _total(uses: list[Use]) -> Use:
    return Use(sum(use.allocated for use in uses), sum(use.reserved for use in uses))
