"""From censuses some steps apart to leaks: which groups of storages grow, by how much, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memtriage.model.census import Census, GroupKey, HolderGroup
from memtriage.model.paths import HolderPath, SegmentKind, has

_LOG_ENTRY = 512
"""Storages up to this size that hang on no graph are log entries (a loss kept detached is 4 bytes; the CUDA
allocator makes 512 of them), not leaks."""
_FLOOR = 1024
_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class CensusPoint:
    """A census and when it was taken.

    Attributes:
        position: when, on the scale of its investigation: completed steps, micro-batches of one step, or
            seconds.
        heads: first bytes of lone storages, by (device, anchor): tells a buffer that grows at its end from
            one that is replaced.
        interrupted: taken in the middle of something (memory ran out), not at a mark: what is new since the
            census before may belong to the work in hand.
    """

    position: float
    census: Census
    heads: dict[GroupKey, bytes] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class GroupGrowth:
    """A group that grew from one census to a later one.

    Attributes:
        group: as the later census saw it.
        path: the whole path of what grew most.
        count, nbytes: storages and bytes that came.
        distance: how far apart the two censuses are.
        interrupted: the later one was taken in the middle of a position.
        entries_grow: the anchor names more objects than before; None where there was no group before.
    """

    group: HolderGroup
    path: HolderPath
    count: int
    nbytes: int
    distance: float
    interrupted: bool = False
    entries_grow: bool | None = None

    @property
    def key(self) -> GroupKey:
        return self.group.key

    @property
    def rate(self) -> float:
        """Bytes a step (a micro-batch, a second); what was begun when memory ran out counts as one."""
        return self.nbytes / max(1, self.distance + self.interrupted)


def growth_between(before: CensusPoint, after: CensusPoint) -> list[GroupGrowth]:
    """Groups with more bytes than before, largest first. Nothing is judged yet."""
    earlier = {group.key: group for group in before.census.groups}
    distance = after.position - before.position
    grown = []
    for group in after.census.groups:
        old = earlier.get(group.key)
        count = group.count - (old.count if old else 0)
        nbytes = group.nbytes - (old.nbytes if old else 0)
        if nbytes <= 0 or count < 0 or (after.interrupted and old is None):
            continue
        if has(group.anchor, SegmentKind.NOT_SEARCHED):  # two partial censuses leave out different ones
            continue
        tails = {path: size - (old.tails.get(path, 0) if old else 0) for path, size in group.tails.items()}
        most = max(tails, key=lambda path: tails[path])
        more = None if old is None else group.entries > old.entries
        grown.append(GroupGrowth(group, most, count, nbytes, distance, after.interrupted, more))
    return sorted(grown, key=lambda growth: -growth.nbytes)


def accumulates(growth: GroupGrowth) -> bool:
    """Whether a group's growth looks like accumulation: more storages, worth more than a log entry each."""
    if growth.count < 1 or growth.rate < _FLOOR:
        return False
    return growth.group.attached or growth.nbytes > _LOG_ENTRY * growth.count


def lengthens(growths: Sequence[GroupGrowth], points: Sequence[CensusPoint]) -> bool:
    """Whether one storage grows at its end from census to census (a `torch.cat` accumulator).

    A batch that is longer this time is another tensor with other content; an accumulator begins with the
    bytes it began with before. All-zero beginnings prove nothing.

    Args:
        growths: the group's growth over each interval, oldest first.
        points: the censuses around these intervals.
    """
    if len(growths) < 2 or any(growth.count != 0 or growth.group.count != 1 for growth in growths):
        return False
    if any(growth.rate < _FLOOR for growth in growths):
        return False
    heads = [point.heads.get(growths[0].key) for point in points]
    return heads[0] is not None and any(heads[0]) and all(head == heads[0] for head in heads)


def persistent(points: Sequence[CensusPoint], baseline: CensusPoint | None = None) -> list[GroupGrowth]:
    """Groups that grew in every interval between the censuses, as one growth over the whole span.

    Groups of less than 2 % of all that grew are left to their betters.

    Args:
        points: the censuses, oldest first.
        baseline: an earlier one, for storages that grow at their end, and for a last census that was taken
            amid a step: two sizes make no trend.
    """
    if len(points) < 2:
        return []
    earlier = [baseline] if baseline is not None and baseline.position < points[0].position else []
    before = {growth.key: growth for growth in growth_between(earlier[0], points[0])} if earlier else {}
    intervals = [growth_between(a, b) for a, b in pairwise(points)]
    by_key = [{growth.key: growth for growth in interval} for interval in intervals]
    found = []
    for whole in growth_between(points[0], points[-1]):
        parts = [each.get(whole.key) for each in by_key]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            continue
        first = [before[whole.key]] if whole.key in before else []
        if points[-1].interrupted and earlier and not any(accumulates(part) for part in first):
            continue  # what the failing step itself holds grows too, but never did before
        since = [*earlier, *points] if first else points
        if all(accumulates(part) for part in known) or lengthens([*first, *known], since):
            found.append(whole)
    total: dict[str, int] = {}
    for growth in found:
        total[growth.group.device] = total.get(growth.group.device, 0) + growth.nbytes
    return [growth for growth in found if growth.nbytes >= _SHARE * total[growth.group.device]]
