"""Reserved memory that a recording cannot use: stranded, kept for a stream or a pool, or a surplus. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memtriage.account.holder_pins import without
from memtriage.account.segments import free_in, stranded_in
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.trace_columns import last_events
from memtriage.allocator.what_if import alternatives, what_if
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.findings import Finding
from memtriage.model.recording import ALLOC, OWNERS
from memtriage.model.units import MIB, count, size
from memtriage.playbook.snapshots import ADVICE, CLEAR_KNOWN, SnapshotCause
from memtriage.snapshots.leaks import NO_LEAK, GrowingSites
from memtriage.snapshots.owners import LONG_LIVED
from memtriage.snapshots.view import DeviceView, Mask, known_bytes, known_site, known_words

FLOOR: Final = 64 * MIB
"""Bytes that are stranded, free for one stream only, or reserved by all private pools but the largest, below
which nothing is reported: a few shared segments of 20 MiB always have some room."""
_SHARE: Final = 0.2
"""Of the segments that long-lived blocks pin, the part that must be stranded."""
ADDS, DOMINATES = 1.0, 2.0
"""Growth that strands this many times what it holds is reported as fragmentation as well, and alone."""
NEEDED: Final = (*NO_LEAK, "gradient", "communication buffer")
"""Owners that a training run needs, or of which nothing is known."""
_PINS: Final = 2
_SEGMENTS: Final = 5
"""Pins of a segment, and segments, that the evidence lists."""
_SITES: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class LongPinnedSegment:
    """A segment with the long-lived blocks that pin it.

    Attributes:
        segment: the segment.
        stranded: its bytes that are free, or will be when the step's own blocks are freed, and cannot be
            released.
        now: those of them that are free at the snapshot.
        lives: the lives of the long-lived blocks.
        avoidable: those of them that a run does not need.
    """

    segment: Segment
    stranded: int
    now: int
    lives: tuple[int, ...]
    avoidable: tuple[int, ...]


def pinned_for_long(view: DeviceView) -> list[LongPinnedSegment]:
    """Return the segments that long-lived blocks pin, the worst first.

    What a step allocates and frees again (gradients, say) pins its segment only until then, and counts as
    free.
    """
    life_at = {int(view.replayed.address[life]): life for life in np.flatnonzero(view.alive()).tolist()}
    long_lived = view.alive()
    if view.steps.count >= LONG_LIVED:
        long_lived &= (view.survived() >= LONG_LIVED) | (view.replayed.born < view.steps.ends[0])
    pinned, needless = [], ~view.owned_by(*NEEDED)
    for segment in view.segments:
        pins = tuple(
            life_at[block.address]
            for block in segment.blocks
            if block.state == "active" and block.address in life_at and long_lived[life_at[block.address]]
        )
        if pins:
            active = {block.address for block in segment.blocks if block.state == "active"}
            passing = active - {int(view.replayed.address[life]) for life in pins}
            stranded = stranded_in(without(segment, passing))
            avoidable = tuple(life for life in pins if needless[life])
            pinned.append(LongPinnedSegment(segment, stranded, stranded_in(segment), pins, avoidable))
    return sorted(pinned, key=lambda segment: (-segment.stranded, segment.segment.address))


def stranded_by(
    view: DeviceView, pinned: Sequence[LongPinnedSegment], lives: Mask
) -> list[LongPinnedSegment]:
    """Return the segments in which these lives have at least half of the avoidable bytes."""
    sizes = view.replayed.size
    return [
        each
        for each in pinned
        if 2 * sum(sizes[life] for life in each.avoidable if lives[life])
        >= sum(sizes[life] for life in each.avoidable)
        > 0
    ]


def strands_times(view: DeviceView, growth: GrowingSites, pinned: Sequence[LongPinnedSegment]) -> float:
    """Return the bytes stranded in segments that growth helps to pin, as a multiple of what it holds.

    0 for a kept graph, which is a leak whatever it strands.
    """
    held = view.total(growth.lives)
    stranded = sum(each.stranded for each in pinned if any(growth.lives[life] for life in each.lives))
    return 0.0 if growth.graph or not held else stranded / held


def is_fragmented(pinned: Sequence[LongPinnedSegment]) -> bool:
    """Whether these segments strand enough memory to report, and avoidable blocks cause it.

    Parameters, optimizer state and the like pin segments in every run; the steps use the room beside them.
    """
    stranded = sum(segment.stranded for segment in pinned)
    avoidable = sum(segment.stranded for segment in pinned if segment.avoidable)
    # in the middle of a step the room is in use
    enough = sum(segment.now for segment in pinned) >= FLOOR <= avoidable
    return enough and stranded >= _SHARE * sum(segment.segment.size for segment in pinned)


def fragmentation_findings(
    view: DeviceView,
    pinned: Sequence[LongPinnedSegment],
    growing: Sequence[GrowingSites],
    trial: Trial,
) -> list[Finding]:
    """Make a finding for the segments of each kind of pins: avoidable blocks, workspaces, other needed ones.

    A segment with an avoidable block counts for those. A group below the floor is evidence of the largest.
    `growing` adds to the pins; `trial` is empty without events.
    """
    groups: dict[SnapshotCause, list[LongPinnedSegment]] = {}
    for segment in pinned:
        if segment.now:
            groups.setdefault(_cause(view, segment), []).append(segment)
    ranked = sorted(groups.items(), key=lambda group: -_now(group[1]))
    reported = [group for group in ranked if _now(group[1]) >= FLOOR] or ranked[:1]
    small = [segment for group in ranked if group not in reported for segment in group[1]]
    findings = [
        _fragmentation(view, cause, segments, growing if cause == "fragmentation" else (), trial)
        for cause, segments in reported
    ]
    if small:
        sites = ", ".join(
            f"{site} ({size(share)})" for site, share in _stranded_by_site(view, small)[:_SITES]
        )
        findings[0].evidence.append(f"{size(_now(small))} more is stranded next to blocks from {sites}")
    return findings


def _now(segments: Sequence[LongPinnedSegment]) -> int:
    return sum(segment.now for segment in segments)


def _cause(view: DeviceView, segment: LongPinnedSegment) -> SnapshotCause:
    """Return what pins a segment: an avoidable block, else what has most of its needed bytes."""
    if segment.avoidable:
        return "fragmentation"
    needed: Counter[str] = Counter()
    for life in segment.lives:
        needed[OWNERS[view.owners[life]]] += int(view.replayed.size[life])
    workspace = needed.most_common(1)[0][0] == "cuBLAS workspace"
    return "workspace fragmentation" if workspace else "needed fragmentation"


def _fragmentation(
    view: DeviceView,
    cause: SnapshotCause,
    stranding: Sequence[LongPinnedSegment],
    growing: Sequence[GrowingSites],
    trial: Trial,
) -> Finding:
    total = _now(stranding)
    sites = _stranded_by_site(view, stranding)
    per_step = sum(growth.per_step for growth in growing)
    pins = [life for segment in stranding for life in segment.lives]
    held = int(view.replayed.size[pins].sum())
    evidence = [
        f"{size(view.end.reserved)} reserved, {size(view.end.allocated)} allocated at the snapshot; "
        f"{size(view.end.releasable)} could be released",
        f"{count(len(stranding), 'segment')} pinned by {size(held)}, and {size(total)} in them can't be "
        "released",
        "pinned by site: " + ", ".join(f"{site} ({size(share)})" for site, share in sites[:_SITES]),
        *(_segment_line(view, segment) for segment in stranding[:_SEGMENTS]),
    ]
    known = known_bytes(view, np.isin(np.arange(len(view.replayed.size)), pins))
    names = [entry.name for entry, _ in known if entry.policy != "never"]
    evidence += known_words(known)
    advice = ADVICE[cause]
    fix = advice.fix
    other = trial.get("expandable_segments:True")
    if other is not None and other.stranded >= (recorded := trial[RECORDED].stranded):
        fix = advice.otherwise
        evidence.append(
            f"expandable segments do not help: {size(other.stranded)} stranded in a replay with, "
            f"{size(recorded)} without"
        )
    evidence += [
        f"each step keeps {size(growth.per_step)} more at {view.sites.names[growth.site]}"
        for growth in growing
    ]
    return view.finding(
        "fragmentation",
        cause,
        evidence,
        bytes=total,
        bytes_per_step=per_step or None,
        allocated_at=known_site(sites[0][0]),
        fix=(CLEAR_KNOWN.format(names=names) if names else "") + fix,
        step=view.steps.count or None,
    )


def _stranded_by_site(view: DeviceView, pinned: Sequence[LongPinnedSegment]) -> list[tuple[str, int]]:
    """Return stranded bytes by the site of the pins, most first.

    A segment's bytes are divided equally among its avoidable pins, or among all where it has no such pin.
    """
    shares: defaultdict[str, float] = defaultdict(float)
    for segment in pinned:
        blamed = segment.avoidable or segment.lives
        for site, pins in Counter(view.sites.names[view.sites.of_life[life]] for life in blamed).items():
            shares[site] += segment.now * pins / len(blamed)
    ranked = sorted(shares.items(), key=lambda row: (-row[1], row[0]))
    return [(site, round(share)) for site, share in ranked]


def _segment_line(view: DeviceView, pinned: LongPinnedSegment) -> str:
    """Describe a segment with the blocks that pin it at the snapshot, biggest first."""
    alive = np.flatnonzero(view.alive() & (view.replayed.address >= pinned.segment.address))
    inside = [life for life in alive.tolist() if view.replayed.address[life] < pinned.segment.end]
    inside.sort(key=lambda life: -int(view.replayed.size[life]))
    pins = ", ".join(_pin(view, life) for life in inside[:_PINS])
    more = f" and {len(inside) - _PINS} more" if len(inside) > _PINS else ""
    where = f"segment {pinned.segment.address:#x} of {size(pinned.segment.size)}"
    return f"{where}: {size(pinned.now)} stranded by {pins}{more}"


def _pin(view: DeviceView, life: int) -> str:
    site = known_site(view.sites.names[view.sites.of_life[life]])
    made = f"from {site}" if site else "made without Python frames"
    where = f"{int(view.replayed.address[life]):#x}"
    return f"{size(int(view.replayed.size[life]))} at {where} {made} ({OWNERS[view.owners[life]]})"


# Free memory that only one stream, or one private pool, can use again

_STREAM_SHARE: Final = 0.1
"""Part of the reserved bytes that a stream must keep free."""
_IDLE: Final = 0.25
"""Part of the trace, at its end, in which an unused stream has allocated nothing."""
_POOLS: Final = 5
"""Pools that the evidence lists."""


def pool_findings(view: DeviceView) -> list[Finding]:
    """Find private pools that are kept apart: none of them can use what another has free."""
    reserved, free = _sums(
        (segment.pool, segment) for segment in view.segments if segment.pool != DEFAULT_POOL
    )
    total, largest = reserved.total(), max(reserved.values(), default=0)
    if total - largest < FLOOR:
        return []
    # a capture without `pool=` makes an id of the form (n, 0); handles and MemPools are (0, n)
    own = sum(pool[1] == 0 for pool in reserved)
    listed = [
        f"pool {pool} {size(amount)} ({size(free[pool])} free)" for pool, amount in reserved.most_common()
    ]
    more = len(listed) - _POOLS
    inside = np.fromiter((pool in reserved for pool in view.replayed.pool), np.bool_)
    return [
        view.finding(
            "private_pool",
            "several private pools",
            [
                f"{size(total)} reserved in {count(len(reserved), 'private pool')}, of which "
                f"{size(free.total())} is free at the snapshot",
                f"by pool: {', '.join(listed[:_POOLS])}" + (f", and {more} more" if more > 0 else ""),
                f"one shared pool saves at most {size(total - largest)}: all but the largest",
                *([f"{count(own, 'pool')} made by a capture without `pool=`"] if own else []),
                "a snapshot does not say which of the graphs are still alive",
            ],
            bytes=total,
            allocated_at=next((site for site, *_ in view.by_site(inside) if known_site(site)), None),
        )
    ]


def stream_findings(view: DeviceView) -> list[Finding]:
    """Find side streams that keep free memory: the allocator gives it to no other stream."""
    reserved, free = _sums(
        (segment.stream, segment) for segment in view.segments if segment.pool == DEFAULT_POOL
    )
    if len(reserved) < 2:
        return []
    allocs = np.flatnonzero(view.trace.kind == ALLOC)
    recent = allocs[allocs >= len(view.trace) * (1 - _IDLE)]
    used: Counter[int] = Counter()  # without events, what is in use
    for segment in view.segments if not len(allocs) else ():
        used[segment.stream] += segment.size - free_in(segment)
    events = recent if len(recent) else allocs
    for stream, amount in zip(
        view.trace.stream[events].tolist(), view.trace.size[events].tolist(), strict=True
    ):
        used[stream] += amount
    ((main, _),) = used.most_common(1)
    active = set(view.trace.stream[recent].tolist())
    return [
        _stream(view, stream, reserved[stream], total, idle=len(recent) > 0 and stream not in active)
        for stream, total in free.most_common()
        if stream != main and total >= max(FLOOR, _STREAM_SHARE * view.end.reserved)
    ]


def _stream(view: DeviceView, stream: int, reserved: int, total: int, *, idle: bool) -> Finding:
    of_stream = view.replayed.stream == stream
    evidence = [f"{size(total)} of the {size(reserved)} reserved for stream {stream:#x} is free"]
    if idle:
        evidence.append("the stream allocated nothing in the last quarter of the recording")
    if rows := view.by_site(of_stream):
        allocations = count(int((view.replayed.born[of_stream] >= 0).sum()), "allocation")
        evidence.append(f"{allocations} recorded on this stream, most bytes at {rows[0][0]}")
    return view.finding(
        "stream_pool",
        "unused stream" if idle else "side stream",
        evidence,
        bytes=total,
        allocated_at=known_site(rows[0][0]) if rows else None,
    )


def _sums(segments: Iterable[tuple[Any, Segment]]) -> tuple[Counter[Any], Counter[Any]]:
    """Return reserved and free bytes of segments by their keys."""
    reserved: Counter[Any] = Counter()
    free: Counter[Any] = Counter()
    for key, segment in segments:
        reserved[key] += segment.size
        free[key] += free_in(segment)
    return reserved, free


# Reserved far above the peak of allocated, and what other settings would have reserved

_LEAST_SURPLUS, _SURPLUS_SHARE = 1024 * MIB, 0.25
"""Bytes between the peaks of reserved and of allocated, and part of the latter, that are reported: a cache
needs some room in any run."""
_HELPS: Final = 0.5
"""Part of the surplus that a setting must save to be advised."""
_EVENTS: Final = 60_000
"""Events, the last ones, that are replayed under other settings. Each costs microseconds."""
RECORDED: Final = "the recorded settings"
Trial = dict[str, Simulator]
"""The allocator after the last events of a recording from an empty cache: as recorded and under alternatives,
by their text."""


def surplus(view: DeviceView) -> int:
    """Return the bytes by which reserved memory exceeds the peak of allocated; 0 where that is ordinary.

    Reserved at the snapshot: what has been given back before it is no surplus.
    """
    if not len(view.trace) or view.ooms:
        return 0
    allocated, _ = _peaks(view)
    above = view.end.reserved - allocated
    return above if above >= max(_LEAST_SURPLUS, _SURPLUS_SHARE * allocated) else 0


def tried(view: DeviceView, settings: AllocatorSettings) -> Trial:
    """Replay the last events of a device under the settings it was recorded with and under alternatives."""
    trace = last_events(view.trace, _EVENTS)
    return {
        name: what_if(trace, view.segments, settings, other).simulator
        for name, other in {RECORDED: settings, **alternatives(settings)}.items()
    }


def surplus_finding(view: DeviceView, trial: Trial) -> Finding:
    """Make the finding of a surplus, by what its last events are under other settings."""
    allocated, reserved = _peaks(view)
    same, (best, least) = trial[RECORDED], min(trial.items(), key=lambda other: other[1].peak_reserved)
    # The replay must reproduce the waste, and the setting that reserves least save enough of it.
    wasted, saved = same.peak_reserved - same.peak_allocated, same.peak_reserved - least.peak_reserved
    helps = wasted >= max(1, _SURPLUS_SHARE * same.peak_allocated) and saved >= _HELPS * wasted
    cause: SnapshotCause = "surplus in segments" if helps else "surplus of the past"
    return view.finding(
        "fragmentation",
        cause,
        [
            *surplus_lines(view, trial),
            f"at the snapshot {size(view.end.releasable)} is in wholly free segments, and "
            f"{size(view.end.stranded)} is stranded",
        ],
        bytes=reserved - allocated,
        fix=ADVICE[cause].fix.format(setting=best),
        step=view.steps.count or None,
    )


def surplus_lines(view: DeviceView, trial: Trial) -> list[str]:
    """Return the peaks, and what each setting reserved at most, as evidence."""
    allocated, reserved = _peaks(view)
    first = max(0, len(view.trace) - _EVENTS)
    ends = sum(end > first for end in view.steps.ends)
    steps = f" ({count(ends, 'step')})" if ends else ""
    part = f"its last {_EVENTS:,} events{steps}" if first else "the recording"
    most = ", ".join(f"{name} {size(under.peak_reserved)}" for name, under in trial.items())
    return [
        f"at most {size(allocated)} allocated, but {size(reserved)} reserved",
        f"{part} replayed from an empty cache, most reserved: {most}",
        f"compaction could not go below {size(trial[RECORDED].peak_allocated)}, the most allocated in that "
        "replay",
    ]


def _peaks(view: DeviceView) -> tuple[int, int]:
    timeline, start = view.replayed.timeline, view.replayed.start
    return max(int(timeline.allocated.max()), start[0]), max(int(timeline.reserved.max()), start[1])
