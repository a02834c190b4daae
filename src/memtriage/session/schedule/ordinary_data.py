"""Ordinary data that grows from census to census: containers, and arrays that longer ones replace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

from msgspec.structs import replace

from memtriage.account.census import CensusView
from memtriage.account.followed import same_bytes
from memtriage.diagnose.growth.attribution import DATA_LEAST
from memtriage.model.evidence import DataSeen
from memtriage.model.paths import ANY_ITEM, HolderPath, of_any_item
from memtriage.observe.containers import (
    ContainerLengths,
    GrownContainer,
    LongArray,
    alike,
    grown_containers,
    length_of,
    long_arrays,
    most_grown,
    recent_entries,
)
from memtriage.observe.kinds import KindTable
from memtriage.observe.sites import SiteRecorder

_MOST: Final = 20
"""Containers that are followed one by one."""
_MATCHES: Final = (0.5, 2.0)
"""A line made a container's entries if it allocated 0.5 to 2 times the bytes by which they grew over one
position: the size of an entry is only estimated."""


class OrdinaryData:
    """Containers and arrays that grow, as the censuses so far showed them."""

    def __init__(self) -> None:
        self._followed: dict[int, DataSeen] = {}  # what grew enough at some census, by address
        self._arrays: dict[HolderPath, tuple[LongArray, DataSeen]] = {}  # by path, if only one array has it
        self._lengths = self._now = ContainerLengths()  # at the previous census, and at this one
        self._earlier = self._lengths.by_address()
        self._copied: dict[int, int] = {}
        # Small containers with one path that grow together, and where those are that grew last.
        self._crowds: dict[HolderPath, tuple[DataSeen, list[int]]] = {}
        self._apart = 1.0
        self._numbers = count()
        self._lengthened: set[int] = set()
        self._measured: dict[int, int] = {}

    @property
    def lacks_sites(self) -> bool:
        """Whether a container grows by entries whose allocation site is unknown."""
        return any(seen.allocated_at is None for seen in self._followed.values())

    def begin(self, apart: float) -> None:
        """Prepare for a census so many positions after the previous one: makes tables."""
        self._earlier, self._now, self._apart = self._lengths.by_address(), ContainerLengths(), apart

    def of_libraries(self, objects: Iterable[Any], *, small: bool = False) -> list[Any]:
        """Note the containers that the program's variables do not reach; return those that grew enough.

        Args:
            small: return also those that may only grow by enough together.
        """
        kinds, grown = KindTable(), most_grown(self._now.add(objects), self._earlier)
        return [obj for obj in grown if small or self._counts(obj, *recent_entries(kinds, obj))]

    def add(self, view: CensusView, sites: SiteRecorder) -> list[DataSeen]:
        """Return the containers that grow or did, and the arrays that were replaced by longer ones.

        Args:
            view: of the census for which `begin` was called.
            sites: of allocations shortly before it.
        """
        self._now.add(view.graph.objects)
        self._copied = dict(self._now.copies_of(self._lengths))
        for address, before in self._copied.items():
            self._earlier.lengths[address] = self._earlier.lengths[before]
            self._earlier.firsts[address] = self._earlier.firsts[before]
            if before in self._followed:
                self._followed[address] = self._followed.pop(before)
        self._followed = self._containers(view, sites)
        self._lengths, self._earlier = self._now, ContainerLengths().by_address()
        self._arrays = self._longer(view, sites)
        arrays = (seen for _, seen in self._arrays.values() if seen.id in self._lengthened)
        return [*self._followed.values(), *(seen for seen, _ in self._crowds.values()), *arrays]

    def _rate(self, container: Any, entry_bytes: int) -> float:
        """Return the bytes per position by which a container grew."""
        more = length_of(container) - self._earlier.lengths[id(container)]
        return entry_bytes * more / max(self._apart, 1e-3)

    def _counts(self, container: Any, entry_bytes: int, native: str | None) -> bool:
        """Whether a container grew by more than the program's own bookkeeping, or did before."""
        enough = self._rate(container, entry_bytes) >= DATA_LEAST
        return enough or native is not None or id(container) in self._followed

    def _containers(self, view: CensusView, sites: SiteRecorder) -> dict[int, DataSeen]:
        grown = grown_containers(view.graph, self._earlier)
        by_line = sites.live_by_line() if grown else {}
        found: dict[int, DataSeen] = {}
        for address in self._unchanged(self._followed) if self._followed else ():
            found[address] = replace(self._followed[address], before=None)
        small: list[GrownContainer] = []
        wanted: dict[int, DataSeen] = {}  # cuts are measured again when a container has twice the entries
        for container in grown:
            obj = view.graph.objects[container.position]
            if not self._counts(obj, container.entry_bytes, container.native):
                small.append(container)
            elif len(found) < _MOST:
                seen = found[id(obj)] = self._grown(view, container, by_line, sites)
                if seen.entries >= 2 * self._measured.get(seen.id, 0):
                    wanted[container.position] = seen
                    self._measured[seen.id] = seen.entries
        for position, cuts in view.cuts_of_data(wanted).items() if wanted else ():
            wanted[position].cuts = cuts
        self._crowds = self._together(view, small, sites)
        return found

    def _unchanged(self, addresses: Iterable[int]) -> list[int]:
        """Return the containers that got no entry since the last census, and still exist."""
        now = self._now.by_address()
        return [at for at in addresses if at in now.lengths and now.of(at) == self._earlier.of(at)]

    def _together(
        self, view: CensusView, small: Iterable[GrownContainer], sites: SiteRecorder
    ) -> dict[HolderPath, tuple[DataSeen, list[int]]]:
        """Return the containers with one path of which each grows by little, and all by enough."""
        by_path: defaultdict[HolderPath, list[GrownContainer]] = defaultdict(list)
        for container in small:
            by_path[of_any_item(view.path(container.position))].append(container)
        found = {}
        for path, (seen, grew) in self._crowds.items():
            if left := grew if path in by_path else self._unchanged(grew):
                found[path] = replace(seen, before=None), left
        for path, grown in by_path.items():
            more = sum(each.more for each in grown)
            nbytes = sum(each.more * each.entry_bytes for each in grown)
            before = self._crowds[path][0] if path in self._crowds else None
            if len(grown) < 2 or (before is None and nbytes < DATA_LEAST * max(self._apart, 1e-3)):
                continue
            largest = grown[0]
            positions, factor = alike(view.graph, largest.position)
            of_path = (each for each in positions if of_any_item(view.path(each)) == path)
            entries = factor * sum(length_of(view.graph.objects[each]) for each in of_path)
            seen = self._seen(view, largest, before, sites, entries, more)
            members = [id(view.graph.objects[each.position]) for each in grown]
            found[path] = replace(seen, path=(*path, ANY_ITEM), entry_bytes=nbytes // more), members
        return found

    def _grown(
        self,
        view: CensusView,
        container: GrownContainer,
        by_line: dict[tuple[str, int], int],
        sites: SiteRecorder,
    ) -> DataSeen:
        obj = view.graph.objects[container.position]
        before, rate = self._followed.get(id(obj)), self._rate(obj, container.entry_bytes)
        # Sites were recorded over one position. A line whose allocations match the growth made the entries.
        least, most = (part * rate for part in _MATCHES)
        made = [line for line, nbytes in by_line.items() if least <= nbytes <= most]
        line = min(made, key=lambda line: abs(by_line[line] - rate), default=None)
        site = None if line is None else sites.named([line])
        site = site or (None if before is None else before.allocated_at)
        entries = length_of(obj)
        seen = self._seen(view, container, before, sites, entries, container.more, site)
        return replace(
            seen,
            lengthens=id(obj) in self._copied and container.kind in ("list", "tuple"),
            cuts=[] if before is None else [cut.scaled(entries / before.entries) for cut in before.cuts],
        )

    def _seen(
        self,
        view: CensusView,
        container: GrownContainer,
        before: DataSeen | None,
        sites: SiteRecorder,
        entries: int,
        more: int,
        allocated_at: str | None = None,
    ) -> DataSeen:
        """Return what a census sees of a container that has so many entries, `more` of them new."""
        store = view.store_of(container.position, allocated_at)
        return DataSeen(
            id=next(self._numbers) if before is None else before.id,
            path=(*view.path(container.position), ANY_ITEM),
            kind=container.kind,
            entries=entries,
            entry_bytes=container.entry_bytes,
            before=max(0, entries - more) if before is None else None,
            native=container.native,
            allocated_at=allocated_at,
            stored_at=None if store is None else sites.named([(store.filename, store.line)]),
            stored_value=None if store is None else store.value,
            classes=list(view.classes(container.position)),
        )

    def _longer(self, view: CensusView, sites: SiteRecorder) -> dict[HolderPath, tuple[LongArray, DataSeen]]:
        """Find arrays that are longer than the one they replaced, and begin or end with the same bytes."""
        found: dict[HolderPath, tuple[LongArray, DataSeen]] = {}
        for array in long_arrays(view.graph):
            path = view.path(array.position)
            if ANY_ITEM in path or path in found:
                continue  # several arrays with one path cannot be told apart
            known = self._arrays.get(path)
            before = known if known is not None and _continues(known[0], array) else None
            number = next(self._numbers) if before is None else before[1].id
            seen = DataSeen(
                id=number, path=path, kind="ndarray", entries=array.nbytes, entry_bytes=1, lengthens=True
            )
            if before is not None and array.nbytes > before[0].nbytes and number not in self._lengthened:
                seen.before = before[0].nbytes
                self._lengthened.add(number)
            if number in self._lengthened:
                seen.path, seen.stored_at = view.stored_array(array.position, sites.named)
                seen.classes = list(view.classes(array.position))
            found[path] = array, seen
        return found


def _continues(before: LongArray, after: LongArray) -> bool:
    """Whether an array contains another at its beginning or its end, as far as both were read."""
    longer = after.nbytes >= before.nbytes
    return longer and (same_bytes({before.head}, {after.head}) or same_bytes({before.tail}, {after.tail}))
