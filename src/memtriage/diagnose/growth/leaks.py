"""Compare a few censuses: which groups of storages grow from each to the next, and how fast. Pure.

Notebook cells and the pytest plugin judge only by this, because they have no counters over many steps. A
watch only uses `CensusPoint`, and follows the holders of its whole run in `history.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from memtriage.account.followed import same_bytes
from memtriage.model.census import Census, GroupKey, HolderGroup
from memtriage.model.paths import HolderPath, SegmentKind, has

LOG_ENTRY: Final = 512
"""Storages of up to this size without a graph are log entries, not leaks (a detached loss has 4 bytes, for
which the CUDA allocator takes 512)."""


@dataclass(frozen=True, slots=True)
class LeakPolicy:
    """Thresholds of growth from census to census.

    Attributes:
        log_entry: a storage without a graph is a log entry up to this many bytes.
        least: growth below this many bytes per position is the program's own bookkeeping.
        share: a group with less than this part of all growth on its device is not reported.
    """

    log_entry: int = LOG_ENTRY
    least: int = 1024
    share: float = 0.02


POLICY: Final = LeakPolicy()


@dataclass(frozen=True, slots=True)
class CensusPoint:
    """A census and when it was taken.

    Attributes:
        position: when, on the scale of its investigation: completed steps, micro-batches of one step, or
            seconds.
        heads: first bytes of lone storages, by (device, anchor), to distinguish a buffer that grows at its
            end from one that is replaced.
        interrupted: taken when memory ran out, not at a mark: what is new since the previous census may
            belong to the unfinished work.
        tails: their last bytes: a buffer may also grow at its beginning.
    """

    position: float
    census: Census
    heads: dict[GroupKey, bytes] = field(default_factory=dict)
    interrupted: bool = False
    tails: dict[GroupKey, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupGrowth:
    """A group that grew from one census to a later one.

    Attributes:
        group: as the later census saw it.
        path: the whole path of what grew most.
        count, nbytes: additional storages and bytes.
        distance: how far apart the two censuses are.
        interrupted: the later one was taken in the middle of a position.
        entries_grow: the anchor names more objects than before; None if the group is new.
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
        """Bytes per step (micro-batch, second); an unfinished one, when memory ran out, counts in full."""
        return self.nbytes / max(1, self.distance + self.interrupted)


def growth_between(before: CensusPoint, after: CensusPoint) -> list[GroupGrowth]:
    """Return the groups with more bytes than before, largest first, whether or not they leak."""
    earlier = {group.key: group for group in before.census.groups}
    distance = after.position - before.position
    grown = []
    for group in after.census.groups:
        old = earlier.get(group.key)
        count = group.count - (old.count if old else 0)
        nbytes = group.nbytes - (old.nbytes if old else 0)
        if nbytes <= 0 or count < 0 or (after.interrupted and old is None):
            continue
        if has(group.anchor, SegmentKind.NOT_SEARCHED):  # each partial census leaves out others
            continue
        before_by_path = {} if old is None else old.by_path
        rises = {path: size - before_by_path.get(path, 0) for path, size in group.by_path.items()}
        grew_most = max(rises, key=lambda path: rises[path])
        more = None if old is None else group.entries > old.entries
        grown.append(GroupGrowth(group, grew_most, count, nbytes, distance, after.interrupted, more))
    return sorted(grown, key=lambda growth: -growth.nbytes)


def accumulates(growth: GroupGrowth) -> bool:
    """Whether a group's growth looks like accumulation: more storages, worth more than a log entry each."""
    if growth.count < 1 or growth.rate < POLICY.least:
        return False
    return growth.group.attached or growth.nbytes > POLICY.log_entry * growth.count


def lengthens(growths: Sequence[GroupGrowth], points: Sequence[CensusPoint]) -> bool:
    """Whether one storage grows at its end from census to census (a `torch.cat` accumulator).

    Args:
        growths: the group's growth over each interval, oldest first.
        points: the censuses around these intervals.
    """
    if len(growths) < 2 or any(growth.count != 0 or growth.group.count != 1 for growth in growths):
        return False
    if any(growth.rate < POLICY.least for growth in growths):
        return False
    heads = [point.heads.get(growths[0].key) for point in points]
    return all(same_bytes(heads[0], head) for head in heads)


def persistent(points: Sequence[CensusPoint], baseline: CensusPoint | None = None) -> list[GroupGrowth]:
    """Return the groups that grew in every interval between the censuses, as one growth over the whole span.

    Groups of less than `LeakPolicy.share` of the growth on their device are left out.

    Args:
        points: the censuses, oldest first.
        baseline: an earlier one, needed for storages that grow at their end, and for a last census in the
            middle of a step: two sizes are no trend.
    """
    if len(points) < 2:
        return []
    earlier = [baseline] if baseline is not None and baseline.position < points[0].position else []
    before = {growth.key: growth for growth in growth_between(earlier[0], points[0])} if earlier else {}
    intervals = [growth_between(a, b) for a, b in pairwise(points)]
    by_key = [{growth.key: growth for growth in interval} for interval in intervals]
    grown = []
    for overall in growth_between(points[0], points[-1]):
        parts = [interval.get(overall.key) for interval in by_key]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            continue
        first = [before[overall.key]] if overall.key in before else []
        if points[-1].interrupted and earlier and not any(accumulates(part) for part in first):
            continue  # what the failing step itself holds also grows, but never did before
        since = [*earlier, *points] if first else points
        if all(accumulates(part) for part in known) or lengthens([*first, *known], since):
            grown.append(overall)
    total: dict[str, int] = {}
    for growth in grown:
        total[growth.group.device] = total.get(growth.group.device, 0) + growth.nbytes
    return [growth for growth in grown if growth.nbytes >= POLICY.share * total[growth.group.device]]
