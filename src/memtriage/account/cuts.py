"""What a change of the program would release: references of a holder, cut one kind at a time.

Every remedy removes edges of the heap graph. `detach()` removes those from tensors to their `grad_fn`, a
bound those from a container to its entries, `clone()` those from views to storages that are larger. What is
released is what no root reaches without them, and no cycle keeps.

A kind of cut is a row of `_CUT_AT`: which hop of a holder path it removes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from memtriage.account.held import HeldStorage, HeldStorages
from memtriage.account.holder_index import HolderIndex
from memtriage.account.native_sizes import SIZES, NativeSizer
from memtriage.account.paths import PathNamer
from memtriage.account.retained_sizes import RetainedSizes
from memtriage.model.census import CutKind, CutSeen, GroupKey
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    PathSegment,
    SegmentKind,
    is_hook_of_node,
    is_native,
    of_any_item,
)
from memtriage.observe.classes import name_of
from memtriage.observe.containers import atom_bytes, own_bytes
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import ARRAY, MODULE, NODE, TENSOR
from memtriage.observe.objects import array_bytes
from memtriage.observe.tensors import plain

_ENOUGH: Final = 0.9
"""With this part released, no other holder matters."""
_MOST: Final = 12
"""Different references of a cycle that are tried."""
_CUT_AT: Final[Mapping[SegmentKind, CutKind]] = {
    SegmentKind.GRADIENT: "grad",
    SegmentKind.TRACEBACK: "traceback",
    SegmentKind.CONTEXT: "context",
    SegmentKind.SAVED: "pack",
    SegmentKind.NODE_HOOKS: "remove",
    SegmentKind.GRAD_FN: "detach",
}
"""By the last segment of a path: how the reference that it stands for is removed."""
_CUT_IN_CYCLE: Final[Mapping[SegmentKind, CutKind]] = {**_CUT_AT, SegmentKind.GRADIENT: "create_graph"}
_OF_GRAPH: Final = frozenset((SegmentKind.LATER_NODE, SegmentKind.LEAF))
"""References within the autograd graph, which no change of a program removes alone."""

_TOGETHER: Final = frozenset(("detach", "bound"))
"""Kinds of cuts that several holders of the same objects need together."""
_OF_NODES: Final = frozenset(("saved for backward", "autograd context"))
"""Owners of what a node refers to."""

_ENTRIES: Final = 1_000
"""Newest entries of a container of ordinary data that are looked at."""
_BELOW: Final = 20_000
"""Objects below these: no further entry is looked at then."""

Edge = tuple[int, int]
Numbers = dict[int, frozenset[int]]
"""Edges that are removed, by where they begin."""


@dataclass(frozen=True, slots=True)
class _OwnBytes:
    """Memory of a group: its size, and the objects of which any keeps it."""

    nbytes: int
    kept_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataBelow:
    """What is below the newest entries of a container of ordinary data, but not below the very newest.

    Attributes:
        entries: how many were looked at.
        edges: from the container to these.
        objects: bytes of each object that only one entry leads to: what several share is no growth.
        atoms: bytes of entries that are texts or numbers, which no graph lists.
    """

    container: int
    entries: int
    edges: list[Edge]
    objects: dict[int, int]
    atoms: int

    @property
    def nbytes(self) -> int:
        return sum(self.objects.values()) + self.atoms


def cuts_of_data(
    graph: HeapGraph, namer: PathNamer, holders: HolderIndex, containers: Iterable[int]
) -> dict[int, list[CutSeen]]:
    """Return the cuts that apply to some containers of ordinary data, by their positions."""
    below = [_data_below(graph, at) for at in containers]
    retained = RetainedSizes(graph, {at for data in below for at in (data.container, *data.objects)})
    meter = CutMeter(graph, namer, {}, holders, {}, retained, {})
    found = {}
    for data in below:
        cuts = meter.of_data(data, [other for other in below if other is not data])
        entries = len(graph.objects[data.container]) / max(1, data.entries)
        found[data.container] = [cut.scaled(entries) for cut in cuts]
    return found


def _data_below(graph: HeapGraph, container: int) -> DataBelow:
    entries = graph.objects[container]
    in_use = int(len(entries) > 1)  # the newest may still be a variable of the step
    if issubclass(type(entries), dict):
        newest: Iterable[tuple[Any, ...]] = reversed(dict.items(entries))
    else:
        newest = zip(entries if issubclass(type(entries), set) else reversed(entries))
    elements, atoms = list[list[int]](), 0
    below: dict[int, list[int]] = {container: []}
    nbytes, entry_of = dict[int, int](), {container: -1}
    shared: dict[int, None] = {}
    for number, parts in enumerate(islice(newest, in_use, _ENTRIES)):
        if len(below) >= _BELOW:
            break
        found = [graph.index.get(id(part), -1) for part in parts]
        atoms += atom_bytes([part for part, at in zip(parts, found, strict=True) if at < 0])
        queue = [at for at in found if at >= 0]
        elements.append(list(queue))
        for at in queue:
            if entry_of.setdefault(at, number) != number:
                shared[at] = None
            elif at not in below and len(below) < _BELOW:
                own = own_bytes(graph, graph.objects[at])
                ids = () if own is None else map(id, graph.referents(at))
                below[at] = [graph.index[key] for key in ids if key in graph.index]
                nbytes[at] = own or 0
                queue += below[at]
    queue = list(shared)
    for at in queue:
        queue += [child for child in below.get(at, ()) if child not in shared]
        shared.update(dict.fromkeys(below.get(at, ())))
    objects = {at: nbytes[at] for at in nbytes.keys() - shared if nbytes[at]}
    edges = [(container, at) for element in elements for at in element]
    return DataBelow(container, len(elements), edges, objects, atoms)


class CutMeter:
    """Measures cuts on the graph of one census, which must outlive it."""

    def __init__(
        self,
        graph: HeapGraph,
        namer: PathNamer,
        held: HeldStorages,
        holders: HolderIndex,
        anchors: Mapping[int, HolderPath],
        retained: RetainedSizes,
        groups: Mapping[GroupKey, Sequence[HeldStorage]],
    ) -> None:
        self._graph = graph
        self._namer = namer
        self._holders = holders
        self._anchors = anchors
        self._retained = retained
        self._groups = groups
        self._cut_of: dict[CutKind, dict[GroupKey, tuple[HolderPath, list[Edge]]]] = {}
        self._sizer = NativeSizer(graph.reader)
        self._held_at = {at: held_storage for held_storage in held.values() for at in held_storage.tensors}
        # A cycle that nothing else leads to is entered at any of its objects: that is no root.
        tables = self._tables_of_hooks()
        self._successors = [*retained.successors]
        for node, table in tables:
            self._successors[node] = [*self._successors[node], table]
        self._node_of = {table: node for node, table in tables}
        self._roots = [
            at
            for at in retained.successors[-1]
            if retained.reaching[at] < graph.first_unrooted
            or not (retained.referrers[retained.reaching[at]] or at in self._node_of)
        ]

    def of(self, key: GroupKey) -> list[CutSeen]:
        """Return the cuts that apply to a group, in the order of the path; each with what it releases."""
        anchor, group = key[1], self._groups[key]
        nodes, elements = self._elements(key)
        parts = list(self._parts(key, group, nodes))
        if is_native(anchor) or anchor[0].kind is SegmentKind.GARBAGE_CYCLE:
            members = [*nodes, *(at for held in group for at in held.tensors)]
            candidates = self._in_cycles(members)
        else:
            candidates = self._on_the_way(elements, group)
        cuts = self._measured(candidates, parts)
        cuts = [self._with_others(cut, key, parts) if cut.cut in _TOGETHER else cut for cut in cuts]
        copied = self._clone(elements, parts)
        useful = [cut for cut in cuts if cut.releases or cut.cut != "break"]
        return useful if copied is None else [*useful, copied]

    def of_data(self, data: DataBelow, others: Iterable[DataBelow]) -> list[CutSeen]:
        """Return the cuts that apply to a container of ordinary data; `others` may have the same entries."""
        if 2 * len(self._retained.elsewhere & data.objects.keys()) > len(data.objects):
            return []  # libraries have them, too
        parts = [_OwnBytes(nbytes, (at,)) for at, nbytes in data.objects.items()]
        parts.append(_OwnBytes(data.atoms, ()))  # whatever removes the entries removes these
        edges, together = data.edges, list[HolderPath]()
        released = self._released(parts, edges)
        for other in others:
            more = self._released(parts, [*edges, *other.edges])
            if more > released + (1 - _ENOUGH) * data.nbytes:
                edges, released = [*edges, *other.edges], more
                together.append(self._entries_of(other.container))
        at = self._entries_of(data.container)
        kind = _cut_of(at, attached=False)
        cuts = self._measured(self._on_the_way([data.container], ()), parts)
        if kind is not None:
            kind_of_container = self._kind_of(data.container)
            cuts.append(
                CutSeen(
                    cut=kind,
                    at=at,
                    kind=kind_of_container,
                    together=together,
                    releases=released,
                    of=data.nbytes,
                )
            )
        copied = self._clone((at for at in data.objects if self._graph.kind(at) == ARRAY), parts)
        return cuts if copied is None else [*cuts, copied]

    def _entries_of(self, container: int) -> HolderPath:
        return (*self._namer.path(container).whole, ANY_ITEM)

    def _measured(
        self, candidates: Iterable[tuple[CutKind, HolderPath, list[Edge]]], parts: Sequence[_OwnBytes]
    ) -> list[CutSeen]:
        whole = sum(part.nbytes for part in parts)
        return [
            CutSeen(
                cut=cut,
                at=at,
                kind=self._kind_of(edges[0][0]),
                releases=self._released(parts, edges),
                of=whole,
            )
            for cut, at, edges in candidates
        ]

    def _tables_of_hooks(self) -> list[tuple[int, int]]:
        """Return the nodes that tables of hooks may belong to: those of the tensors that the hooks lead to.

        C++ has the tables, and tells nobody.
        """
        graph, reaching, place = self._graph, self._retained.reaching, self._retained.place
        tables = {at for at in self._retained.successors[-1] if reaching[at] >= graph.first_unrooted}
        found = []
        for node in graph.nodes:
            if node not in place or graph.kind(graph.parents[node]) == NODE:
                continue
            at = graph.parents[node]
            while at >= 0 and not is_hook_of_node(self._namer.path(at).whole):
                at = graph.parents[at]
            while at >= 0 and graph.parents[at] >= 0:
                at = graph.parents[at]
            if at >= 0 and place.get(at) in tables:
                found.append((place[node], place[at]))
        return found

    def _elements(self, key: GroupKey) -> tuple[list[int], set[int]]:
        """Return the nodes that hang on a group's anchor, and the objects that the anchor names."""
        nodes = [at for at, name in self._anchors.items() if name == key[1]]
        # Nodes below a node have its element, and what a node saves has that of the node.
        first = [at for at in nodes if self._graph.parents[at] not in self._anchors]
        storages = [held for held in self._groups[key] if held.owner not in _OF_NODES]
        views = [at for held in storages for at in held.tensors if self._namer.path(at).anchor == key[1]]
        return nodes, {self._holders.holder_of(at)[1] for at in (*first, *views)}

    def _with_others(self, cut: CutSeen, key: GroupKey, parts: Sequence[_OwnBytes]) -> CutSeen:
        """Return a cut together with the same one of other groups, if these keep the same objects."""
        if cut.releases >= _ENOUGH * cut.of:
            return cut
        if cut.cut not in self._cut_of:
            found = ((each, self._outermost(cut.cut, each)) for each in self._groups)
            self._cut_of[cut.cut] = {each: cut_of_it for each, cut_of_it in found if cut_of_it is not None}
        known = self._cut_of[cut.cut]
        others = {each: cut_of_it for each, cut_of_it in known.items() if each != key}
        if not others or key not in known or known[key][0] != cut.at:
            return cut
        own = known[key][1]

        def released(without: GroupKey | None = None) -> int:
            edges = (edge for each, (_, of_it) in others.items() if each != without for edge in of_it)
            return self._released(parts, [*own, *edges])

        most = released()
        if most <= cut.releases + (1 - _ENOUGH) * cut.of:
            return cut
        for each in list(others):  # three that keep one graph release it only together
            if released(without=each) >= _ENOUGH * most:
                del others[each]
        together = [at for at, _ in others.values()]
        return msgspec.structs.replace(cut, releases=released(), together=together)

    def _outermost(self, kind: CutKind, key: GroupKey) -> tuple[HolderPath, list[Edge]] | None:
        """Return where a kind of cut removes references of a group, nearest to the root; these, too."""
        if is_native(key[1]) or key[1][0].kind is SegmentKind.GARBAGE_CYCLE:
            return None
        on_the_way = self._on_the_way(self._elements(key)[1], self._groups[key])
        return next(((at, edges) for cut, at, edges in on_the_way if cut == kind), None)

    def _parts(
        self, key: GroupKey, group: Sequence[HeldStorage], nodes: Sequence[int]
    ) -> Iterator[_OwnBytes]:
        """Yield the storages of a group, and what its nodes and tensor objects take of the host's memory."""
        on_host = key[0] == "cpu"
        for held in group:
            yield _OwnBytes(held.facts.nbytes + (SIZES.storage if on_host else 0), tuple(held.tensors))
        if not on_host:
            return
        graph = self._graph
        for at in nodes:
            yield _OwnBytes(self._sizer.node(graph.objects[at]), (at,))
        for held in group:
            for at in held.tensors:
                saved = graph.parents[at] in self._anchors
                yield _OwnBytes(self._sizer.tensor(graph.objects[at], saved=saved), (at,))

    # --- which references ---------------------------------------------------------------------------------

    def _on_the_way(
        self, elements: Iterable[int], group: Sequence[HeldStorage]
    ) -> Iterator[tuple[CutKind, HolderPath, list[Edge]]]:
        """Yield the references from a root to a group that some change of the program removes."""
        graph, namer = self._graph, self._namer
        edges: dict[tuple[CutKind, HolderPath], list[Edge]] = {}
        paths: dict[tuple[CutKind, HolderPath], HolderPath] = {}
        seen: set[int] = set()
        others = (at for held in group if held.owner != "saved for backward" for at in held.tensors)
        starts = [*elements, *others]
        own, queue = set(starts), [*starts]
        for at in queue:
            if at in seen or (above := graph.parents[at]) < 0:
                continue
            seen.add(at)
            path = namer.path(at)
            cut = None if graph.kind(at) == NODE else _cut_of(path.whole, attached=path.attached)
            if path.whole == namer.path(above).whole:
                cut = None  # a module's table of parts adds nothing to the path of the module
            alike = list(self._alike(above, at)) if cut is not None or at in own else [(above, at)]
            if cut is not None:
                key = cut, of_any_item(path.whole)
                edges.setdefault(key, []).extend(alike)
                paths[key] = path.whole if paths.get(key, path.whole) == path.whole else key[1]
            queue += [parent for parent, _ in alike]
        for key, removed in sorted(edges.items(), key=lambda each: len(each[0][1])):
            yield key[0], paths[key], removed
        attached = [edge for at in elements for edge in self._to_its_graph(at)]
        if attached:
            yield "detach", namer.path(attached[0][0]).whole, attached

    def _alike(self, parent: int, child: int) -> Iterator[Edge]:
        """Yield a reference, and those to the same object that have the same path, but for places of items.

        Several modules have one hook; several layers cache one tensor.
        """
        path = of_any_item(self._namer.path(child).whole)
        yield parent, child
        for other in self._retained.referrers[child]:
            if other != parent and of_any_item(self._namer.edge(other, child).whole) == path:
                yield other, child

    def _kind_of(self, position: int) -> str:
        """Return the type of what has a reference: of a namespace, of its instance."""
        owner = self._graph.objects[self._holders.instance_of(position)]
        return "Module" if self._graph.kinds[type(owner)] == MODULE else name_of(type(owner))

    def _to_its_graph(self, at: int) -> Iterator[Edge]:
        """Yield the references of a tensor that its detached copy has not."""
        if self._graph.kind(at) != TENSOR:
            return
        for _, child in self._from(at):
            tensor = plain(self._graph.objects[at])
            is_base = tensor._is_view() and tensor._base is self._graph.objects[child]
            if self._graph.kind(child) == NODE or is_base:
                yield at, child

    def _in_cycles(self, members: Sequence[int]) -> Iterator[tuple[CutKind, HolderPath, list[Edge]]]:
        """Yield the references that close the cycles which a group is part of, or hangs on."""
        edges: dict[PathSegment, list[Edge]] = {}
        paths: dict[PathSegment, HolderPath] = {}
        reaching, place = self._retained.reaching, self._retained.place
        leading = self._above(place[at] for at in members if at in place)
        cyclic = self._cycles(self._below(self._roots, {}), {})
        number = {at: cycle for cycle, each in enumerate(cyclic) for at in each if leading[at]}
        for parent, cycle in number.items():
            for child in self._successors[parent]:
                if number.get(child) == cycle:
                    edge = reaching[parent], reaching[child]
                    path = self._namer.edge(*edge).whole
                    if path[-1].kind in _OF_GRAPH:
                        continue
                    edges.setdefault(path[-1], []).append(edge)
                    paths.setdefault(path[-1], path)
        for segment in sorted(edges, key=lambda each: -len(edges[each]))[:_MOST]:
            yield _CUT_IN_CYCLE.get(segment.kind, "break"), paths[segment], edges[segment]

    # --- what is released -----------------------------------------------------------------------------------

    def _released(self, parts: Sequence[_OwnBytes], edges: Iterable[Edge]) -> int:
        """Return the bytes that are released if some references are removed."""
        return sum(part.nbytes for part in self._gone(parts, edges))

    def _gone(self, parts: Sequence[_OwnBytes], edges: Iterable[Edge]) -> Iterator[_OwnBytes]:
        kept, place = self._kept(self._numbered(edges)), self._retained.place
        for part in parts:
            if not any(at not in place or kept[place[at]] for at in part.kept_by):
                yield part

    def _numbered(self, edges: Iterable[Edge]) -> Numbers:
        place = self._retained.place
        removed: dict[int, set[int]] = {}
        for parent, child in edges:
            if parent in place and child in place:
                removed.setdefault(place[parent], set()).add(place[child])
        return {parent: frozenset(children) for parent, children in removed.items()}

    def _kept(self, removed: Numbers) -> bytearray:
        """Return which objects roots still reach, or a cycle that no collection frees."""
        kept = self._below(self._roots, removed)
        cyclic = [at for each in self._cycles(kept, removed) for at in each]
        if cyclic:
            for number, is_kept in enumerate(self._below(cyclic, removed)):
                kept[number] |= is_kept
        return kept

    def _above(self, start: Iterable[int]) -> bytearray:
        """Return which objects lead to some others, these included."""
        reaching, place = self._retained.reaching, self._retained.place
        leading = bytearray(len(reaching))
        queue = list(start)
        for at in queue:
            leading[at] = 1
        for at in queue:
            before = [place[referrer] for referrer in self._retained.referrers[reaching[at]]]
            for referrer in (*before, self._node_of.get(at, at)):
                if not leading[referrer]:
                    leading[referrer] = 1
                    queue.append(referrer)
        return leading

    def _below(self, start: Iterable[int], removed: Numbers) -> bytearray:
        successors = self._successors
        reached = bytearray(len(successors))
        queue = list(start)
        for at in queue:
            reached[at] = 1
        for at in queue:
            children: Iterable[int] = successors[at]
            if at in removed:
                children = [child for child in children if child not in removed[at]]
            for child in children:
                if not reached[child]:
                    reached[child] = 1
                    queue.append(child)
        return reached

    def _cycles(self, kept: bytearray, removed: Numbers) -> list[list[int]]:
        """Return cycles of objects that are not kept, which no collection of the program frees.

        Those through autograd nodes: C++ owns these. With the collector off, all.
        """
        graph, reaching = self._graph, self._retained.reaching
        left = self._referred(kept, removed)
        cycles = strongly_connected(self._successors, left, removed)
        return [
            each
            for each in cycles
            if not graph.collects or any(graph.kind(reaching[at]) == NODE for at in each)
        ]

    def _referred(self, kept: bytearray, removed: Numbers) -> list[int]:
        """Return the objects that are not kept, without those that nothing refers to, over and over.

        These are cycles, and what cycles lead to: few, and often none.
        """
        successors = self._successors
        left = [at for at in range(len(self._retained.reaching)) if not kept[at]]
        counts = [0] * len(successors)
        children: dict[int, list[int]] = {}
        for at in left:
            after = [child for child in successors[at] if not kept[child]]
            if at in removed:
                after = [child for child in after if child not in removed[at]]
            children[at] = after
            for child in after:
                counts[child] += 1
        unreferred = [at for at in left if not counts[at]]
        for at in unreferred:
            for child in children[at]:
                counts[child] -= 1
                if not counts[child]:
                    unreferred.append(child)
        return [at for at in left if counts[at]]

    # --- a copy without the rest of the storage -------------------------------------------------------------

    def _clone(self, elements: Iterable[int], parts: Sequence[_OwnBytes]) -> CutSeen | None:
        """Return what copies of views release, if these are smaller than the storages that they keep."""
        graph = self._graph
        edges, copies, without = list[Edge](), 0, set[int]()
        at_path: HolderPath | None = None
        for element in elements:
            view, own = self._view(element)
            if view is None:
                continue
            copies += own
            at_path = at_path or self._namer.path(view).whole
            without.add(view)
            edges += self._to_its_graph(view) if graph.kind(view) == TENSOR else self._from(view)
        if at_path is None:
            return None
        kept, place = self._kept(self._numbered(edges)), self._retained.place
        released = sum(
            part.nbytes
            for part in parts
            if not any((at not in place or kept[place[at]]) and at not in without for at in part.kept_by)
        )
        whole = sum(part.nbytes for part in parts)
        return CutSeen(cut="clone", at=at_path, releases=max(0, released - copies), of=whole)

    def _view(self, element: int) -> tuple[int | None, int]:
        """Return the tensor or array whose copy would be smaller than what it keeps, and the copy's bytes.

        These are of its elements, and on the host of its object, and of the storage that a tensor then has.
        """
        graph = self._graph
        at, outermost = element, None
        while at >= 0 and graph.kind(at) in (TENSOR, ARRAY):
            if graph.kind(at) == ARRAY:
                outermost = at
            at = graph.parents[at]
        held = self._held_at.get(element)
        if held is None and outermost is None:
            return None, 0
        obj = graph.objects[element]
        kept = array_bytes(obj) if held is None else held.facts.nbytes
        if outermost is not None:
            view, array = outermost, graph.objects[outermost]
            own, more = array_bytes(array), type(array).__basicsize__
        else:
            view, own, more = element, _own_bytes(obj), 0
            if held is not None and held.facts.device == "cpu":
                more = SIZES.tensor + SIZES.wrapper + SIZES.storage
                kept -= SIZES.storage  # a scalar's storage is no larger than a copy's
        return (view, own + more) if 2 * own <= kept else (None, 0)

    def _from(self, at: int) -> Iterator[Edge]:
        """Yield the references of an object to those that lead to storages."""
        place, successors = self._retained.place, self._successors
        for number in successors[place[at]] if at in place else ():
            yield at, self._retained.reaching[number]


