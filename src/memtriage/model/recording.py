"""A recorded allocator history (a PyTorch memory snapshot), replayed: columns, and what they prove.

Events are columns (one array per field), not objects: a recording has a million of them. Every array of
`Events` has one entry per event, in the order of the trace; a *life* is one block from its allocation to its
end. Sizes are bytes, times microseconds since the epoch. Indices that point nowhere are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memtriage.model.blocks import Block, Segment
from memtriage.model.findings import Finding


class SnapshotError(ValueError):
    """A file is not a snapshot, is damaged, or contains what no snapshot has. The text says which."""


Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Int16s = NDArray[np.int16]
Bytes8 = NDArray[np.uint8]

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]
"""What the allocator does that changes memory, in the words of torch's memory history."""
EVENT_KINDS: Final = (*get_args(Action), "snapshot", "other", "annotate")
"""Names of the values in `Events.kind`; `other` is an action that this version does not know."""

ALLOC: Final = 0
FREE_REQUESTED: Final = 1
FREE_COMPLETED: Final = 2
SEGMENT_ALLOC: Final = 3
SEGMENT_FREE: Final = 4
SEGMENT_MAP: Final = 5
SEGMENT_UNMAP: Final = 6
OOM: Final = 7
OTHER_EVENT: Final = 9
ANNOTATE: Final = 10

RecordedOwner = Literal[
    "parameter",
    "gradient",
    "optimizer state",
    "saved for backward",
    "autograd context",
    "backward temporary",
    "optimizer temporary",
    "forward temporary",
    "communication buffer",
    "cuBLAS workspace",
    "variable",
    "c++ only",
    "before the recording",
]
"""What a block can be, inferred from its frames and its life. `owner` columns have the indices.

They are the words of the census as far as a recording allows. The three temporaries die in the phase that
made them; the frames of a `variable` only say where it was made; `c++ only` has no frames, and no step to
infer more from; `before the recording` is older than the first event, and its segment kept no frames.
"""

OWNERS: Final[tuple[RecordedOwner, ...]] = get_args(RecordedOwner)

NO_FRAMES: Final = "no Python frames"
"""The site of an allocation without recorded frames (autograd's threads, C++)."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One distinct call stack of a recording.

    Attributes:
        site: `file.py:line in function` of the responsible frame; `NO_FRAMES` without frames.
        frames: `file.py:line in function`, innermost first, at most `MAX_FRAMES`.
    """

    site: str
    frames: tuple[str, ...]


MAX_FRAMES: Final = 24
"""Frames of a stack that are kept as text for reports."""


@dataclass(frozen=True, slots=True)
class Events:
    """The trace of one device, as columns of equal length.

    Attributes:
        time_us: when; never falls.
        kind: index into `EVENT_KINDS`.
        address: first byte of the block or segment; 0 for an `oom`.
        size: bytes as recorded: the requested size (blocks), the driver allocation (segments).
        stream: handle of the stream.
        stack: index into `Recording.stacks`, of the call that made the event.
        device_free: free bytes of the device by index of the `oom` event, where recorded.
        pool: pool by index of the alloc or segment_alloc event, where it is known and not the default.
        labels: what the program said of a block, by index of the alloc or annotate event.
    """

    time_us: Int64s
    kind: Bytes8
    address: Int64s
    size: Int64s
    stream: Int64s
    stack: Int32s
    device_free: dict[int, int] = field(default_factory=dict)
    pool: dict[int, tuple[int, int]] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.time_us)


