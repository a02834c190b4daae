"""The census: every storage that is alive, who holds it, what it is.

`Look` walks the heap and gives a `View` that lives only inside its `with` block; everything a `View`
returns is numbers and text, so nothing of the program stays alive through a census.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from memtriage.account.dominators import immediate_dominators, retained, top_down
from memtriage.account.known import known_holders, owner_with
from memtriage.account.owners import RANK, declared_owners, module_of_nodes, owner_of
from memtriage.account.paths import PathNamer
from memtriage.model.census import Census, GroupDetail, HolderGroup, Owner, StorageRecord
from memtriage.observe.classes import name_of
from memtriage.observe.heap import HeapGraph, Walk
from memtriage.observe.kinds import NODE, TENSOR, FrameLocals
from memtriage.observe.tensors import StorageFacts, first_bytes, is_pinned, is_shared, storage_facts

_HEAD = 64
_HEAD_FROM = 4096
_SITES_ASKED = 48

SiteOf = Callable[[Any], str | None]
"""Says where an object was allocated (`file.py:line in function`), or None."""


@dataclass(slots=True)
class _Held:
    facts: StorageFacts
    position: int
    owner: Owner
    known: str | None = None


@dataclass(slots=True)
class _Retention:
    """Of each object by position: bytes it retains, its immediate dominator (-1: none), who refers to it."""

    nbytes: list[int]
    dominator: list[int]
    referrers: list[list[int]]


class Look:
    """`with Look() as view:` takes a census; the view is valid inside the block only.

    Args:
        frames: frames that ended, whose variables an exception's traceback keeps alive.
    """

    def __init__(self, frames: Sequence[FrameType] = ()) -> None:
        self._frames = frames

    def __enter__(self) -> View:
        started = time.perf_counter()
        self._walk = Walk(self._frames)
        graph = self._walk.__enter__()
        try:
            self._view = View(graph, started)
        except BaseException:
            self._walk.__exit__()
            raise
        return self._view

    def __exit__(self, *exception: object) -> None:
        self._view.close()
        self._walk.__exit__()


def take_census() -> Census:
    """A census as plain data. See `Look` for one that can be asked for details."""
    with Look() as view:
        return view.census()


class View:
    """A census while the heap graph is still at hand."""

    def __init__(self, graph: HeapGraph, started: float) -> None:
        self._graph = graph
        self._namer = PathNamer(graph)
        self._started = started
        self._holders: dict[int, tuple[int, int]] = {}
        self._held = self._storages()
        self._census: Census | None = None

    def close(self) -> None:
        self._held.clear()
        del self._graph, self._namer

    def census(self) -> Census:
        """Records and groups of all storages."""
        if self._census is None:
            records = [self._record(held) for held in self._held.values()]
            groups = self._groups()
            self._census = Census(
                storages=records,
                groups=sorted(groups, key=lambda group: -group.nbytes),
                nodes_by_anchor=self._nodes_by_anchor(),
                garbage=len(self._graph.objects) - self._graph.first_garbage,
                objects=len(self._graph.objects),
                nodes=len(self._graph.nodes),
                seconds=time.perf_counter() - self._started,
                parameters=sum(self._elements(held) for held in self._held.values()),
            )
        return self._census

    @property
    def graph(self) -> HeapGraph:
        """The walked heap, for other questions about the same instant. Keep nothing of it."""
        return self._graph

    def path_text(self, position: int) -> str:
        """Holder path of any object of the graph."""
        return self._namer.path(position).text

    def heads(self) -> dict[tuple[str, str], bytes]:
        """First bytes of storages that are alone in their group, by (device, anchor).

        Reading device memory waits for its stream; a census is no fast path.
        """
        alone = {(g.device, g.anchor) for g in self.census().groups if g.count == 1 and not g.attached}
        found = {}
        for held in self._held.values():
            key = (held.facts.device, self._namer.path(held.position).anchor_text)
            if key in alone and held.owner == "variable" and held.facts.nbytes >= _HEAD_FROM:
                head = first_bytes(self._graph.objects[held.position], held.facts, _HEAD)
                if head is not None:
                    found[key] = head
        return found

    def _storages(self) -> dict[tuple[str, int], _Held]:
        graph, namer = self._graph, self._namer
        declared = declared_owners(graph)
        held: dict[tuple[str, int], _Held] = {}
        for position in graph.tensors:
            facts = storage_facts(graph.objects[position])
            if facts is None:
                continue
            owner = owner_of(graph, namer, declared, position)
            key = (facts.device, facts.address)
            known = held.get(key)
            if known is None:
                held[key] = _Held(facts, position, owner)
            elif RANK[owner] < RANK[known.owner]:
                known.owner = owner
        for key, holder in known_holders(graph).items():
            if key in held:
                held[key].known = holder.name
                held[key].owner = owner_with(holder, held[key].owner)
        return held

    def _record(self, held: _Held) -> StorageRecord:
        tensor = self._graph.objects[held.position]
        on_host = held.facts.device == "cpu"
        return StorageRecord(
            device=held.facts.device,
            address=held.facts.address,
            nbytes=held.facts.nbytes,
            owner=held.owner,
            holder=self._namer.path(held.position).text,
            pinned=on_host and held.facts.nbytes >= 4096 and is_pinned(tensor),
            shared=on_host and held.facts.nbytes >= 4096 and is_shared(tensor),
            known=held.known,
        )

    def _elements(self, held: _Held) -> int:
        """Elements of a parameter's storage; 0 of any other."""
        if held.owner != "parameter":
            return 0
        return held.facts.nbytes // int(self._graph.objects[held.position].dtype.itemsize)

    def _groups(self) -> list[HolderGroup]:
        groups: dict[tuple[str, str], HolderGroup] = {}
        for held in self._held.values():
            path = self._namer.path(held.position)
            anchor, text, nbytes = path.anchor_text, path.text, held.facts.nbytes
            group = groups.get((held.facts.device, anchor))
            if group is None:
                group = HolderGroup(
                    device=held.facts.device, anchor=anchor, holder=text, count=0, nbytes=0,
                    tails={}, owners={}, attached=False,
                )  # fmt: skip
                groups[held.facts.device, anchor] = group
            group.count += 1
            group.nbytes += nbytes
            group.tails[text] = group.tails.get(text, 0) + nbytes
            group.owners[held.owner] = group.owners.get(held.owner, 0) + nbytes
            group.attached = group.attached or path.anchor < len(path.segments)
            if held.known is not None:
                group.known[held.known] = group.known.get(held.known, 0) + nbytes
        for group in groups.values():
            group.holder = max(group.tails, key=lambda text: group.tails[text])
        return list(groups.values())

    def _nodes_by_anchor(self) -> dict[str, int]:
        """Nodes by anchor. A node below another has its anchor: no path is made for every one of them."""
        graph = self._graph
        anchors: dict[int, str] = {}
        for position in graph.nodes:
            above = anchors.get(graph.parents[position])
            anchors[position] = self._namer.path(position).anchor_text if above is None else above
        return Counter(anchors.values())

    def details(
        self, wanted: list[tuple[str, str]], site_of: SiteOf, prefer: dict[tuple[str, str], str] | None = None
    ) -> dict[tuple[str, str], GroupDetail]:
        """A closer look at some groups: retained bytes, other holders, allocation sites, bounds.

        Args:
            wanted: (device, anchor) of each group.
            site_of: says where a tensor was allocated; asked for some of a group's storages, newest and
                oldest first.
            prefer: for a group the whole path whose storages are to be asked for their site.
        """
        members: dict[tuple[str, str], list[_Held]] = {key: [] for key in wanted}
        for held in self._held.values():
            key = (held.facts.device, self._namer.path(held.position).anchor_text)
            if key in members:
                members[key].append(held)
        if not any(members.values()):
            return {key: GroupDetail() for key in members}
        retention = self._retention()
        modules = module_of_nodes(self._graph, self._namer)
        found = {}
        for key, group in members.items():
            found[key] = self._detail(group, (prefer or {}).get(key), site_of, retention)
            found[key].saved_by = self._saved_by(group, modules)
        return found

    def _saved_by(self, group: list[_Held], modules: dict[int, str]) -> str | None:
        """`AddmmBackward0 in model.fc`: the node that keeps the largest storage of a group for backward."""
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
        return name_of(type(node)) + (f" in {module}" if module else "")

    def _detail(
        self,
        group: list[_Held],
        preferred: str | None,
        site_of: SiteOf,
        retention: _Retention,
    ) -> GroupDetail:
        if not group:
            return GroupDetail()
        namer, graph = self._namer, self._graph
        sample = max(group, key=lambda held: held.facts.nbytes)
        holder, _ = self._holder_of(sample.position)
        obj = graph.objects[holder]
        detail = GroupDetail(retained=self._retained(group, retention), holder_kind=_kind_of_holder(obj))
        detail.bound, detail.entries = _capacity(obj)
        detail.shared = sample.facts.device == "cpu" and is_shared(graph.objects[sample.position])
        others: dict[str, None] = {}
        for held in group[:64]:
            _, own_element = self._holder_of(held.position)
            others.update(dict.fromkeys(self._others(own_element, retention)))
        detail.also_held_by = list(others)[:5]
        preferring = [held for held in group if namer.path(held.position).text == preferred]
        for held in (_from_the_ends(preferring) + _from_the_ends(group))[:_SITES_ASKED]:
            detail.allocated_at = self._site(held.position, site_of)
            if detail.allocated_at is not None:
                break
        return detail

    def _others(self, element: int, retention: _Retention) -> list[str]:
        """Paths by which an element is held besides its holder; what lies below it does not count."""
        graph, namer = self._graph, self._namer
        inside = namer.path(element).anchor_text
        texts = [
            namer.edge(other, element).text
            for other in retention.referrers[element]
            if other != graph.parents[element] and graph.kind(other) != NODE
        ]
        return [text for text in texts if not _is_below(text, inside)]

    def _retained(self, group: list[_Held], retention: _Retention) -> int:
        """Bytes that go when the group's holders let go: what others hold as well stays.

        Counted by element: a variable's holder is the namespace of a whole module, of which it is one name.
        """
        total = 0
        for holder, element in {self._holder_of(held.position) for held in group}:
            if element != holder and retention.dominator[element] != holder:
                continue
            if self._namer.path(holder).namespace and self._others(element, retention):
                continue  # another name of the same namespace keeps it
            total += retention.nbytes[element]
        return total

    def _site(self, position: int, site_of: SiteOf) -> str | None:
        """Where a storage was made: by its tensor, else by the node that keeps it."""
        graph = self._graph
        site = site_of(graph.objects[position])
        at = graph.parents[position]
        while site is None and at >= 0 and graph.kind(at) in (NODE, TENSOR):
            site = site_of(graph.objects[at])
            at = graph.parents[at]
        return site

    def _holder_of(self, position: int) -> tuple[int, int]:
        """(the Python object that holds the chain, the element of it that leads to `position`).

        The element is what the anchor path names; its parent is the container to empty or to detach in.
        """
        graph, namer, known = self._graph, self._namer, self._holders
        anchor = namer.path(position).anchor
        climbed = []
        at = position
        while True:
            climbed.append(at)
            found = known.get(at)
            if found is not None and namer.path(at).anchor == anchor:
                break
            above = graph.parents[at]
            if above < 0:
                found = at, at
                break
            path = namer.path(at)
            outside = not path.in_graph and graph.kind(above) not in (NODE, TENSOR)
            if outside and len(path.segments) <= anchor:
                found = above, at
                break
            at = above
        for at in climbed:
            if namer.path(at).anchor == anchor:
                known[at] = found
        return found

    def _retention(self) -> _Retention:
        """Dominators and retained bytes, over what can reach a storage."""
        graph = self._graph
        size = len(graph.objects)
        index = graph.index
        first_child, next_child = _children(graph.parents)
        successors: list[list[int]] = []
        for position in range(size):
            found = {index.get(id(child), -1) for child in graph.referents(position)}
            child = first_child[position]
            while child >= 0:  # temporaries of the walk: saved tensors read twice
                found.add(child)
                child = next_child[child]
            found.discard(-1)
            found.discard(position)
            successors.append(list(found))
        referrers: list[list[int]] = [[] for _ in range(size)]
        for position, after in enumerate(successors):
            for each in after:
                referrers[each].append(position)
        relevant = bytearray(size)
        queue = [held.position for held in self._held.values()]
        for position in queue:
            relevant[position] = 1
        for position in queue:
            for before in referrers[position]:
                if not relevant[before]:
                    relevant[before] = 1
                    queue.append(before)
        queue.sort()
        place = {position: number for number, position in enumerate(queue)}
        slim = [[place[after] for after in successors[position] if relevant[after]] for position in queue]
        roots = [number for number, position in enumerate(queue) if graph.parents[position] < 0]
        slim.append(roots)
        weights = [0] * len(slim)
        for held in self._held.values():
            weights[place[held.position]] += held.facts.nbytes
        dominator = immediate_dominators(slim, len(slim) - 1)
        total = retained(dominator, weights, top_down(dominator, len(slim) - 1))
        retention = _Retention([0] * size, [-1] * size, referrers)
        for number, position in enumerate(queue):
            retention.nbytes[position] = total[number]
            if 0 <= dominator[number] < len(queue):
                retention.dominator[position] = queue[dominator[number]]
        return retention