def _own_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, which a copy has."""
    tensor = plain(tensor)
    return int(tensor.numel()) * int(tensor.element_size())


def _cut_of(path: HolderPath, *, attached: bool) -> CutKind | None:
    """Return how the last hop of a path is removed; None if by no small change."""
    last = path[-1]
    if attached:
        return "context" if last.kind is SegmentKind.CONTEXT and last.name else None
    if last.kind in (SegmentKind.ITEM, SegmentKind.ATTRIBUTE) and "*" in last.name:
        if any(segment.kind is SegmentKind.LRU_CACHE for segment in path):
            return "cache"
        return "remove" if len(path) > 1 and path[-2].kind is SegmentKind.HOOKS else "bound"
    if last.kind is SegmentKind.VARIABLE and len(path) > 2 and path[-2].kind is SegmentKind.GENERATOR:
        return "close"
    return _CUT_AT.get(last.kind)


def strongly_connected(
    successors: Sequence[Sequence[int]], among: Iterable[int], removed: Numbers
) -> list[list[int]]:
    """Return the cycles among some nodes of a graph: its strongly connected components of two or more nodes.

    Tarjan's algorithm, without recursion.
    """
    allowed = set(among)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[list[int]] = []
    for start in allowed:
        work: list[tuple[int, Iterator[int]]] = []
        entered = None if start in index else start
        while work or entered is not None:
            if entered is not None:
                index[entered] = low[entered] = len(index)
                stack.append(entered)
                on_stack.add(entered)
                without = removed.get(entered, frozenset())
                after = [at for at in successors[entered] if at in allowed and at not in without]
                work.append((entered, iter(after)))
            node, children = work[-1]
            child = next(children, None)
            entered = child if child is not None and child not in index else None
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    if len(component) > 1:
                        components.append(component)
            elif child in on_stack:
                low[node] = min(low[node], index[child])
    return components
