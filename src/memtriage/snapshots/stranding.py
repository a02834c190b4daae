"""Stranded memory in a recording: which blocks pin which segments, and whether to report it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.account.holder_pins import without
from memtriage.account.segments import stranded_in
from memtriage.catalogue.entry import Holder
from memtriage.model.blocks import Segment
from memtriage.model.findings import Finding
from memtriage.model.recording import OWNERS
from memtriage.model.units import MIB, count, size
from memtriage.playbook.snapshots import ADVICE, CLEAR_KNOWN, SnapshotCause
from memtriage.snapshots.known import known_bytes, known_words
from memtriage.snapshots.leaks import GrowingSites
from memtriage.snapshots.view import DeviceView, Mask, known_site


@dataclass(frozen=True, slots=True)
class StrandingPolicy:
    """Thresholds for reporting stranded memory.

    Attributes:
        floor_bytes: stranded bytes below which nothing is reported: a few shared segments of 20 MiB always
            have some room.
        share: of the segments that long-lived blocks pin, the part that must be stranded.
        adds: growth that strands at least this many times what it holds is reported as fragmentation as well.
        dominates: from this many times on, only the fragmentation is reported.
    """

    floor_bytes: int = 64 * MIB
    share: float = 0.2
    adds: float = 1.0
    dominates: float = 2.0


POLICY: Final = StrandingPolicy()
NEEDED: Final = (
    "parameter",
    "gradient",
    "optimizer state",
    "communication buffer",
    "cuBLAS workspace",
    "before the recording",
)
"""Owners that a training run needs, or of which nothing is known."""
_PINS: Final = 2
_SEGMENTS: Final = 5
"""Pins of a segment, and segments, that the evidence lists."""
_SITES: Final = 5
LONG_LIVED: Final = 2
"""Step ends that a block must survive to be more than what each step allocates again."""


@dataclass(frozen=True, slots=True)
class LongPinnedSegment:
    """A segment with the long-lived blocks that pin it.

    Attributes:
        segment: the segment.
        stranded: its bytes that are free, or will be when the step's own blocks are freed, and cannot be
            released.
        now: those of them that are free at the snapshot.
        lives: the lives of the long-lived blocks.
    """

    segment: Segment
    stranded: int
    now: int
    lives: tuple[int, ...]


def pinned_for_long(view: DeviceView) -> list[LongPinnedSegment]:
    """Return the segments that long-lived blocks pin, the worst first.

    What a step allocates and frees again (gradients, say) pins its segment only until then, and counts as
    free.
    """
    life_at = {int(view.replayed.address[life]): life for life in np.flatnonzero(view.alive()).tolist()}
    long_lived = _long_lived(view)
    pinned = []
    for segment in view.segments:
        pins = tuple(
            life_at[block.address]
            for block in segment.blocks
            if block.state == "active" and block.address in life_at and long_lived[life_at[block.address]]
        )
        if pins:
            passing = _active(segment) - {int(view.replayed.address[life]) for life in pins}
            stranded = stranded_in(without(segment, passing))
            pinned.append(LongPinnedSegment(segment, stranded, stranded_in(segment), pins))
    return sorted(pinned, key=lambda segment: (-segment.stranded, segment.segment.address))


def _active(segment: Segment) -> set[int]:
    return {block.address for block in segment.blocks if block.state == "active"}


def _long_lived(view: DeviceView) -> Mask:
    if view.steps.count < LONG_LIVED:
        return view.alive()
    return view.alive() & ((view.survived() >= LONG_LIVED) | (view.replayed.born < view.steps.ends[0]))


def stranded_by(
    view: DeviceView, pinned: Sequence[LongPinnedSegment], lives: Mask
) -> list[LongPinnedSegment]:
    """Return the segments in which these lives have at least half of the avoidable bytes."""
    needless = ~view.owned_by(*NEEDED)
    explained = []
    for segment in pinned:
        avoidable = [life for life in segment.lives if needless[life]]
        total = sum(int(view.replayed.size[life]) for life in avoidable)
        if avoidable and 2 * sum(int(view.replayed.size[life]) for life in avoidable if lives[life]) >= total:
            explained.append(segment)
    return explained


def strands_times(view: DeviceView, growth: GrowingSites, pinned: Sequence[LongPinnedSegment]) -> float:
    """Return the bytes stranded in segments that growth helps to pin, as a multiple of what it holds.

    0 for a kept graph, which is a leak whatever it strands.
    """
    held = view.total(growth.lives)
    if growth.graph or not held:
        return 0.0
    return (
        sum(segment.stranded for segment in pinned if any(growth.lives[life] for life in segment.lives))
        / held
    )


def is_fragmented(
    view: DeviceView, pinned: Sequence[LongPinnedSegment], policy: StrandingPolicy = POLICY
) -> bool:
    """Whether these segments strand enough memory to report, and avoidable blocks cause it.

    Parameters, optimizer state and the like pin segments in every run; the steps use the room beside them.
    """
    stranded = sum(segment.stranded for segment in pinned)
    needless = ~view.owned_by(*NEEDED)
    avoidable = sum(segment.stranded for segment in pinned if any(needless[life] for life in segment.lives))
    # in the middle of a step the room is in use
    enough = sum(segment.now for segment in pinned) >= policy.floor_bytes <= avoidable
    return enough and stranded >= policy.share * sum(segment.segment.size for segment in pinned)


def fragmentation_findings(
    view: DeviceView,
    pinned: Sequence[LongPinnedSegment],
    growing: Sequence[GrowingSites],
    expandable: tuple[int, int] | None = None,
) -> list[Finding]:
    """Make a finding for the segments of each kind of pins: avoidable blocks, workspaces, other needed ones.

    A segment with an avoidable block counts for those. A group below the floor is evidence of the largest.

    Args:
        view: the device.
        pinned: the segments, the worst first.
        growing: growth that adds to the pins from step to step.
        expandable: bytes stranded in a replay as recorded, and with expandable segments.
    """
    groups: dict[SnapshotCause, list[LongPinnedSegment]] = {}
    for segment in pinned:
        if segment.now:
            groups.setdefault(_cause(view, segment), []).append(segment)
    ranked = sorted(groups.items(), key=lambda group: -_now(group[1]))
    reported = [group for group in ranked if _now(group[1]) >= POLICY.floor_bytes] or ranked[:1]
    small = [segment for group in ranked if group not in reported for segment in group[1]]
    findings = [
        _fragmentation(view, cause, segments, growing if cause == "fragmentation" else (), expandable)
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
    needed: Counter[str] = Counter()
    for life in segment.lives:
        owner = OWNERS[view.owners[life]]
        if owner not in NEEDED:
            return "fragmentation"
        needed[owner] += int(view.replayed.size[life])
    workspace = needed.most_common(1)[0][0] == "cuBLAS workspace"
    return "workspace fragmentation" if workspace else "needed fragmentation"


def _fragmentation(
    view: DeviceView,
    cause: SnapshotCause,
    stranding: Sequence[LongPinnedSegment],
    growing: Sequence[GrowingSites],
    expandable: tuple[int, int] | None,
) -> Finding:
    total = _now(stranding)
    sites = _stranded_by_site(view, stranding)
    held = sum(int(view.replayed.size[life]) for segment in stranding for life in segment.lives)
    per_step = sum(growth.per_step for growth in growing)
    evidence = [
        f"{size(view.end.reserved)} reserved, {size(view.end.allocated)} allocated at the snapshot; "
        f"{size(view.end.releasable)} could be released",
        f"{count(len(stranding), 'segment')} pinned by {size(held)}, and {size(total)} in them can't be "
        "released",
        "pinned by site: " + ", ".join(f"{site} ({size(share)})" for site, share in sites[:_SITES]),
        *(_segment_line(view, segment) for segment in stranding[:_SEGMENTS]),
    ]
    pins = np.zeros(len(view.replayed.size), np.bool_)
    pins[[life for segment in stranding for life in segment.lives]] = True
    known = known_bytes(view, pins)
    evidence += known_words(known)
    advice = ADVICE[cause]
    fix = advice.fix
    if expandable is not None and expandable[1] >= expandable[0]:
        fix = advice.otherwise
        recorded, other = map(size, expandable)
        evidence.append(
            f"expandable segments do not help: {other} stranded in a replay with, {recorded} without"
        )
    evidence += [
        f"each step keeps {size(growth.per_step)} more at {view.sites.names[growth.sites[0]]}"
        for growth in growing
    ]
    return Finding(
        kind="fragmentation",
        device=view.device,
        bytes=total,
        bytes_per_step=per_step or None,
        allocated_at=known_site(sites[0][0]),
        mechanism=advice.why,
        fix=_clearing(known) + fix,
        playbook=advice.entry,
        step=view.steps.count or None,
        evidence=evidence,
    )


def _clearing(known: Sequence[tuple[Holder, int]]) -> str:
    """Say what clears the known holders among the pins; empty where none may be cleared."""
    names = [entry.name for entry, _ in known if entry.policy != "never"]
    return CLEAR_KNOWN.format(names=names) if names else ""


def _stranded_by_site(view: DeviceView, pinned: Sequence[LongPinnedSegment]) -> list[tuple[str, int]]:
    """Return stranded bytes by the site of the pins, most first.

    A segment's bytes are divided equally among its avoidable pins, or among all where it has no such pin.
    """
    needless = ~view.owned_by(*NEEDED)
    shares: defaultdict[str, float] = defaultdict(float)
    for segment in pinned:
        avoidable = [life for life in segment.lives if needless[life]]
        blamed = avoidable or list(segment.lives)
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
