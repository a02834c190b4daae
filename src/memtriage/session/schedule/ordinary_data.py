"""Ordinary data that grows from census to census: containers, and arrays that longer ones replace."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from msgspec.structs import replace

from memtriage.account.census import CensusView
from memtriage.account.followed import same_bytes
from memtriage.diagnose.growth.attribution import DATA_LEAST
from memtriage.model.evidence import DataSeen
from memtriage.model.paths import ANY_ITEM, HolderPath
from memtriage.observe.containers import (
    ContainerLengths,
    GrownContainer,
    KnownLengths,
    LongArray,
    grown_containers,
    long_arrays,
    most_grown,
    recent_entries,
)
from memtriage.observe.kinds import KindTable
from memtriage.observe.sites import SiteRecorder

_MATCHES: Final = (0.5, 2.0)
"""A line made a container's entries if it allocated 0.5 to 2 times the bytes by which they grew over one
position: the size of an entry is only estimated."""


@dataclass(frozen=True, slots=True)
class ComparedLengths:
    """Lengths of containers at the previous census, and at the current one.

    Attributes:
        apart: positions from one to the other.
        followed: addresses of containers that count however little they grow.
    """

    earlier: KnownLengths
    now: ContainerLengths
    apart: float
    followed: Container[int]

    def of_libraries(self, objects: Iterable[Any]) -> list[Any]:
        """Note the containers that the program's variables do not reach; return those that grew enough."""
        kinds, grown = KindTable(), most_grown(self.now.add(objects), self.earlier)
        return [obj for obj in grown if self.counts(obj, *recent_entries(kinds, obj))]

    def rate(self, container: Any, entry_bytes: int) -> float:
        """Return the bytes per position by which a container grew."""
        more = len(container) - self.earlier.lengths[id(container)]
        return entry_bytes * more / max(self.apart, 1e-3)

    def counts(self, container: Any, entry_bytes: int, native: str | None) -> bool:
        """Whether a container grew by more than the program's own bookkeeping, or did before."""
        enough = self.rate(container, entry_bytes) >= DATA_LEAST
        return enough or native is not None or id(container) in self.followed


