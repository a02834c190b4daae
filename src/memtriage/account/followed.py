"""Recognize each holder from census to census, by object rather than by path. Pure; keeps no object alive."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import msgspec

from memtriage.model.census import Census, GroupKey, HolderGroup
from memtriage.model.evidence import HolderSeen
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, has, of_any_item

_SURVIVES: Final = 0.5
"""Storages count as replaced unless this part of their witnesses, or of their contents, is still there."""

Place = tuple[str, int, PathSegment]
"""Device, token of the holding object, and segment of it: all variables of a module share its token."""


@dataclass(frozen=True, slots=True)
class Contents:
    """First and last bytes of some storages of each group (`CensusView.heads`)."""

    heads: dict[GroupKey, frozenset[bytes]]
    tails: dict[GroupKey, frozenset[bytes]]


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A holder as the last census saw it."""

    seen: HolderSeen
    group: HolderGroup
    heads: frozenset[bytes]
    tails: frozenset[bytes]


class FollowedHolders:
    """Numbers the holders of successive censuses: the same holder, the same number."""

    def __init__(self) -> None:
        self._known: dict[GroupKey, _Earlier] = {}
        self._numbers = 0

    def add(
        self, census: Census, contents: Contents, *, between: bool = True, partial: bool = False
    ) -> list[HolderSeen]:
        """Return the holders of a census that is later than those before.

        Args:
            census: all of its groups with known holders count.
            contents: of its groups.
            between: as `CensusSeen.between`. If not, functions may have returned: a holder that has moved
                keeps its earlier path, and one that is gone is remembered.
            partial: as `CensusSeen.partial`: one that is not found is remembered, too.
        """
        groups = [
            group
            for group in [*census.groups, *nodes_on_host(census.groups)]
            if not has(group.anchor, SegmentKind.NOT_SEARCHED)  # each partial census leaves out others
        ]
        keys = {group.key for group in groups}
        moved = {
            place: known
            for key, known in self._known.items()
            if key not in keys
            for place in places(known.group)
        }
        now: dict[GroupKey, _Earlier] = {}
        continued: set[int] = set()
        for group in groups:
            heads = contents.heads.get(group.key, frozenset())
            tails = contents.tails.get(group.key, frozenset())
            before = self._same(group, heads, tails, moved, continued)
            if before is not None:
                continued.add(before.seen.id)
            seen = self._seen(group, before, _continues(before, heads, tails), named=between)
            now[group.key] = _Earlier(seen, group, heads, tails)
        self._known = now if between and not partial else {**self._known, **now}
        return [known.seen for known in now.values()]

    def _seen(
        self, group: HolderGroup, before: _Earlier | None, continued: bool, *, named: bool
    ) -> HolderSeen:
        if before is None:
            self._numbers += 1
        anchor, path = group.anchor, group.path
        if before is not None:
            # Of one entry the path has its key, of several it has none.
            named = named or of_any_item(before.seen.anchor) == of_any_item(anchor)
            anchor = anchor if named else before.seen.anchor
            path = grew_most(before.group, group) if named else before.seen.path
        return HolderSeen(
            id=self._numbers if before is None else before.seen.id,
            device=group.device,
            anchor=anchor,
            path=path,
            nbytes=group.nbytes,
            kept=group.kept if group.device == "cpu" else 0,
            storages=group.count,
            nodes=group.objects,
            entries=group.entries,
            holders=len(group.holders),
            containers=group.containers,
            attached=group.attached,
            owner=max(group.owners, key=lambda name: group.owners[name], default="autograd context"),
            known=_known_holder(group),
            replaced=before is not None and not continued and replaced(before.group, group),
            renewed=before is not None and renewed(before.group, group),
            continued=continued,
            detail=None if before is None else before.seen.detail,
        )

    def _same(
        self,
        group: HolderGroup,
        heads: frozenset[bytes],
        tails: frozenset[bytes],
        moved: Mapping[Place, _Earlier],
        continued: Container[int],
    ) -> _Earlier | None:
        """Return the previous census's holder that is the same as a group of this census.

        It is the same object, or a new one with most of its storages, or one with the same old graph, or the
        same content.
        """
        before = self._known.get(group.key)
        if before is None:
            # The same object may have another path now. Of several objects each may have its own: the largest
            # group continues the holder, and no other does.
            candidates = (moved[place] for place in places(group) if place in moved)
            return next((known for known in candidates if known.seen.id not in continued), None)
        within = group.within is not None and group.within == before.group.within
        if within or not group.holders.keys().isdisjoint(before.group.holders):
            # Entries of a queue move. A variable has one entry, whose value may be longer each time.
            if not replaced(before.group, group) or group.entries > before.group.entries:
                return before
        elif survived(before.group, group) or carries_on(before.group, group):
            return before
        return before if _continues(before, heads, tails) else None