def _from_the_ends(group: list[_Held]) -> list[_Held]:
    """The newest come soon in this order: the collector walks lists backwards, other containers forwards."""
    inwards = sorted(group, key=lambda held: held.position)
    half = len(inwards) // 2
    mixed = [held for pair in zip(inwards, inwards[::-1], strict=True) for held in pair]
    return mixed[: 2 * half] + inwards[half : len(inwards) - half]


def _is_below(text: str, holder: str) -> bool:
    """Whether a holder path is that of a holder, or leads on from it (`losses` is not below `loss`)."""
    return text == holder or (text.startswith(holder) and text[len(holder)] in ".[ ")


def _kind_of_holder(obj: Any) -> str:
    return "frame" if type(obj) is FrameLocals else name_of(type(obj))


def _children(parents: Sequence[int]) -> tuple[array[int], array[int]]:
    """(first child of each position, next child of the same parent); -1 for none."""
    first, following = array("q", [-1]) * len(parents), array("q", [-1]) * len(parents)
    for position, above in enumerate(parents):
        if above >= 0:
            following[position], first[above] = first[above], position
    return first, following


def _capacity(obj: Any) -> tuple[int | None, int | None]:
    """(entries at which a container stops growing, entries now); None where there is no bound."""
    kind = type(obj)
    if kind is _LRU:
        state = obj.cache_info()
        return state.maxsize, state.currsize
    if issubclass(kind, deque):
        return _read_maxlen(obj), deque.__len__(obj)
    base = next((base for base in _SIZED if issubclass(kind, base)), None)
    return None, None if base is None else base.__len__(obj)  # not `len`, which a subclass may define


_LRU = type(lru_cache(lambda: None))
_SIZED: tuple[Any, ...] = (list, dict, set, tuple)
_read_maxlen = vars(deque)["maxlen"].__get__