@dataclass(slots=True)
class OrdinaryData:
    """Containers and arrays that grow, as the censuses so far showed them.

    Attributes:
        containers: those that grew at some census by more than the program's own bookkeeping, and still
            exist, by address.
        arrays: large arrays at the last census, by path, if only one array has that path.
    """

    containers: dict[int, DataSeen] = field(default_factory=dict)
    arrays: dict[HolderPath, tuple[LongArray, DataSeen]] = field(default_factory=dict)
    _lengths: ContainerLengths | None = None
    _numbers: Iterator[int] = field(default_factory=count)
    _lengthened: set[int] = field(default_factory=set)
    _measured: dict[int, int] = field(default_factory=dict)

    @property
    def lacks_sites(self) -> bool:
        """Whether a container grows by entries whose allocation site is unknown."""
        return any(seen.allocated_at is None for seen in self.containers.values())

    def compared(self, apart: float) -> ComparedLengths:
        """Return what the next census, so many positions after the previous one, is compared with."""
        earlier = (self._lengths or ContainerLengths()).by_address()
        return ComparedLengths(earlier, ContainerLengths(), apart, frozenset(self.containers))

    def add(self, view: CensusView, compared: ComparedLengths, sites: SiteRecorder) -> list[DataSeen]:
        """Return the containers that grow or did, and the arrays that were replaced by longer ones.

        Args:
            view: of the census.
            compared: what `compared` returned before it.
            sites: of allocations shortly before it.
        """
        compared.now.add(view.graph.objects)
        self.containers = self._containers(view, compared, sites)
        self._lengths = compared.now
        self.arrays = self._arrays(view, sites)
        arrays = (seen for _, seen in self.arrays.values() if seen.id in self._lengthened)
        return [*self.containers.values(), *arrays]

    def _containers(
        self, view: CensusView, compared: ComparedLengths, sites: SiteRecorder
    ) -> dict[int, DataSeen]:
        grown = grown_containers(view.graph, compared.earlier)
        by_line = sites.live_by_line() if grown else {}
        found: dict[int, DataSeen] = {}
        if self.containers:  # those that got no entry since, and still exist, are followed on
            earlier, now = compared.earlier, compared.now.by_address()
            for address, seen in self.containers.items():
                if address in now.lengths and now.of(address) == earlier.of(address):
                    found[address] = replace(seen, before=None)
        wanted: dict[
            int, DataSeen
        ] = {}  # whose cuts are measured, and again when they have twice the entries
        for container in grown:
            obj = view.graph.objects[container.position]
            if compared.counts(obj, container.entry_bytes, container.native):
                rate = compared.rate(obj, container.entry_bytes)
                before = self.containers.get(id(obj))
                seen = found[id(obj)] = self._grown(view, container, before, rate, by_line, sites)
                if seen.entries >= 2 * self._measured.get(seen.id, 0):
                    wanted[container.position] = seen
                    self._measured[seen.id] = seen.entries
        for position, cuts in view.cuts_of_data(wanted).items() if wanted else ():
            wanted[position].cuts = cuts
        return found

    def _grown(
        self,
        view: CensusView,
        container: GrownContainer,
        before: DataSeen | None,
        rate: float,
        by_line: dict[tuple[str, int], int],
        sites: SiteRecorder,
    ) -> DataSeen:
        entries = len(view.graph.objects[container.position])
        # Sites were recorded over one position. A line whose allocations match the growth made the entries.
        least, most = (part * rate for part in _MATCHES)
        made = [line for line, nbytes in by_line.items() if least <= nbytes <= most]
        line = min(made, key=lambda line: abs(by_line[line] - rate), default=None)
        site = None if line is None else sites.named([line])
        site = site or (None if before is None else before.allocated_at)
        store = view.store_of(container.position, site)
        return DataSeen(
            id=next(self._numbers) if before is None else before.id,
            path=(*view.path(container.position), ANY_ITEM),
            kind=container.kind,
            entries=entries,
            entry_bytes=container.entry_bytes,
            before=entries - container.more if before is None else None,
            native=container.native,
            allocated_at=site,
            stored_at=None if store is None else sites.named([(store.filename, store.line)]),
            stored_value=None if store is None else store.value,
            classes=list(view.classes(container.position)),
            cuts=[] if before is None else before.cuts,
        )

    def _arrays(self, view: CensusView, sites: SiteRecorder) -> dict[HolderPath, tuple[LongArray, DataSeen]]:
        """Find arrays that are longer than the one they replaced, and begin or end with the same bytes."""
        found: dict[HolderPath, tuple[LongArray, DataSeen]] = {}
        for array in long_arrays(view.graph):
            path = view.path(array.position)
            if ANY_ITEM in path or path in found:
                continue  # several arrays with one path cannot be told apart
            before = self.arrays.get(path)
            if before is not None and not _continues(before[0], array):
                before = None
            seen = DataSeen(
                id=next(self._numbers) if before is None else before[1].id,
                path=path,
                kind="ndarray",
                entries=array.nbytes,
                entry_bytes=1,
                lengthens=True,
            )
            if before is not None and (array.nbytes > before[0].nbytes or seen.id in self._lengthened):
                if seen.id not in self._lengthened:
                    seen.before = before[0].nbytes
                    self._lengthened.add(seen.id)
                seen.path, seen.stored_at = view.stored_array(array.position, sites.named)
                seen.classes = list(view.classes(array.position))
            found[path] = array, seen
        return found


def _continues(before: LongArray, after: LongArray) -> bool:
    """Whether an array contains another at its beginning or its end, as far as both were read."""
    longer = after.nbytes >= before.nbytes
    return longer and (same_bytes(before.head, after.head) or same_bytes(before.tail, after.tail))
