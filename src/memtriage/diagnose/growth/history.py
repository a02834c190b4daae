"""Follow each holder from census to census, by object rather than by path. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import msgspec

from memtriage.diagnose.growth.leaks import LOG_ENTRY, CensusPoint, same_bytes
from memtriage.model.census import GroupKey, HolderGroup
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, has


@dataclass(frozen=True, slots=True)
class HistoryPolicy:
    """Thresholds for holders that are followed from census to census.

    Attributes:
        least: growth below this many bytes per position is the program's own bookkeeping.
        log_entry: a storage without a graph is a log entry up to this many bytes.
        survives: unless this part of a holder's witnesses is still there, its storages count as replaced.
        soon: an interval without growth proves nothing if it is shorter than this part of the usual one.
        censuses: how many are remembered; their distances grow with the run.
    """

    least: int = 256
    log_entry: int = LOG_ENTRY
    survives: float = 0.5
    soon: float = 0.25
    censuses: int = 32


POLICY: Final = HistoryPolicy()


@dataclass(frozen=True, slots=True)
class HeldSize:
    """What a holder kept alive at one census.

    Attributes:
        position: when, on the scale that the censuses are counted in.
        storages: bytes of its storages.
        kept: bytes of host memory in nodes of the autograd graph that it keeps alive.
        count: number of its storages.
        objects: number of those nodes.
        entries: number of objects that its path names.
        holders: number of objects that hold its storages.
        head, tail: first and last bytes of its storages where they are few; None where they were not read.
        replaced: it has more storages than at the census before, and most of those are gone.
        renewed: all its nodes are newer than those at the census before, as of a longer batch.
        between: the census was taken between two positions, as those before. At the end, or where memory ran
            out, a part of the next position may have been added: that is no rate.
    """

    position: float
    storages: int
    kept: int
    count: int
    objects: int
    entries: int = 0
    head: bytes | None = None
    tail: bytes | None = None
    replaced: bool = False
    renewed: bool = False
    holders: int = 0
    between: bool = True

    @property
    def nbytes(self) -> int:
        """All bytes that it keeps alive."""
        return self.storages + self.kept


@dataclass(frozen=True, slots=True)
class Holding:
    """One holder over the censuses in a row that found it.

    Attributes:
        group: the holder's group at the last census.
        path: whole path to what grew most up to that census.
        sizes: one per census, oldest first.
        unchanged: position of the last census if it found in the holder just what was there before.
    """

    group: HolderGroup
    path: HolderPath
    sizes: tuple[HeldSize, ...]
    unchanged: float | None = None

    @property
    def key(self) -> GroupKey:
        return self.group.key

    def rising(self, period: float | None = None, *, pauses: bool = False) -> list[HeldSize]:
        """Return the censuses in a row, up to the last, over which it grew; one where it did not.

        Args:
            period: positions from rise to rise, where growth is periodic: only censuses that are at least
                that far apart are compared.
            pauses: its counter grows up to the last reading: two censuses at which it kept the same are a
                pause between two rises.
        """
        points = _apart(self.sizes, period)
        grown = [points.pop()]
        while points:
            before = points.pop()
            if accumulates(before, grown[0], attached=self.group.attached):
                grown.insert(0, before)
            elif pauses and before.nbytes == grown[0].nbytes:
                continue
            elif not points or not _soon(points[-1], before, grown[0]):
                break
        return grown

    @property
    def mean_rate(self) -> float:
        """Bytes per position from the first census to the last; 0 without two."""
        first, last = self.sizes[0], self.sizes[-1]
        apart = last.position - first.position
        return (last.nbytes - first.nbytes) / apart if apart > 0 else 0.0

    @property
    def logs(self) -> bool:
        """Whether it keeps nothing but log entries."""
        last = self.sizes[-1]
        return not self.group.attached and last.storages <= POLICY.log_entry * last.count

    def rate(self, since: float, block: int = 0) -> float:
        """Return its growth in bytes per position since the last census before a position; 0 without two.

        Args:
            since: that position.
            block: bytes that the allocator takes for a storage at least.
        """
        before = max((size.position for size in self.sizes if size.position < since), default=since)
        sizes = [size for size in self.sizes if size.position >= before]
        if len(sizes) < 2:
            return 0.0
        (start, least), (end, most) = (
            (size.position, max(size.nbytes, block * size.count)) for size in (sizes[0], sizes[-1])
        )
        return (most - least) / (end - start)

    @property
    def fell(self) -> bool:
        """Whether it kept less at some census than at the one before."""
        return any(after.nbytes < before.nbytes for before, after in pairwise(self.sizes))

    @property
    def lengthens(self) -> bool:
        """Whether it grew last without another storage or node: a tensor that is replaced by a longer one."""
        before, last = self.sizes[-2:] if len(self.sizes) > 1 else (None, self.sizes[-1])
        return before is not None and (before.count, before.objects) == (last.count, last.objects)

    @property
    def swells(self) -> bool:
        """Whether it has as many storages and nodes at each census with other content, or only new nodes.

        That is a batch, or what is computed from it, that is larger than before.
        """
        return all(self._swells(before, after) for before, after in pairwise(self.sizes))

    def _swells(self, before: HeldSize, after: HeldSize) -> bool:
        if after.renewed:
            return True
        as_many = (before.count, before.objects) == (after.count, after.objects)
        other = self.group.attached or (any(before.head or b"") and not _same_content(before, after))
        return as_many and other


def accumulates(before: HeldSize, after: HeldSize, *, attached: bool, policy: HistoryPolicy = POLICY) -> bool:
    """Whether a holder grew in a way that may go on for ever.

    That is by more storages or nodes, or by as many with the same content at their beginning, but not by a
    graph without any old node.

    Args:
        before, after: at two censuses.
        attached: some of it hangs on the autograd graph.
        policy: thresholds.
    """
    more, count = after.nbytes - before.nbytes, after.count - before.count
    if after.renewed or more <= 0 or count < 0 or more < policy.least * (after.position - before.position):
        return False
    if after.objects > before.objects:
        return True
    if count > 0:
        return attached or after.storages - before.storages > policy.log_entry * count
    return _same_content(before, after)


def _same_content(before: HeldSize, after: HeldSize) -> bool:
    return same_bytes(before.head, after.head) or same_bytes(before.tail, after.tail)


class HolderHistory:
    """The holders of the last census with their sizes at earlier ones. Keeps no object alive."""

    def __init__(self) -> None:
        self._holdings: dict[GroupKey, Holding] = {}

    def add(self, point: CensusPoint, *, between: bool = True) -> None:
        """Add a census that was taken later than those before.

        Args:
            point: the census.
            between: it was taken between two positions of the program, and everything was searched. Elsewhere
                (where memory ran out, or at the end, when functions have returned) a holder that is gone, or
                has lost what it kept, proves nothing.
        """
        groups = [*point.census.groups, *_nodes_on_host(point.census.groups)]
        keys = {group.key for group in groups}
        moved = self._moved(keys)
        holdings = {}
        for group in groups:
            if has(group.anchor, SegmentKind.NOT_SEARCHED):  # partial censuses leave out different ones
                continue
            size = _size(group, point, between)
            before = self._same(group, size, moved)
            if before is not None:
                renewed = _renewed(before.group, group)
                size = replace(size, replaced=_replaced(before.group, group), renewed=renewed)
            sizes = (size,) if before is None else (*before.sizes, size)[-POLICY.censuses :]
            path = group.path if before is None else _grew_most(before.group, group)
            holdings[group.key] = Holding(group, path, sizes)
        if not between:
            moved_on = {
                id(holding.sizes[0]): key for key, holding in holdings.items() if key not in self._holdings
            }
            for key, before in self._holdings.items():
                moved_to = moved_on.get(id(before.sizes[0]))
                now = holdings.get(key) if moved_to is None else holdings.pop(moved_to)
                if now is None or now.sizes[-1].nbytes <= before.sizes[-1].nbytes:
                    stays = now is not None and _survived(before.group, now.group) and now.group.witnesses
                    holdings[key] = replace(before, unchanged=point.position if stays else None)
                elif moved_to is not None:
                    holdings[key] = replace(before, sizes=now.sizes)  # where it was while functions ran
        self._holdings = holdings

    def growing(self, period: float | None = None) -> list[Holding]:
        """Return holders that grew up to the last census, largest first; `period` as `rising` has it."""
        holdings = [holding for holding in self._holdings.values() if len(holding.rising(period)) > 1]
        return sorted(holdings, key=lambda holding: holding.sizes[0].nbytes - holding.sizes[-1].nbytes)

    def move(self, to: Callable[[float], float]) -> None:
        """Give each census another position, by a function that rises."""
        for key, holding in self._holdings.items():
            sizes = tuple(replace(size, position=to(size.position)) for size in holding.sizes)
            self._holdings[key] = replace(holding, sizes=sizes)

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings.values())

    def _same(self, group: HolderGroup, size: HeldSize, moved: dict[_Place, Holding]) -> Holding | None:
        """Return the holder at the census before that is the same as a group of this one.

        That is the same object, or one created again that has most of its storages, or the same old graph.
        """
        before = self._holdings.get(group.key)
        if before is None:
            # The same object may be reached by another path now.
            candidates = (moved.pop(place, None) for place in _places(group))
            return next((holding for holding in candidates if holding is not None), None)
        if not group.holders.keys().isdisjoint(before.group.holders):
            # Entries of a queue move on. A variable has one entry, and what it holds may be longer each time.
            if not _replaced(before.group, group) or group.entries > before.group.entries:
                return before
        elif _survived(before.group, group) or _carries_on(before.group, group):
            return before
        return before if _same_content(before.sizes[-1], size) else None

    def _moved(self, keys: set[GroupKey]) -> dict[_Place, Holding]:
        """Return the holders whose path is gone, by the places where they may be found again."""
        return {
            place: holding
            for key, holding in self._holdings.items()
            if key not in keys
            for place in _places(holding.group)
        }


_Place = tuple[str, int, PathSegment]
"""Device, token of the holding object, and segment of it: all variables of a module share its token."""


def _places(group: HolderGroup) -> list[_Place]:
    return [(group.device, token, group.anchor[-1]) for token in group.holders]


def _nodes_on_host(groups: Sequence[HolderGroup]) -> Iterator[HolderGroup]:
    """Yield what holders of GPU storages keep in host memory, as groups of the CPU without storages."""
    for group in groups:
        if group.device != "cpu" and group.kept:
            yield msgspec.structs.replace(
                group, device="cpu", count=0, nbytes=0, by_path={group.anchor: 0}, owners={}, known={}
            )


def _size(group: HolderGroup, point: CensusPoint, between: bool) -> HeldSize:
    kept = group.kept if group.device == "cpu" else 0
    head, tail = point.heads.get(group.key), point.tails.get(group.key)
    return HeldSize(
        point.position, group.nbytes, kept, group.count, group.objects, group.entries, head, tail,
        holders=len(group.holders), between=between,
    )  # fmt: skip


def _survived(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether most of a holder's storages are still there, as far as its witnesses show.

    Nodes without storages have no witnesses. They are known by their place.
    """
    if not before.witnesses:
        return not after.witnesses
    return len(before.witnesses & after.witnesses) >= POLICY.survives * len(before.witnesses)