def same_bytes(before: Set[bytes], after: Set[bytes]) -> bool:
    """Whether storages begin, or end, with the same bytes as before. Zeros prove nothing.

    `torch.cat` lengthens a tensor at its end or its beginning, and a list may be replaced by copies of its
    tensors and one more. A longer batch has other content.
    """
    return any(map(any, before)) and len(before & after) >= _SURVIVES * len(before)


def _continues(before: _Earlier | None, heads: frozenset[bytes], tails: frozenset[bytes]) -> bool:
    return before is not None and (same_bytes(before.heads, heads) or same_bytes(before.tails, tails))


def places(group: HolderGroup) -> list[Place]:
    return [(group.device, token, group.anchor[-1]) for token in group.holders]


def nodes_on_host(groups: Sequence[HolderGroup]) -> Iterator[HolderGroup]:
    """Yield the host memory that holders of GPU storages keep, as groups of the CPU without storages."""
    for group in groups:
        if group.device != "cpu" and group.kept:
            yield msgspec.structs.replace(
                group, device="cpu", count=0, nbytes=0, by_path={group.anchor: 0}, owners={}, known={}
            )


def _known_holder(group: HolderGroup) -> str | None:
    """Return the entry of the catalogue that keeps more than half of a group."""
    name = max(group.known, key=lambda entry: group.known[entry], default=None)
    return name if name is not None and 2 * group.known[name] > group.nbytes else None


def survived(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether most of a holder's storages are still there, according to its witnesses.

    Nodes without storages have no witnesses. They are recognized by their place.
    """
    if not before.witnesses:
        return not after.witnesses
    return len(before.witnesses & after.witnesses) >= _SURVIVES * len(before.witnesses)


def carries_on(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether a graph still has its oldest node: a running total in a dict is a new tensor at each step."""
    return before.made is not None and after.made is not None and before.made[0] == after.made[0]


def replaced(before: HolderGroup, after: HolderGroup) -> bool:
    return after.count > before.count > 0 and not survived(before, after)


def renewed(before: HolderGroup, after: HolderGroup) -> bool:
    """Whether no old node or storage is left, and the anchor names no more objects than before."""
    if before.made is None or after.made is None or after.entries > before.entries:
        return False
    return after.made[0] > before.made[1] and before.witnesses.isdisjoint(after.witnesses)


def grew_most(before: HolderGroup, after: HolderGroup) -> HolderPath:
    """Return the path whose bytes grew most; if equal, the one with the most bytes."""
    rises = {path: (nbytes - before.by_path.get(path, 0), nbytes) for path, nbytes in after.by_path.items()}
    return max(rises, key=lambda path: rises[path], default=after.path)


def changed(
    holders: Iterable[HolderSeen], written: dict[int, HolderSeen], *, forget: bool = True
) -> tuple[list[HolderSeen], list[int]]:
    """Return the holders that differ from what was written last, and the ids of those that are not there.

    Args:
        holders: of a census.
        written: the last line of each holder; brought up to date.
        forget: those that are not there are gone.
    """
    now = {seen.id: seen for seen in holders}
    new = [seen for seen in now.values() if written.get(seen.id) != seen]
    gone = [number for number in written if number not in now]
    written.update({seen.id: seen for seen in new})
    for number in gone if forget else ():
        del written[number]
    return new, gone
