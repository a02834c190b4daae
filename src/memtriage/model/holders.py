"""Known holders of memory as plain data: what a catalogue entry says, what was found, what was cleared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

import msgspec

from memtriage.model.units import size

HolderKind = Literal[
    "weight copies",
    "workspace",
    "lookup table",
    "activations",
    "communication",
    "graphs",
    "statistics",
    "host",
    "model state",
    "generic",
    "registered",
]
"""What a holder keeps: the groups by which `clear_caches(kinds=...)` chooses."""

KINDS: Final[tuple[str, ...]] = get_args(HolderKind)

ClearPolicy = Literal["automatic", "on request", "never"]
"""Whether `clear_caches()` clears an entry by itself, only when its name or kind is given, or not at all."""

Condition = Literal["graphs", "backward"]
"""When an entry must not be cleared. `graphs`: a captured CUDA graph may be replayed with its addresses.
`backward`: a backward is running, or pending (a graph still has its saved tensors), as in the middle of a
step. During a capture nothing is cleared at all."""

ClearStatus = Literal["cleared", "skipped", "failed", "absent"]

CAPTURE_UNDER_WAY: Final = "the capture of a CUDA graph is under way"


class HolderHere(msgspec.Struct, kw_only=True):
    """An entry of the catalogue, and whether the installed versions have it. Words only.

    Attributes:
        name, library, kind, symbol, holds, clears, refills, policy, why, forbidden: as the entry has them.
        version: of the installed library; None if none is installed, or the entry belongs to none.
        applies: whether the installed version has it.
        versions: which versions have it, and where.
        reason: why it applies or not.
    """

    name: str
    library: str
    kind: str
    symbol: str
    holds: str
    clears: str
    refills: str
    policy: str
    why: str
    forbidden: list[str]
    version: str | None
    applies: bool
    versions: str
    reason: str


class HolderReading(msgspec.Struct, kw_only=True):
    """What one entry holds now. Sizes in bytes.

    Attributes:
        name: the catalogue entry.
        places: where it was found, largest first, as `path` and bytes.
        entries: cached values in all places, where they can be counted.
        nbytes: bytes of its storages by device (`cuda:N`, `cpu`), and of other objects (`host`).
        storages: (device, base address, bytes) of each storage, once.
        failed: why it could not be read.
    """

    name: str
    places: list[tuple[str, int]] = msgspec.field(default_factory=list)
    entries: int | None = None
    nbytes: dict[str, int] = msgspec.field(default_factory=dict)
    storages: list[tuple[str, int, int]] = msgspec.field(default_factory=list)
    failed: str | None = None

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(self.nbytes.values())


class SegmentPinning(msgspec.Struct, frozen=True, kw_only=True):
    """What the storages of an entry do to the allocator's segments. Sizes in bytes.

    Attributes:
        segments: segments in which it has a block.
        nbytes: bytes of these segments: what it pins, alone or with others.
        releasable: bytes that `empty_cache()` could return once it is cleared, beyond what it can now.
    """

    segments: int
    nbytes: int
    releasable: int


class AllocatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Allocated and reserved bytes of a CUDA device; None where the allocator does not say."""

    allocated: int | None
    reserved: int | None


class HolderOutcome(msgspec.Struct, kw_only=True):
    """What became of one entry. Sizes in bytes, by device.

    Attributes:
        name: the catalogue entry.
        kind: what it keeps.
        status: `absent`: nothing of it was found.
        reason: why it was skipped, or what failed.
        places: where it was found.
        before, after: bytes that it held.
        pins: what its storages did to the allocator's segments; None without storages in such segments.
        freed: bytes of its storages that were gone after garbage collection: less than `before` if something
            else holds them, too. For other objects: the difference, or the fall of the allocator's counter.
    """

    name: str
    kind: str
    status: ClearStatus
    reason: str | None = None
    places: int = 0
    before: dict[str, int] = msgspec.field(default_factory=dict)
    after: dict[str, int] = msgspec.field(default_factory=dict)
    pins: SegmentPinning | None = None
    freed: dict[str, int] = msgspec.field(default_factory=dict)


class Cleared(msgspec.Struct, kw_only=True):
    """What `clear_caches` did.

    Attributes:
        entries: one outcome per entry that was asked for, in the order of the catalogue.
        before: the allocator's figures by device, before anything was done.
        after_clear: after the entries were cleared.
        after: after garbage was collected and the cache emptied.
        collected: objects that the cyclic collector found; None where it was not run.
        cache: `emptied`, or why it was not.
        seconds: how long all of it took.
    """

    entries: list[HolderOutcome]
    before: dict[str, AllocatorFigures]
    after_clear: dict[str, AllocatorFigures]
    after: dict[str, AllocatorFigures]
    collected: int | None
    cache: str
    seconds: float

    def with_status(self, *statuses: ClearStatus) -> list[HolderOutcome]:
        """The outcomes with one of these statuses."""
        return [entry for entry in self.entries if entry.status in statuses]

    @property
    def cleared(self) -> list[HolderOutcome]:
        return self.with_status("cleared")

    @property
    def skipped(self) -> list[HolderOutcome]:
        return self.with_status("skipped")

    @property
    def failed(self) -> list[HolderOutcome]:
        return self.with_status("failed")

    @property
    def freed(self) -> dict[str, int]:
        """Bytes freed, by device."""
        return total_by_device(entry.freed for entry in self.entries)

    def lines(self) -> list[str]:
        """One line for each entry that was found, then the allocator's figures."""
        lines = [_line(entry) for entry in self.entries if entry.status != "absent"]
        for device, then in self.before.items():
            now = self.after.get(device, then)
            lines.append(
                f"{device}: allocated {size(then.allocated)} -> {size(now.allocated)}, "
                f"reserved {size(then.reserved)} -> {size(now.reserved)}; cache {self.cache}"
            )
        return lines


def total_by_device(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several figures by device."""
    sums: dict[str, int] = {}
    for part in parts:
        for device, nbytes in part.items():
            sums[device] = sums.get(device, 0) + nbytes
    return sums


def by_device(nbytes: Mapping[str, int]) -> str:
    """Bytes by device in words, e.g. `240.0 MiB on cuda:0`.

    >>> by_device({"cuda:0": 1 << 20, "cpu": 0}), by_device({})
    ('1.0 MiB on cuda:0', 'nothing')
    """
    return ", ".join(f"{size(count)} on {device}" for device, count in nbytes.items() if count) or "nothing"


def _line(outcome: HolderOutcome) -> str:
    held = f"{outcome.name}: {outcome.status}"
    if outcome.status == "cleared":
        return f"{held}, held {by_device(outcome.before)}{_pins(outcome)}, freed {by_device(outcome.freed)}"
    return f"{held} ({outcome.reason}), holds {by_device(outcome.before)}{_pins(outcome)}"


def _pins(outcome: HolderOutcome) -> str:
    if outcome.pins is None or not outcome.pins.segments:
        return ""
    return (
        f" in segments of {size(outcome.pins.nbytes)} ({size(outcome.pins.releasable)} releasable without it)"
    )