@dataclass(frozen=True, slots=True)
class Lives:
    """Every block that was alive at some instant of the recording, as columns of equal length.

    Attributes:
        born: index of the alloc event; -1 when older than the first event.
        died: index of the event that freed it (`free_requested`); -1 when alive at the snapshot.
        gone: index of the event from which its bytes could be used again (`free_completed`); -1 when not yet.
        address: first byte.
        size: bytes it takes in its segment.
        requested: bytes asked for, at most `size`.
        stream: handle of the stream it was allocated for.
        stack: index into `Recording.stacks`, of its allocation.
        owner: index into `OWNERS`.
        pool: index into `DeviceRecording.pools`.
    """

    born: Int32s
    died: Int32s
    gone: Int32s
    address: Int64s
    size: Int64s
    requested: Int64s
    stream: Int64s
    stack: Int32s
    owner: Bytes8
    pool: Int16s

    def __len__(self) -> int:
        return len(self.born)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a device's segments are made of at one instant, in bytes.

    `reserved` = `allocated` + `awaiting` + `releasable` + `stranded` + `private_pools_free`; `allocated` =
    `requested` + `rounding`. `private_pools` is the part of `reserved` outside the default pool, and
    `private_pools_free` its wholly free segments: they cannot be released while a CUDA graph uses the pool,
    and a snapshot does not say whether one does.
    """

    allocated: int
    reserved: int
    requested: int
    rounding: int
    releasable: int
    stranded: int
    awaiting: int
    private_pools: int
    private_pools_free: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The figures after each event, in bytes: arrays as long as the events.

    Attributes:
        allocated: bytes of live blocks; falls when a free is asked for.
        active: `allocated` plus blocks that await a stream; falls when a free is complete.
        reserved: bytes of segments (mapped pages of expandable ones).
        releasable: free bytes that `empty_cache()` would return.
        private_pools_free: bytes of wholly free segments of private pools, see `Figures`.
    """

    allocated: Int64s
    active: Int64s
    reserved: Int64s
    releasable: Int64s
    private_pools_free: Int64s

    @property
    def stranded(self) -> Int64s:
        """Free bytes that cannot return to the driver because of live blocks."""
        return self.reserved - self.active - self.releasable - self.private_pools_free


@dataclass(frozen=True, slots=True)
class OwnedBytes:
    """Bytes of one owner, allocated at one site, alive at one instant.

    Attributes:
        owner: one of `OWNERS`.
        site: `file.py:line in function`.
        bytes: of blocks.
        count: blocks.
    """

    owner: str
    site: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The instant of the highest allocated bytes.

    Attributes:
        event: index of the event that reached it; -1 when the start of the recording was never exceeded.
        time_us: its time.
        allocated, reserved, stranded: in bytes, at that instant.
        owners: what was alive then, biggest first; they sum to `allocated`.
    """

    event: int
    time_us: int
    allocated: int
    reserved: int
    stranded: int
    owners: tuple[OwnedBytes, ...]


@dataclass(frozen=True, slots=True)
class SiteRow:
    """What one allocation site did in the recording.

    Attributes:
        site: `file.py:line in function`.
        owner: what most of its bytes are, one of `OWNERS`.
        stack: index into `Recording.stacks` of its biggest call stack.
        at_peak, at_end: bytes alive at the peak and at the snapshot.
        count_at_end: its blocks alive at the snapshot.
        allocations: number of alloc events.
        allocated: bytes of all these events.
        per_step: bytes by which it grows from step to step; None when no steps were found, 0 when steady.
    """

    site: str
    owner: str
    stack: int
    at_peak: int
    at_end: int
    count_at_end: int
    allocations: int
    allocated: int
    per_step: int | None


@dataclass(frozen=True, slots=True)
class LabelRow:
    """The blocks that have one label of the program's (`_set_memory_metadata`, `_annotate_tensor`).

    Attributes:
        label: its text.
        at_peak, at_end: bytes alive at the peak and at the snapshot.
        blocks: how many were labelled.
    """

    label: str
    at_peak: int
    at_end: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps found in the trace.

    Attributes:
        ends: index of the first event after each step, rising; step i is events[ends[i-1]:ends[i]].
        source: `annotations`, `optimizer frames`, `period`, or `none`.
        repeats: how often something recurs that has neither a backward nor an optimizer, and is no step.
    """

    ends: tuple[int, ...] = ()
    source: str = "none"
    repeats: int = 0

    @property
    def count(self) -> int:
        """Number of steps that end within the recording."""
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class FreeRange:
    """A free block at the moment of an out-of-memory error.

    Attributes:
        address, size: the block, in bytes.
        stream: of its segment.
        pool: of its segment.
        segment: address of its segment.
        whole: it is a whole segment (the allocator returns these before it fails, except in private pools).
    """

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    segment: int
    whole: bool


