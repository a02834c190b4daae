"""The result of `memtriage snapshot --json`, schema 1. Sizes in bytes."""

from __future__ import annotations

import msgspec

from memtriage.model.findings import Finding
from memtriage.model.recording import LabelRow, OwnedBytes, SiteRow


class SnapshotPeak(msgspec.Struct):
    """The instant at which most was allocated.

    Attributes:
        allocated, reserved, stranded: bytes at that instant.
        time_us: when it was, as the recording counts time.
        owners: what was alive then, biggest first; they sum to `allocated`.
    """

    allocated: int
    reserved: int
    stranded: int
    time_us: int | None
    owners: list[OwnedBytes]


class StrandedShare(msgspec.Struct):
    """What one stream strands in one pool.

    Attributes:
        stream: the stream's handle; 0 is the default stream.
        pool: the pool's id; (0, 0) is the default pool.
        stranded: free bytes that cannot be released.
    """

    stream: int
    pool: tuple[int, int]
    stranded: int


class SnapshotPin(msgspec.Struct):
    """A live block that pins a segment.

    Attributes:
        address, size: where it is, and how large.
        site: the line that allocated it; None without Python frames.
        owner: what it is.
    """

    address: int
    size: int
    site: str | None
    owner: str


class SnapshotSegment(msgspec.Struct):
    """A segment whose free memory cannot be released.

    Attributes:
        address, size: where it is, and how large.
        stream, pool: where its blocks can be used.
        stranded: its free bytes.
        pins: the blocks that pin it, biggest first.
    """

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    stranded: int
    pins: list[SnapshotPin]


class SnapshotSteps(msgspec.Struct):
    """The training steps of a recording.

    Attributes:
        count: how many.
        source: `annotations`, `optimizer frames`, `period`, or `none`.
    """

    count: int
    source: str


class SnapshotDevice(msgspec.Struct, kw_only=True):
    """One device of a snapshot. Figures outside `peak` are of the moment of the snapshot.

    `reserved` is the sum of `requested`, `rounding`, `awaiting_free`, `releasable`, `stranded` and
    `private_pools_free`.

    Attributes:
        device: `cuda:N` or `xpu:N`.
        allocated: bytes of blocks in use.
        reserved: bytes of all segments.
        requested: bytes that the program asked for.
        rounding: what the allocator added to them.
        releasable: wholly free segments, which `empty_cache()` returns.
        stranded: free, but pinned by a live block in the same segment.
        awaiting_free: freed blocks that wait for a stream.
        private_pools: segments of private pools.
        private_pools_free: wholly free segments of private pools.
        peak: the instant at which most was allocated.
        owners: what is alive, biggest first; they sum to `allocated`.
        sites: allocation sites, those that hold most first.
        stranded_by: stranded bytes by stream and pool.
        pinned: segments that strand memory, the worst first.
        segments: how many there are.
        events: how many were recorded.
        steps: the training steps.
        exact_from_us: from when on the figures are exact; None throughout.
        notes: what limits the result.
        verdict: the kind of the first finding, `clean`, or `not_judged` where growth could not be judged.
        findings: the causes found; none for a healthy recording.
        labels: bytes of what the program labelled, most first.
    """

    device: str
    allocated: int
    reserved: int
    requested: int
    rounding: int
    releasable: int
    stranded: int
    awaiting_free: int
    private_pools: int
    private_pools_free: int
    peak: SnapshotPeak
    owners: list[OwnedBytes]
    sites: list[SiteRow]
    stranded_by: list[StrandedShare]
    pinned: list[SnapshotSegment]
    segments: int
    events: int
    steps: SnapshotSteps
    exact_from_us: int | None
    notes: list[str]
    verdict: str
    findings: list[Finding]
    labels: list[LabelRow] = msgspec.field(default_factory=list)


class SnapshotResult(msgspec.Struct, kw_only=True):
    """What `memtriage snapshot --json` prints.

    Attributes:
        schema: version of this form.
        path: the file.
        devices: the devices that were recorded or have memory.
        notes: what limits the result, for all devices.
    """

    schema: int = 1
    path: str
    devices: list[SnapshotDevice]
    notes: list[str]
