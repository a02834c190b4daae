"""Follow each holder from census to census, by object rather than by path. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from memtriage.account.followed import (
    Place,
    carries_on,
    grew_most,
    nodes_on_host,
    places,
    renewed,
    replaced,
    same_bytes,
    survived,
)
from memtriage.diagnose.growth.leaks import LOG_ENTRY, CensusPoint
from memtriage.model.census import GroupKey, HolderGroup
from memtriage.model.paths import HolderPath, SegmentKind, has


@dataclass(frozen=True, slots=True)
class HistoryPolicy:
    """Thresholds for holders that are followed from census to census.

    Attributes:
        least: growth below this many bytes per position is the program's own bookkeeping.
        log_entry: a storage without a graph is a log entry up to this many bytes.
        soon: an interval without growth proves nothing if it is shorter than this part of the usual one.
        censuses: how many are remembered; their distances grow with the run.
    """

    least: int = 256
    log_entry: int = LOG_ENTRY
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
        head, tail: first and last bytes of its storages if they are few; None if not read.
        replaced: it has more storages than at the previous census, and most of the earlier ones are gone.
        renewed: all its nodes are newer than those at the previous census, as for a longer batch.
        between: the census was taken between two positions, as usual. At the end, or if memory ran out, a
            part of the next position may have been added, which gives no rate.
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
    """One holder over the consecutive censuses that found it.

    Attributes:
        group: the holder's group at the last census.
        path: whole path to what grew most up to that census.
        sizes: one per census, oldest first.
        unchanged: position of the last census, if the holder's contents were the same as before.
    """

    group: HolderGroup
    path: HolderPath
    sizes: tuple[HeldSize, ...]
    unchanged: float | None = None

    @property
    def key(self) -> GroupKey:
        return self.group.key

    def rising(self, period: float | None = None, *, pauses: bool = False) -> list[HeldSize]:
        """Return the consecutive censuses, up to the last, over which it grew; one if it did not.

        Args:
            period: positions from rise to rise, if growth is periodic: only censuses that are at least that
                far apart are compared.
            pauses: its counter grows up to the last reading, so two censuses of equal size are a pause
                between two rises.
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
            block: least bytes that the allocator takes for a storage.
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
        """Whether it ever kept less at a census than at the one before."""
        return any(after.nbytes < before.nbytes for before, after in pairwise(self.sizes))

    @property
    def lengthens(self) -> bool:
        """Whether its last growth added no storage and no node: a longer tensor replaced its predecessor."""
        before, last = self.sizes[-2:] if len(self.sizes) > 1 else (None, self.sizes[-1])
        return before is not None and (before.count, before.objects) == (last.count, last.objects)

    @property
    def swells(self) -> bool:
        """Whether from each census to the next all nodes are new, or as many storages and nodes have other
        content (through a graph: any).

        Then a batch, or what is computed from it, is larger than before.
        """
        return all(self._swells(before, after) for before, after in pairwise(self.sizes))

    def _swells(self, before: HeldSize, after: HeldSize) -> bool:
        if after.renewed:
            return True
        as_many = (before.count, before.objects) == (after.count, after.objects)
        other = self.group.attached or (any(before.head or b"") and not _same_content(before, after))
        return as_many and other


