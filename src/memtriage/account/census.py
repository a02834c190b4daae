"""The census: every storage that is alive, what keeps it alive, and what it is.

`Look` walks the heap and gives a `CensusView` that is valid only inside its `with` block. Everything that a
`CensusView` returns is numbers and names, so a census keeps nothing of the program alive.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from memtriage.account.dominators import dominated, immediate_dominators
from memtriage.account.holder_facts import (
    backward_ran,
    collects,
    differentiates,
    has_no_graph,
    holder_facts,
    in_a_hook,
    leads_to,
    packs_itself,
    program_files,
)
from memtriage.account.native_sizes import NativeSizer
from memtriage.account.owners import RANK, declared_owners, module_of_nodes, owner_of
from memtriage.account.paths import PathNamer
from memtriage.catalogue.catalogue import known_holders, owner_with
from memtriage.model.census import Census, GroupDetail, GroupKey, HolderGroup, Owner, StorageRecord
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words, is_native
from memtriage.observe.autograd import created
from memtriage.observe.classes import name_of
from memtriage.observe.containers import bound_of, known_bounds
from memtriage.observe.heap import HeapWalk
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.identity import Identities, module_namespaces
from memtriage.observe.kinds import NODE, TENSOR, FrameLocals
from memtriage.observe.stores import Store, forget_sources, pack_hook, storing_line
from memtriage.observe.tensors import StorageFacts, end_bytes, is_pinned, is_shared, plain, storage_facts
from memtriage.process.stdlib import gc, time


@dataclass(frozen=True, slots=True)
class LookPolicy:
    """How much of what is alive a census looks at closely.

    Attributes:
        head: bytes read at the ends of a storage, by which a longer copy of an earlier tensor is recognized.
        heads: storages of a group up to which their ends are read: the keys and values of 32 layers.
        page: storages from this size on are looked at so: shorter ones are counters, and neither pinned nor
            shared memory comes in less than a page.
        sites: storages of a group that are asked for their allocation site: the line that most of them give
            does not change with more.
        variables: paths whose storing line is read, in search of the variable that carries a graph on.
        at_once: objects whose references are listed in one call: a list of some hundred, which stays cached.
    """

    head: int = 64
    heads: int = 64
    page: int = 4096
    sites: int = 48
    variables: int = 64
    at_once: int = 128


POLICY = LookPolicy()

LineNamer = Callable[[Sequence[tuple[str, int]]], str | None]
"""Names a stack of one line, (file, line), as `file.py:line in function`."""
SiteOf = Callable[[Any], str | None]
"""Says where an object was allocated (`file.py:line in function`), or None."""


@dataclass(slots=True)
class _HeldStorage:
    facts: StorageFacts
    position: int
    owner: Owner
    known: str | None = None


@dataclass(slots=True)
class _Dominance:
    """Immediate dominator (-1: none) and referrers of each object, by position.

    Attributes:
        elsewhere: objects that something refers to that was not walked.
    """

    dominator: list[int]
    referrers: list[list[int]]
    elsewhere: frozenset[int]


class Look:
    """`with Look() as view:` takes a census; the view is valid inside the block only.

    Args:
        frames: frames that ended, whose variables an exception's traceback keeps alive.
        identities: where groups are to say which objects hold them, so that later censuses can be compared.
        also: as `HeapWalk` has it, to leave out most of the libraries.
    """

    def __init__(
        self,
        frames: Sequence[FrameType] = (),
        identities: Identities | None = None,
        also: Callable[[Iterable[Any]], Sequence[Any]] | None = None,
    ) -> None:
        self._frames = frames
        self._identities = identities
        self._also = also

    def __enter__(self) -> CensusView:
        started = time.perf_counter()
        self._walk = HeapWalk(self._frames, also=self._also)
        graph = self._walk.__enter__()
        try:
            self._view = CensusView(graph, started, self._identities)
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

    def __init__(self, graph: HeapGraph, started: float, identities: Identities | None = None) -> None:
        self._graph = graph
        self._identities = identities
        self._namer = PathNamer(graph)
        self._started = started
        self._holders: dict[int, tuple[int, int]] = {}
        self._held = self._storages()
        self._census: Census | None = None
        self._node_anchors: dict[int, HolderPath] = {}
        self._bounds: dict[int, int] = {}
        self._in_small_groups: list[tuple[GroupKey, _HeldStorage]] | None = None

    def close(self) -> None:
        self._held.clear()
        self._node_anchors.clear()
        self._in_small_groups = None
        del self._graph, self._namer

    def census(self) -> Census:
        """Return records and groups of all storages."""
        if self._census is None:
            records = [self._record(held) for held in self._held.values()]
            self._node_anchors = self._anchors_of_nodes()
            groups = self._groups()
            self._census = Census(
                storages=records,
                groups=sorted(groups, key=lambda group: -group.nbytes),
                nodes_by_anchor=Counter(self._node_anchors.values()),
                garbage=len(self._graph.objects) - self._graph.first_garbage,
                objects=len(self._graph.objects),
                nodes=len(self._graph.nodes),
                seconds=time.perf_counter() - self._started,
                parameters=sum(self._elements(held) for held in self._held.values()),
                partial=self._graph.cut,
            )
        return self._census

    @property
    def graph(self) -> HeapGraph:
        """The walked heap, for other questions about the same instant. Keep no reference into it."""
        return self._graph

    def path(self, position: int) -> HolderPath:
        """Return the holder path of any object of the graph."""
        return self._namer.path(position).whole

    def stored_at(self, position: int, named: LineNamer, allocated_at: str | None = None) -> str | None:
        """Return the program's line that stores into a container; None where that is not certain.

        Args:
            position: of a container in the graph.
            named: names a line of the source.
            allocated_at: where its entries were made, if that is known.
        """
        path = (*self._namer.path(position).anchor, ANY_ITEM)
        store = storing_line(path, holder_facts(self._graph, position).files, allocated_at)
        return None if store is None else named([(store.filename, store.line)])

    def classes(self, position: int) -> list[str]:
        """Return classes of an object and of those on the way to it, as `GroupDetail.classes` has them."""
        return holder_facts(self._graph, position).classes

    def heads(self, *, last: bool = False) -> dict[GroupKey, bytes]:
        """Return the first bytes of the storages of each small group of variables, joined, by group.

        They distinguish a tensor that is replaced by a longer one from one with other content. Reading device
        memory waits for its stream; a census is no fast path.

        Args:
            last: the last bytes instead.
        """
        if self._in_small_groups is None:
            self._in_small_groups = self._variables_in_small_groups()
        heads_of: dict[GroupKey, list[bytes]] = {}
        for key, held in self._in_small_groups:
            head = end_bytes(self._graph.objects[held.position], held.facts, POLICY.head, last=last)
            if head is not None:
                heads_of.setdefault(key, []).append(head)
        return {key: b"".join(sorted(heads)) for key, heads in heads_of.items()}

    def _variables_in_small_groups(self) -> list[tuple[GroupKey, _HeldStorage]]:
        wanted = {g.key for g in self.census().groups if g.count <= POLICY.heads and not g.attached}
        large = [
            held
            for held in self._held.values()
            if held.owner in ("variable", "buffer") and held.facts.nbytes >= POLICY.page
        ]
        return [(key, held) for held in large if (key := self._key(held)) in wanted]

    def _key(self, held: _HeldStorage) -> GroupKey:
        return held.facts.device, self._namer.path(held.position).anchor

    def _storages(self) -> dict[tuple[str, int], _HeldStorage]:
        graph, namer = self._graph, self._namer
        declared = declared_owners(graph)
        held: dict[tuple[str, int], _HeldStorage] = {}
        for position in graph.tensors:
            facts = storage_facts(graph.objects[position])
            if facts is None:
                continue
            owner = owner_of(graph, namer, declared, position)
            key = (facts.device, facts.address)
            known = held.get(key)
            if known is None:
                held[key] = _HeldStorage(facts, position, owner)
                continue
            if RANK[owner] < RANK[known.owner]:
                known.owner = owner
            if is_native(namer.path(known.position).anchor):
                known.position = position  # the base of a view, say: what holds the view says more
        for key, holder in known_holders(graph).items():
            if key in held:
                held[key].known = holder.name
                held[key].owner = owner_with(holder, held[key].owner)
        return held

    def _record(self, held: _HeldStorage) -> StorageRecord:
        tensor = self._graph.objects[held.position]
        whole_page = held.facts.device == "cpu" and held.facts.nbytes >= POLICY.page
        return StorageRecord(
            device=held.facts.device,
            address=held.facts.address,
            nbytes=held.facts.nbytes,
            owner=held.owner,
            path=self._namer.path(held.position).whole,
            pinned=whole_page and is_pinned(tensor),
            shared=whole_page and is_shared(tensor),
            known=held.known,
        )

    def _elements(self, held: _HeldStorage) -> int:
        """Return the number of elements of a parameter's storage; 0 for any other."""
        if held.owner != "parameter":
            return 0
        return held.facts.nbytes // int(plain(self._graph.objects[held.position]).dtype.itemsize)

    def _groups(self) -> list[HolderGroup]:
        groups: dict[GroupKey, HolderGroup] = {}
        for held in self._held.values():
            path = self._namer.path(held.position)
            anchor, whole, nbytes = path.anchor, path.whole, held.facts.nbytes
            group = groups.get((held.facts.device, anchor))
            if group is None:
                group = HolderGroup(
                    device=held.facts.device, anchor=anchor, path=whole, count=0, nbytes=0,
                    tails={}, owners={}, attached=False,
                )  # fmt: skip
                groups[held.facts.device, anchor] = group
            group.count += 1
            group.nbytes += nbytes
            group.tails[whole] = group.tails.get(whole, 0) + nbytes
            group.owners[held.owner] = group.owners.get(held.owner, 0) + nbytes
            group.attached = group.attached or path.attached
            if held.known is not None:
                group.known[held.known] = group.known.get(held.known, 0) + nbytes
        self._count_kept(groups)
        elements: dict[GroupKey, set[int]] = {}
        for held in self._held.values():
            elements.setdefault(self._key(held), set()).add(self._holder_of(held.position)[1])
        for key, entries in elements.items():
            groups[key].entries = len(entries)
        if self._identities is not None:
            self._note_holders(groups, self._identities)
        for group in groups.values():
            group.path = max(group.tails, key=lambda path: group.tails[path])
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
            kept[self._namer.path(held.position).anchor] += sizer.storage
        at: dict[HolderPath, HolderGroup] = {}
        for group in groups.values():
            other = at.get(group.anchor)
            if other is None or (group.device == "cpu", group.nbytes) > (other.device == "cpu", other.nbytes):
                at[group.anchor] = group
        for anchor in nodes:
            if anchor not in at:
                at[anchor] = self._without_storage(groups, anchor)
        for anchor, group in at.items():
            group.kept, group.objects, group.made = kept[anchor], nodes[anchor], made.get(anchor)

    def _without_storage(self, groups: dict[GroupKey, HolderGroup], anchor: HolderPath) -> HolderGroup:
        """Make a group for an anchor that holds nodes and no storage."""
        path = (*anchor, PathSegment(SegmentKind.GRAD_FN))
        group = HolderGroup(
            device="cpu", anchor=anchor, path=path, count=0, nbytes=0, tails={path: 0},
            owners={"saved for backward": 0}, attached=True,
        )  # fmt: skip
        groups[group.key] = group
        return group

    def _note_holders(self, groups: dict[GroupKey, HolderGroup], identities: Identities) -> None:
        identities.begin()
        modules = module_namespaces()
        held_by: dict[int, tuple[Any, dict[GroupKey, list[_HeldStorage]]]] = {}
        for held in self._held.values():
            obj = self._holding_object(held.position, modules)
            by_group = held_by.setdefault(id(obj), (obj, {}))[1]
            by_group.setdefault(self._key(held), []).append(held)
        for position, anchor in self._node_anchors.items():
            group = groups.get(("cpu", anchor))
            if group is None or group.count or self._graph.parents[position] in self._node_anchors:
                continue
            obj = self._holding_object(position, modules)
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

    def _holding_object(self, position: int, modules: dict[int, ModuleType]) -> Any:
        """Return the container that holds a storage's chain; for a namespace its instance or module."""
        graph = self._graph
        at, _ = self._holder_of(position)
        while self._namer.path(at).namespace:
            above = graph.parents[at]
            if above < 0:
                return modules.get(id(graph.objects[at]), graph.objects[at])
            at = above
        return graph.objects[at]

    def _anchors_of_nodes(self) -> dict[int, HolderPath]:
        """Return each node's anchor. A node below another has the same one, so few paths are computed."""
        graph = self._graph
        anchors: dict[int, HolderPath] = {}
        for position in graph.nodes:
            above = anchors.get(graph.parents[position])
            anchors[position] = self._namer.path(position).anchor if above is None else above
        return anchors

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
            site_of: says where a tensor was allocated; asked for some of a group's storages, newest and
                oldest first.
            prefer: for a group the whole path whose storages are asked first.
            named: names a line of the source; without it the lines that store are not searched.
            alone: groups for which to compute what their holders alone retain, and what else holds them; None
                for all. That takes longer than the rest of a census.
        """
        members: dict[GroupKey, list[_HeldStorage]] = {key: [] for key in wanted}
        for held in self._held.values():
            key = self._key(held)
            if key in members:
                members[key].append(held)
        if not any(members.values()):
            return {key: GroupDetail() for key in members}
        # Of a partial census sizes and sites are known; what else holds a group is not.
        asked = [key for key, group in members.items() if group and (alone is None or key in alone)]
        retention = self._retention() if asked and self._graph.cut is None else None
        modules = module_of_nodes(self._graph, self._namer)
        self._bounds = known_bounds(self._graph.objects[at] for at in self._graph.optimizers)
        details = {}
        for key, group in members.items():
            details[key] = self._detail(
                group, (prefer or {}).get(key), site_of, retention if key in asked else None
            )
            details[key].saved_by = self._saved_by(group, modules)
            if group:
                self._add_holder_facts(details[key], key[1], group, named)
        forget_sources()
        return details

    def _saved_by(self, group: list[_HeldStorage], modules: dict[int, HolderPath]) -> str | None:
        """Name the node that saved the largest storage of a group: `AddmmBackward0 in model.fc`."""
        graph = self._graph
        saved = [held for held in group if held.owner in ("saved for backward", "autograd context")]
        if not saved:
            return None
        at = max(saved, key=lambda held: held.facts.nbytes).position
        while at >= 0 and graph.kind(at) != NODE:
            at = graph.parents[at]
        if at < 0:
            return None
        node = graph.objects[at]
        module = modules.get(id(node))
        return name_of(type(node)) + (f" in {in_words(module)}" if module else "")

    def _add_holder_facts(
        self, detail: GroupDetail, anchor: HolderPath, group: list[_HeldStorage], named: LineNamer | None
    ) -> None:
        """Add facts from the holder's classes, from its graph and from the source."""
        graph = self._graph
        sample = max(group, key=lambda held: held.facts.nbytes)
        holder, element = self._holder_of(sample.position)
        facts = holder_facts(graph, holder)
        detail.classes = facts.classes
        if ANY_ITEM in anchor:
            detail.collected = collects(
                graph, [held.position for held in _from_the_ends(group)[: POLICY.sites]]
            )
        nodes = [at for at, name in self._node_anchors.items() if name == anchor]
        detail.differentiated = differentiates(graph, nodes)
        detail.backward_ran = backward_ran(graph, nodes)
        tensor = graph.objects[element]
        if graph.kind(element) == TENSOR:
            tensor_facts = storage_facts(tensor)
            own = (
                None if tensor_facts is None else self._held.get((tensor_facts.device, tensor_facts.address))
            )
            detail.anchor_owner = None if own is None else own.owner
        native = anchor[0].kind in (SegmentKind.NATIVE, SegmentKind.UNSEEN)
        detail.packs_itself = native and packs_itself(
            graph, [held.position for held in group[: POLICY.sites]]
        )
        if named is None:
            return
        if native:
            store = pack_hook(program_files(graph)) if detail.packs_itself else None
        else:
            store = storing_line(anchor, facts.files, detail.allocated_at)
        if nodes and ANY_ITEM not in anchor and not (store is not None and store.itself):
            detail.carrier, carrying = self._carrier(anchor, nodes)
            store = carrying or store
        if store is not None:
            detail.stored_at = named([(store.filename, store.line)])
            detail.stored_value, detail.carried = store.value, store.itself
            detail.stored_by_hook = in_a_hook(graph, store.filename, store.line)

    def _carrier(self, anchor: HolderPath, nodes: Sequence[int]) -> tuple[HolderPath | None, Store | None]:
        """Find the variable that carries a graph on, where the shortest path to it is from another one.

        An output and the next state come from the same nodes, and the output is closer to most of them.

        Returns:
            Its path and the line that stores it; None where there is none.
        """
        graph, namer = self._graph, self._namer
        asked: set[HolderPath] = {anchor}
        for position in graph.tensors:
            path = namer.path(position)
            if path.attached or path.anchor in asked or has_no_graph(graph.objects[position]):
                continue
            if len(asked) > POLICY.variables:
                break
            asked.add(path.anchor)
            holder, _ = self._holder_of(position)
            store = storing_line(path.anchor, holder_facts(graph, holder).files)
            if store is not None and store.itself and leads_to(graph, position, nodes):
                return path.anchor, store
        return None, None

    def _detail(
        self,
        group: list[_HeldStorage],
        preferred: HolderPath | None,
        site_of: SiteOf,
        retention: _Dominance | None,
    ) -> GroupDetail:
        if not group:
            return GroupDetail()
        namer, graph = self._namer, self._graph
        sample = max(group, key=lambda held: held.facts.nbytes)
        holder, element = self._holder_of(sample.position)
        detail = GroupDetail(holder_kind=_kind_of_holder(graph.objects[holder]))
        detail.bound, detail.entries = bound_of(graph.objects[self._container_of(element)], self._bounds)
        detail.shared = sample.facts.device == "cpu" and is_shared(graph.objects[sample.position])
        elements = {self._holder_of(held.position)[1] for held in group}
        detail.elsewhere = retention is not None and not retention.elsewhere.isdisjoint(elements)
        if retention is not None and not detail.elsewhere:
            detail.retained = self._retained(group, retention)
            detail.retained_of = sum(held.facts.nbytes for held in group)
            others: dict[HolderPath, None] = {}
            for held in group[:64]:
                _, own_element = self._holder_of(held.position)
                others.update(dict.fromkeys(self._others(own_element, retention)))
            detail.also_held_by = list(others)[:5]
        preferring = [held for held in group if namer.path(held.position).whole == preferred]
        for held in (_from_the_ends(preferring) + _from_the_ends(group))[: POLICY.sites]:
            detail.allocated_at = self._site(held.position, site_of)
            if detail.allocated_at is not None:
                break
        return detail

    def _others(self, element: int, retention: _Dominance) -> list[HolderPath]:
        """Return paths by which an element is held besides its holder; those below it do not count."""
        graph, namer = self._graph, self._namer
        inside = namer.path(element).anchor
        paths = [
            namer.edge(other, element).whole
            for other in retention.referrers[element]
            if other != graph.parents[element] and graph.kind(other) != NODE
        ]
        return [path for path in paths if path[: len(inside)] != inside]

    def _retained(self, group: list[_HeldStorage], retention: _Dominance) -> int:
        """Return the bytes of a group that its holders alone keep alive, never more than the group has.

        Counted by element: a variable's holder is the namespace of a whole module, of which it is one name.
        """
        alone = []
        for holder, element in {self._holder_of(held.position) for held in group}:
            if element != holder and retention.dominator[element] != holder:
                continue
            if self._namer.path(holder).namespace and self._others(element, retention):
                continue  # another name of the same namespace keeps it
            alone.append(element)
        nbytes = {held.position: held.facts.nbytes for held in group}
        return sum(nbytes[position] for position in dominated(retention.dominator, alone, nbytes))

    def _site(self, position: int, site_of: SiteOf) -> str | None:
        """Return where a storage was allocated: by its tensor, else by the node that keeps it."""
        graph = self._graph
        site = site_of(graph.objects[position])
        at = graph.parents[position]
        while site is None and at >= 0 and graph.kind(at) in (NODE, TENSOR):
            site = site_of(graph.objects[at])
            at = graph.parents[at]
        return site

    def _holder_of(self, position: int) -> tuple[int, int]:
        """Return the Python object that holds the chain, and the element of it that leads to `position`.

        The element is what the anchor path names; its parent is the container to clear or to detach in.
        """
        graph, namer, known = self._graph, self._namer, self._holders
        outside = namer.path(position).outside
        climbed = []
        at = position
        while True:
            climbed.append(at)
            holder = known.get(at)
            if holder is not None and namer.path(at).outside == outside:
                break
            above = graph.parents[at]
            if above < 0:
                holder = at, at
                break
            path = namer.path(at)
            in_python = not path.in_graph and graph.kind(above) not in (NODE, TENSOR)
            if in_python and len(path.hops) <= outside:
                holder = above, at
                break
            at = above
        for at in climbed:
            if namer.path(at).outside == outside:
                known[at] = holder
        return holder

    def _container_of(self, element: int) -> int:
        """Return the container whose entries vary in number: above an entry's own fields; else the holder."""
        graph, namer = self._graph, self._namer
        at, holder = element, graph.parents[element]
        while at >= 0:
            if namer.path(at).whole[-1:] == (ANY_ITEM,):
                return graph.parents[at]
            at = graph.parents[at]
        return max(0, holder)

    def _retention(self) -> _Dominance:
        """Compute the dominators among the objects that can reach a storage."""
        graph = self._graph
        size = len(graph.objects)
        index, referents = graph.index, graph.referents
        referrers: list[list[int]] = [[] for _ in range(size)]
        for position in range(size):
            for child in referents(position):
                at = index.get(id(child), -1)
                if at >= 0 and at != position:
                    before = referrers[at]
                    if not before or before[-1] != position:
                        before.append(position)
        for position, above in enumerate(graph.parents):
            if above >= 0 and above not in referrers[position]:
                insort(referrers[position], above)  # temporaries of the walk: saved tensors read twice
        relevant = bytearray(size)
        queue = [held.position for held in self._held.values()]
        for position in queue:
            relevant[position] = 1
        for position in queue:
            for referrer in referrers[position]:
                if not relevant[referrer]:
                    relevant[referrer] = 1
                    queue.append(referrer)
        queue.sort()
        place = {position: number for number, position in enumerate(queue)}
        slim: list[list[int]] = [[] for _ in queue]
        for number, position in enumerate(queue):
            for referrer in referrers[position]:
                slim[place[referrer]].append(number)
        elsewhere = self._referred_to_elsewhere(queue)
        roots = [
            number
            for number, position in enumerate(queue)
            if graph.parents[position] < 0 or position in elsewhere
        ]
        slim.append(roots)
        dominator = immediate_dominators(slim, len(slim) - 1)
        retention = _Dominance([-1] * size, referrers, elsewhere)
        for number, position in enumerate(queue):
            if 0 <= dominator[number] < len(queue):
                retention.dominator[position] = queue[dominator[number]]
        return retention

    def _referred_to_elsewhere(self, positions: Sequence[int]) -> frozenset[int]:
        """Return which of these objects something refers to that was not walked."""
        graph = self._graph
        if graph.all_libraries:
            return frozenset()
        asked = {id(graph.objects[position]) for position in positions}
        others = graph.not_walked()
        met: set[int] = set()
        for start in range(0, len(others), POLICY.at_once):
            met |= asked.intersection(map(id, gc.get_referents(*others[start : start + POLICY.at_once])))
        return frozenset(graph.index[key] for key in met)


def _from_the_ends(group: list[_HeldStorage]) -> list[_HeldStorage]:
    """Order storages so that the newest come soon, at whichever end of the walk they are."""
    inwards = sorted(group, key=lambda held: held.position)
    half = len(inwards) // 2
    mixed = [held for pair in zip(inwards, inwards[::-1], strict=True) for held in pair]
    return mixed[: 2 * half] + inwards[half : len(inwards) - half]


def _kind_of_holder(obj: Any) -> str:
    return "frame" if type(obj) is FrameLocals else name_of(type(obj))
