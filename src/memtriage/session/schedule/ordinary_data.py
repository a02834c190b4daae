"""Ordinary data that grows from census to census: containers, and arrays that longer ones replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memtriage.account.census import CensusView
from memtriage.account.followed import same_bytes
from memtriage.diagnose.growth.holders import HOLDER_POLICY, GrowingData
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
)
from memtriage.observe.sites import SiteRecorder

_MATCHES: Final = (0.5, 2.0)
"""A line made a container's entries if it allocated 0.5 to 2 times the bytes by which they grew over one
position: the size of an entry is only estimated."""


@dataclass(frozen=True, slots=True)
class ComparedLengths:
    """Lengths of containers at the previous census, and at the current one."""

    earlier: KnownLengths
    now: ContainerLengths

    def of_libraries(self, objects: Iterable[Any]) -> list[Any]:
        """Note the containers that the program's variables do not reach; return those that grew."""
        return most_grown(self.now.add(objects), self.earlier)


@dataclass(frozen=True, slots=True)
class _SeenArray:
    """A large array at a census, and how it was lengthened up to then."""

    array: LongArray
    growing: GrowingData


@dataclass(slots=True)
class OrdinaryData:
    """Containers and arrays that grow, as the censuses so far showed them.

    Attributes:
        containers: those that grow, by address.
        arrays: large arrays at the last census, by path, if only one array has that path.
    """

    containers: dict[int, GrowingData] = field(default_factory=dict)
    arrays: dict[HolderPath, _SeenArray] = field(default_factory=dict)
    _lengths: ContainerLengths | None = None
    _lengths_at: float = 0.0

    def growing(self) -> list[GrowingData]:
        """Return containers that grow, and arrays that are replaced by longer ones."""
        arrays = (seen.growing for seen in self.arrays.values())
        return [*self.containers.values(), *(growing for growing in arrays if len(growing.entries) > 1)]

    def seen(self, numbers: dict[int | HolderPath, int]) -> list[DataSeen]:
        """Return what the last census found, for the record.

        Args:
            numbers: by address or path, those of the containers and arrays so far; gets those of new ones.
        """
        return [
            DataSeen(
                id=numbers.setdefault(growing.path if key is None else key, 1 + len(numbers)),
                path=growing.path,
                kind=growing.kind,
                entries=growing.entries[-1][1],
                entry_bytes=growing.entry_bytes,
                before=growing.entries[-2][1],
                native=growing.native,
                allocated_at=growing.allocated_at,
                stored_at=growing.stored_at,
                classes=list(growing.classes),
                lengthens=growing.lengthens,
            )
            for key, growing in [
                *self.containers.items(),
                *((None, each.growing) for each in self.arrays.values() if len(each.growing.entries) > 1),
            ]
            if growing.native is not None or growing.rate >= HOLDER_POLICY.data_least
        ]

    @property
    def lacks_sites(self) -> bool:
        """Whether a container grows by entries whose allocation site is unknown."""
        return any(container.allocated_at is None for container in self.containers.values())

    def compared(self) -> ComparedLengths:
        """Return what the next census is compared with."""
        return ComparedLengths((self._lengths or ContainerLengths()).by_address(), ContainerLengths())

    def add(self, view: CensusView, position: float, compared: ComparedLengths, sites: SiteRecorder) -> None:
        """Add a census.

        Args:
            view: of the census.
            position: when it is taken.
            compared: what `compared` returned before it.
            sites: of allocations shortly before it.
        """
        self._add_containers(view, position, compared, sites)
        self._add_arrays(view, position, sites)

    def move(self, to: Callable[[float], float]) -> None:
        """Replace the position of each census, by an increasing function."""
        self.containers = {address: _moved(growing, to) for address, growing in self.containers.items()}
        self.arrays = {
            path: replace(seen, growing=_moved(seen.growing, to)) for path, seen in self.arrays.items()
        }
        self._lengths_at = to(self._lengths_at)

    def _add_containers(
        self, view: CensusView, position: float, compared: ComparedLengths, sites: SiteRecorder
    ) -> None:
        """Find containers that have more entries than at the previous census."""
        compared.now.add(view.graph.objects)
        grown = grown_containers(view.graph, compared.earlier)
        by_line = sites.live_by_line() if grown else {}
        data = _pausing(self.containers, compared, position)
        for container in grown:
            address = id(view.graph.objects[container.position])
            data[address] = self._growing(view, container, address, position, by_line, sites)
        self.containers, self._lengths, self._lengths_at = data, compared.now, position

    def _add_arrays(self, view: CensusView, position: float, sites: SiteRecorder) -> None:
        """Find arrays that are longer than the one they replaced, and begin or end with the same bytes."""
        seen: dict[HolderPath, _SeenArray] = {}
        for array in long_arrays(view.graph):
            path = view.path(array.position)
            if ANY_ITEM in path or path in seen:
                continue  # several arrays with one path cannot be told apart
            before = self.arrays.get(path)
            entries = () if before is None else before.growing.entries
            if before is None or not _continues(before.array, array):
                entries = ((position, array.nbytes),)
            elif array.nbytes > before.array.nbytes:
                entries = (*entries, (position, array.nbytes))
            growing = GrowingData(path, "ndarray", None, 1, entries, lengthens=True)
            if len(entries) > 1:
                holder, stored_at = view.stored_array(array.position, sites.named)
                classes = tuple(view.classes(array.position))
                growing = replace(growing, path=holder, stored_at=stored_at, classes=classes)
            seen[path] = _SeenArray(array, growing)
        self.arrays = seen

    def _growing(
        self,
        view: CensusView,
        container: GrownContainer,
        address: int,
        position: float,
        by_line: dict[tuple[str, int], int],
        sites: SiteRecorder,
    ) -> GrowingData:
        before = self.containers.get(address)
        now = len(view.graph.objects[container.position])
        earlier = ((self._lengths_at, now - container.more),) if before is None else before.entries
        entries = (*earlier, (position, now))
        last_at, last = entries[-2]
        # Sites were recorded over one position. A line whose allocations match the growth made the entries.
        rate = container.entry_bytes * (now - last) / (position - last_at)
        line = min(by_line, key=lambda line: abs(by_line[line] - rate), default=None)
        least, most = (part * rate for part in _MATCHES)
        made_them = line is not None and least <= by_line[line] <= most
        site = sites.named([line]) if line is not None and made_them else None
        site = site or (None if before is None else before.allocated_at)
        return GrowingData(
            path=(*view.path(container.position), ANY_ITEM),
            kind=container.kind,
            native=container.native,
            entry_bytes=container.entry_bytes,
            entries=entries,
            allocated_at=site,
            stored_at=view.stored_at(container.position, sites.named, site),
            classes=tuple(view.classes(container.position)),
        )


def _moved(growing: GrowingData, to: Callable[[float], float]) -> GrowingData:
    return replace(growing, entries=tuple((to(position), count) for position, count in growing.entries))


def _continues(before: LongArray, after: LongArray) -> bool:
    """Whether an array contains another at its beginning or its end, as far as both were read."""
    longer = after.nbytes >= before.nbytes
    return longer and (same_bytes(before.head, after.head) or same_bytes(before.tail, after.tail))


def _pausing(
    data: Mapping[int, GrowingData], compared: ComparedLengths, position: float
) -> dict[int, GrowingData]:
    """Return the containers that get entries now and then, and got none since the previous census."""
    pausing = {address: growing for address, growing in data.items() if growing.pauses(position)}
    if not pausing:
        return {}
    earlier, now = compared.earlier, compared.now.by_address()
    return {
        address: growing
        for address, growing in pausing.items()
        if address in now.lengths and now.of(address) == earlier.of(address)
    }