def accumulates(before: HeldSize, after: HeldSize, *, attached: bool, policy: HistoryPolicy = POLICY) -> bool:
    """Whether a holder grew in a way that may never end.

    It has more storages or nodes, or as many that begin with the same content. A graph without any old node
    does not count.

    Args:
        before, after: its sizes at consecutive censuses.
        attached: some of it is kept alive through the autograd graph.
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
            between: it was taken between two positions of the program, and everything was searched. At other
                times (if memory ran out, or at the end, when functions have returned) it proves nothing if a
                holder is gone or has lost what it kept.
        """
        groups = [*point.census.groups, *nodes_on_host(point.census.groups)]
        keys = {group.key for group in groups}
        moved = self._moved(keys)
        holdings = {}
        moved_on: dict[GroupKey, GroupKey] = {}
        for group in groups:
            if has(group.anchor, SegmentKind.NOT_SEARCHED):  # each partial census leaves out others
                continue
            size = _size(group, point, between)
            before = self._same(group, size, moved, moved_on)
            if before is not None:
                if before.key != group.key:
                    moved_on[before.key] = group.key
                size = replace(
                    size,
                    replaced=replaced(before.group, group),
                    renewed=renewed(before.group, group),
                )
            sizes = (size,) if before is None else (*before.sizes, size)[-POLICY.censuses :]
            path = group.path if before is None else grew_most(before.group, group)
            holdings[group.key] = Holding(group, path, sizes)
        if not between:
            for key, before in self._holdings.items():
                moved_to = moved_on.get(key)
                now = holdings.get(key) if moved_to is None else holdings.pop(moved_to)
                if now is None or now.sizes[-1].nbytes <= before.sizes[-1].nbytes:
                    stays = now is not None and survived(before.group, now.group) and now.group.witnesses
                    holdings[key] = replace(before, unchanged=point.position if stays else None)
                elif moved_to is not None:
                    holdings[key] = replace(before, sizes=now.sizes)  # where it was while functions ran
        self._holdings = holdings

    def growing(self, period: float | None = None) -> list[Holding]:
        """Return holders that grew up to the last census, largest first; `period` as for `rising`."""
        holdings = [holding for holding in self._holdings.values() if len(holding.rising(period)) > 1]
        return sorted(holdings, key=lambda holding: holding.sizes[0].nbytes - holding.sizes[-1].nbytes)

    def move(self, to: Callable[[float], float]) -> None:
        """Replace the position of each census, by an increasing function."""
        for key, holding in self._holdings.items():
            sizes = tuple(replace(size, position=to(size.position)) for size in holding.sizes)
            self._holdings[key] = replace(holding, sizes=sizes)

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings.values())

    def _same(
        self,
        group: HolderGroup,
        size: HeldSize,
        moved: Mapping[Place, Holding],
        moved_on: Container[GroupKey],
    ) -> Holding | None:
        """Return the previous census's holder that is the same as a group of this census.

        It is the same object, or a new one with most of its storages, or one with the same old graph.
        """
        before = self._holdings.get(group.key)
        if before is None:
            # The same object may have another path now. Of several objects each may have its own: the largest
            # group continues the holder, and no other does.
            candidates = (moved[place] for place in places(group) if place in moved)
            return next((holding for holding in candidates if holding.key not in moved_on), None)
        if not group.holders.keys().isdisjoint(before.group.holders):
            # Entries of a queue move. A variable has one entry, whose value may be longer each time.
            if not replaced(before.group, group) or group.entries > before.group.entries:
                return before
        elif survived(before.group, group) or carries_on(before.group, group):
            return before
        return before if _same_content(before.sizes[-1], size) else None

    def _moved(self, keys: set[GroupKey]) -> dict[Place, Holding]:
        """Return the holders whose path is gone, by the places where they may be now."""
        return {
            place: holding
            for key, holding in self._holdings.items()
            if key not in keys
            for place in places(holding.group)
        }


def _size(group: HolderGroup, point: CensusPoint, between: bool) -> HeldSize:
    kept = group.kept if group.device == "cpu" else 0
    head, tail = point.heads.get(group.key), point.tails.get(group.key)
    return HeldSize(
        point.position, group.nbytes, kept, group.count, group.objects, group.entries, head, tail,
        holders=len(group.holders), between=between,
    )  # fmt: skip


def _soon(earlier: HeldSize, before: HeldSize, after: HeldSize) -> bool:
    """Whether a census without growth came too soon after the previous one to prove a stop."""
    apart, usual = after.position - before.position, before.position - earlier.position
    return after.nbytes >= before.nbytes and apart < POLICY.soon * usual


def _apart(sizes: Sequence[HeldSize], period: float | None) -> list[HeldSize]:
    """Return the censuses that are at least a period apart, counted back from the last."""
    spaced: list[HeldSize] = []
    for size in reversed(sizes):
        if not spaced or spaced[-1].position - size.position >= (period or 0):
            spaced.append(size)
    return spaced[::-1]
