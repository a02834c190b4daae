"""The census: every storage that is alive, what keeps it alive, and what it is.

`Look` walks the heap and gives a `CensusView` that is valid only inside its `with` block. Everything that a
`CensusView` returns is numbers and names, so a census keeps nothing of the program alive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from memtriage.account.cuts import cuts_of_data
from memtriage.account.group_details import GroupDetails, LineNamer, SiteOf
from memtriage.account.held import HeldStorage, anchors_of_nodes, held_storages, holding_object
from memtriage.account.holder_facts import holder_facts, store_of
from memtriage.account.holder_index import HolderIndex
from memtriage.account.native_sizes import SIZES, NativeSizer
from memtriage.account.paths import PathNamer
from memtriage.model.census import (
    Census,
    CutSeen,
    GroupDetail,
    GroupKey,
    HolderGroup,
    StorageRecord,
    add_storage,
    counting_kept,
)
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from memtriage.observe.autograd import created
from memtriage.observe.heap import HeapWalk
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.identity import Identities, module_namespaces
from memtriage.observe.store_statements import Store
from memtriage.observe.stores import storing_line
from memtriage.observe.tensors import end_bytes, is_pinned, is_shared, plain
from memtriage.process.stdlib import time

_HEAD: Final = 64
"""Bytes read at either end of a storage, to recognize a longer copy of an earlier tensor."""
_MOST_HEADS: Final = 64
"""The ends are read of at most this many storages of a group: the keys and values of 32 layers."""
_PAGE: Final = 4096
"""Smaller storages are not looked at closely: they are counters, and pinned or shared memory takes a page."""


@dataclass
class Look:
    """`with Look() as view:` takes a census; the view is only valid inside the block.

    Args:
        frames: frames that have ended, but whose variables an exception's traceback keeps alive.
        identities: if given, groups say which objects hold them, so that later censuses can be compared.
        wanted: as for `HeapWalk`, to leave out most of the libraries.
        pinned: addresses of the page-locked storages, if torch must not be asked for each.
    """

    frames: Sequence[FrameType] = ()
    identities: Identities | None = None
    wanted: Callable[[Iterable[Any]], Sequence[Any]] | None = None
    pinned: Container[int] | None = None

    def __enter__(self) -> CensusView:
        started = time.perf_counter()
        self._walk = HeapWalk(self.frames, wanted=self.wanted)
        graph = self._walk.__enter__()
        try:
            self._view = CensusView(graph, started, self.identities, self.pinned)
        except BaseException:
            self._walk.__exit__()
            raise
        return self._view

    def __exit__(self, *exception: object) -> None:
        self._view.close()
        self._walk.__exit__()


def take_census() -> Census:
    """Take a census as plain data. See `Look` for one with details."""
    with Look() as view:
        return view.census()


class CensusView:
    """A census while the heap graph is still at hand."""

    def __init__(
        self,
        graph: HeapGraph,
        started: float,
        identities: Identities | None = None,
        pinned: Container[int] | None = None,
    ) -> None:
        self._graph = graph
        self._pinned = pinned
        self._identities = identities
        self._namer = PathNamer(graph)
        self._started = started
        self._holders = HolderIndex(graph, self._namer)
        self._held = held_storages(graph, self._namer)
        self._census: Census | None = None
        self._node_anchors: dict[int, HolderPath] = {}
        self._ends: dict[GroupKey, list[HeldStorage]] | None = None

    def close(self) -> None:
        self._held.clear()
        self._node_anchors.clear()
        self._ends = None
        del self._graph, self._namer, self._holders

    def census(self) -> Census:
        """Return records and groups of all storages."""
        if self._census is None:
            records = [self._record(held) for held in self._held.values()]
            self._node_anchors = anchors_of_nodes(self._graph, self._namer)
            groups = self._groups(records)
            self._census = Census(
                storages=records,
                groups=sorted(groups, key=lambda group: -group.nbytes),
                objects=len(self._graph.objects),
                nodes=len(self._graph.nodes),
                seconds=time.perf_counter() - self._started,
                parameters=sum(self._elements(held) for held in self._held.values()),
                partial=self._graph.cut,
            )
        return self._census

    @property
    def graph(self) -> HeapGraph:
        """The walked heap, for other questions about the same instant. Keep no reference to its objects."""
        return self._graph

    def path(self, position: int) -> HolderPath:
        """Return the holder path of any object of the graph."""
        return self._namer.path(position).whole

    def store_of(self, position: int, allocated_at: str | None = None) -> Store | None:
        """Return the program's statement that stores into a container; None if not certain.

        Args:
            position: of a container in the graph.
            allocated_at: where its entries were made, if known.
        """
        path = (*self._namer.path(position).anchor, ANY_ITEM)
        files = holder_facts(self._graph, position).files
        return store_of(path, files, allocated_at)

    def stored_array(self, position: int, named: LineNamer) -> tuple[HolderPath, str | None]:
        """Return the path to what the program stores, and the line that stores it.

        That is an array, or a library's object that contains the array, such as a DataFrame. If no line is
        certain, it is the path to the array.

        Args:
            position: of the array in the graph.
            named: names a line of the source.
        """
        path = self._namer.path(position).anchor
        files = holder_facts(self._graph, position).files
        for length in range(len(path), 1, -1):
            store = storing_line(path[:length], files)
            if store is not None:
                return path[:length], named([(store.filename, store.line)])
        return path, None

    def classes(self, position: int) -> list[str]:
        """Return classes of an object and of those on the way to it, as in `GroupDetail.classes`."""
        return holder_facts(self._graph, position).classes

    def cuts_of_data(self, containers: Iterable[int]) -> dict[int, list[CutSeen]]:
        """Return what cuts would release of containers of ordinary data, by their positions in the graph."""
        return cuts_of_data(self._graph, self._namer, self._holders, containers)

    def heads(self, *, last: bool = False) -> dict[GroupKey, frozenset[bytes]]:
        """Return the first bytes of the first and last storages of each group of variables, by group.

        They show whether tensors were replaced by longer ones, by copies, or by other content. Reading device
        memory waits for its stream; a census is not a fast path.

        Args:
            last: return the last bytes instead.
        """
        if self._ends is None:
            self._ends = self._at_the_ends()
        heads: defaultdict[GroupKey, set[bytes]] = defaultdict(set)
        for key, group in self._ends.items():
            for held in group:
                head = end_bytes(self._graph.objects[held.position], held.facts, _HEAD, last=last)
                if head is not None:
                    heads[key].add(head)
        return {key: frozenset(found) for key, found in heads.items()}

    def _at_the_ends(self) -> dict[GroupKey, list[HeldStorage]]:
        """Return the first and the last storages of groups: a list is walked from its end, a dict is not."""
        detached = {group.key for group in self.census().groups if not group.attached}
        found: defaultdict[GroupKey, list[HeldStorage]] = defaultdict(list)
        for held in self._held.values():
            if held.owner in ("variable", "buffer") and held.facts.nbytes >= _PAGE:
                found[self._key(held)].append(held)
        half = _MOST_HEADS // 2
        return {key: found[key][:half] + found[key][half:][-half:] for key in found.keys() & detached}

    def _key(self, held: HeldStorage) -> GroupKey:
        return held.facts.device, self._namer.path(held.position).anchor

    def _record(self, held: HeldStorage) -> StorageRecord:
        tensor = self._graph.objects[held.position]
        whole_page = held.facts.device == "cpu" and held.facts.nbytes >= _PAGE
        return StorageRecord(
            device=held.facts.device,
            address=held.facts.address,
            nbytes=held.facts.nbytes,
            owner=held.owner,
            path=self._namer.path(held.position).whole,
            pinned=whole_page and self._is_pinned(tensor, held.facts.address),
            shared=whole_page and is_shared(tensor),
            known=held.known,
        )

    def _is_pinned(self, tensor: Any, address: int) -> bool:
        return is_pinned(tensor) if self._pinned is None else address in self._pinned

    def _elements(self, held: HeldStorage) -> int:
        """Return the number of elements of a parameter's storage; 0 for any other."""
        if held.owner != "parameter":
            return 0
        return held.facts.nbytes // int(plain(self._graph.objects[held.position]).dtype.itemsize)

    def _groups(self, records: list[StorageRecord]) -> list[HolderGroup]:
        groups: dict[GroupKey, HolderGroup] = {}
        for held, record in zip(self._held.values(), records, strict=True):
            path = self._namer.path(held.position)
            add_storage(groups, record, path.anchor, attached=path.attached)
        self._count_kept(groups)
        elements: dict[GroupKey, set[int]] = {}
        for held in self._held.values():
            elements.setdefault(self._key(held), set()).add(self._holders.holder_of(held.position)[1])
        for key, entries in elements.items():
            groups[key].entries, groups[key].containers = len(entries), self._holders.containers(entries)
        if self._identities is not None:
            self._note_holders(groups, self._identities)
        for group in groups.values():
            group.path = group.largest_path
        return list(groups.values())

    def _count_kept(self, groups: dict[GroupKey, HolderGroup]) -> None:
        """Add nodes, tensor objects and storage records to the group of their anchor."""
        graph, sizer = self._graph, NativeSizer(self._graph.reader)
        kept: Counter[HolderPath] = Counter()
        nodes: Counter[HolderPath] = Counter(self._node_anchors.values())
        made: dict[HolderPath, tuple[int, int]] = {}
        for position, anchor in self._node_anchors.items():
            node = graph.objects[position]
            kept[anchor] += sizer.node(node)
            number = created(node)
            if number is not None:
                oldest, newest = made.get(anchor, (number, number))
                made[anchor] = min(oldest, number), max(newest, number)
        for position in graph.tensors:
            above = self._node_anchors.get(graph.parents[position])
            anchor = self._namer.path(position).anchor if above is None else above
            kept[anchor] += sizer.tensor(graph.objects[position], saved=above is not None)
        for held in self._held.values():
            kept[self._namer.path(held.position).anchor] += SIZES.storage_on(held.facts.device)
        at = counting_kept(groups.values())
        for anchor in nodes:
            if anchor not in at:
                at[anchor] = self._without_storage(groups, anchor)
        for anchor, group in at.items():
            group.kept, group.objects, group.made = kept[anchor], nodes[anchor], made.get(anchor)

    def _without_storage(self, groups: dict[GroupKey, HolderGroup], anchor: HolderPath) -> HolderGroup:
        """Make a group for an anchor that holds nodes but no storage."""
        path = (*anchor, PathSegment(SegmentKind.GRAD_FN))
        group = HolderGroup(
            device="cpu", anchor=anchor, path=path, count=0, nbytes=0, by_path={path: 0},
            owners={"saved for backward": 0}, attached=True,
        )  # fmt: skip
        groups[group.key] = group
        return group

    def _note_holders(self, groups: dict[GroupKey, HolderGroup], identities: Identities) -> None:
        identities.begin()
        modules = module_namespaces()
        held_by: dict[int, tuple[Any, dict[GroupKey, list[HeldStorage]]]] = {}
        last_of: dict[GroupKey, int] = {}
        for held in self._held.values():
            obj = holding_object(self._graph, self._namer, self._holders, held.position, modules)
            by_group = held_by.setdefault(id(obj), (obj, {}))[1]
            by_group.setdefault(key := self._key(held), []).append(held)
            last_of[key] = held.position
        for position, anchor in self._node_anchors.items():
            group = groups.get(("cpu", anchor))
            if group is None or group.count or self._graph.parents[position] in self._node_anchors:
                continue
            obj = holding_object(self._graph, self._namer, self._holders, position, modules)
            held_by.setdefault(id(obj), (obj, {}))[1][group.key] = []
        for obj, by_group in held_by.values():
            witnesses = {
                key: identities.witnesses([self._graph.objects[held.position] for held in all_held])
                for key, all_held in by_group.items()
            }
            token = identities.token(obj, frozenset().union(*witnesses.values()))
            for key, all_held in by_group.items():
                groups[key].holders[token] = sum(held.facts.nbytes for held in all_held)
                groups[key].witnesses |= witnesses[key]
        for key, position in last_of.items():
            outermost = self._holders.outermost_of(position)
            if outermost is not None:
                groups[key].within = identities.lasting(self._graph.objects[outermost])

    def details(
        self,
        wanted: list[GroupKey],
        site_of: SiteOf,
        prefer: dict[GroupKey, HolderPath] | None = None,
        named: LineNamer | None = None,
        alone: Container[GroupKey] | None = None,
    ) -> dict[GroupKey, GroupDetail]:
        """Look closer at some groups: retained bytes, other holders, allocation sites, bounds.

        Args:
            wanted: (device, anchor) of each group.
            site_of: returns where a tensor was allocated; called for some of a group's storages, newest and
                oldest first.
            prefer: the whole path, by group, whose storages come first.
            named: names a line of the source; without it the lines that store are not searched.
            alone: groups for which to compute what their holders alone retain, and what else holds them; None
                for all. That takes longer than the rest of a census.
        """
        details = GroupDetails(
            self._graph, self._namer, self._held, self._holders, self._node_anchors, site_of, named
        )
        return details.of(wanted, prefer or {}, alone)