def _carries_on(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether a graph still has its oldest node: a running total in a dict is a new tensor at each step."""
    return before.made is not None and after.made is not None and before.made[0] == after.made[0]


def _replaced(before: HolderGroup, after: HolderGroup) -> bool:
    return after.count > before.count > 0 and not _survived(before, after)


def _renewed(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether no old node is left, nor storage, and no more objects have nodes."""
    if before.made is None or after.made is None or after.entries > before.entries:
        return False
    return after.made[0] > before.made[1] and before.witnesses.isdisjoint(after.witnesses)


def _grew_most(before: HolderGroup, after: HolderGroup) -> HolderPath:
    """Return the path whose bytes grew most; of equal ones the one with the most bytes."""
    rises = {path: (nbytes - before.by_path.get(path, 0), nbytes) for path, nbytes in after.by_path.items()}
    return max(rises, key=lambda path: rises[path], default=after.path)


def _soon(earlier: HeldSize, before: HeldSize, after: HeldSize) -> bool:
    """Whether a census without growth came so soon after the one before that it proves no stop."""
    apart, usual = after.position - before.position, before.position - earlier.position
    return after.nbytes >= before.nbytes and apart < POLICY.soon * usual


def _apart(sizes: Sequence[HeldSize], period: float | None) -> list[HeldSize]:
    """Return the censuses that are at least a period apart, counted back from the last."""
    spaced: list[HeldSize] = []
    for size in reversed(sizes):
        if not spaced or spaced[-1].position - size.position >= (period or 0):
            spaced.append(size)
    return spaced[::-1]