@dataclass(frozen=True, slots=True)
class OomEvent:
    """An allocation that failed with an out-of-memory error.

    Attributes:
        event: index of the event.
        time_us: when.
        requested: bytes asked for.
        device_free: what the driver had free, in bytes; None where not recorded.
        stream: the stream of the request.
        stack: index into `Recording.stacks`.
        allocated, reserved: bytes at that instant.
        free: the free blocks at that instant, biggest first.
    """

    event: int
    time_us: int
    requested: int
    device_free: int | None
    stream: int
    stack: int
    allocated: int
    reserved: int
    free: tuple[FreeRange, ...]


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A segment at the snapshot whose free bytes cannot return to the driver, and what pins them.

    Attributes:
        segment: the segment.
        stranded: its free bytes that cannot be released.
        pins: its blocks that are in use, biggest first.
        owners: what each of `pins` is, one of `OWNERS`.
    """

    segment: Segment
    stranded: int
    pins: tuple[Block, ...]
    owners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceRecording:
    """One device of a recording, replayed.

    Attributes:
        device: `cuda:N` or `xpu:N`.
        events, lives, timeline: the replay. See there.
        pools: pool ids that `Lives.pool` points into; (0, 0) is the default pool.
        start: allocated and reserved bytes before the first event.
        end: the figures at the moment of the snapshot, from its segments.
        segments: the segments at the snapshot, in order of address, blocks with their sites.
        pinned: those with stranded bytes, the worst first.
        peak: when most was allocated.
        owners: what is alive at the snapshot, biggest first; they sum to `end.allocated`.
        sites: allocation sites, those that hold most at the peak or at the end first.
        steps: training steps found.
        ooms: out-of-memory errors.
        exact_from_us: time from which the timeline is exact; None if the replay is exact throughout.
        notes: what the recording does not say, in words.
        findings: what is wrong; empty when healthy.
        judged: there is enough to judge growth by; without it, no finding does not mean clean.
        labels: the bytes of what the program labelled, most first.
    """

    device: str
    events: Events
    lives: Lives
    timeline: Timeline
    pools: tuple[tuple[int, int], ...]
    start: tuple[int, int]
    end: Figures
    segments: tuple[Segment, ...]
    pinned: tuple[PinnedSegment, ...]
    peak: Peak
    owners: tuple[OwnedBytes, ...]
    sites: tuple[SiteRow, ...]
    steps: Steps
    ooms: tuple[OomEvent, ...]
    exact_from_us: int | None
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    judged: bool = True
    labels: tuple[LabelRow, ...] = ()

    @property
    def verdict(self) -> str:
        """The kind of the first finding, `clean`, or `not_judged`."""
        if self.findings:
            return self.findings[0].kind
        return "clean" if self.judged else "not_judged"

    def owner_timeline(self, owner: int) -> Int64s:
        """Allocated bytes of one owner after each event.

        Args:
            owner: index into `OWNERS`.
        """
        lives = self.lives
        mine = lives.owner == owner
        born, died = mine & (lives.born >= 0), mine & (lives.died >= 0)
        # No event begins or ends two blocks, so plain assignment is enough.
        change = np.zeros(len(self.events), np.int64)
        change[lives.born[born]] = lives.size[born]
        change[lives.died[died]] = -lives.size[died]
        return np.cumsum(change) + int(lives.size[mine & ~born].sum())


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole snapshot file, replayed and judged.

    Attributes:
        path: the file.
        devices: one entry for each device that has segments or events.
        stacks: the distinct call stacks that `stack` columns point into.
        settings: the allocator's settings as recorded, by name.
        notes: what was odd about the file, in words.
    """

    path: str
    devices: tuple[DeviceRecording, ...]
    stacks: tuple[Stack, ...]
    settings: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings of all devices."""
        return [finding for device in self.devices for finding in device.findings]
