"""A closer look at groups of storages: what else holds them, where they were made, which line stores them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from memtriage.account.cuts import CutMeter
from memtriage.account.held import HeldStorage, HeldStorages
from memtriage.account.holder_facts import (
    backward_ran,
    collects,
    differentiates,
    has_no_graph,
    holder_facts,
    leads_to,
    packs_itself,
    program_files,
    store_of,
)
from memtriage.account.holder_index import HolderIndex
from memtriage.account.owners import module_of_nodes
from memtriage.account.paths import PathNamer
from memtriage.account.retained_sizes import RetainedSizes
from memtriage.model.census import GroupDetail, GroupKey
from memtriage.model.paths import ANY_ITEM, HolderPath, SegmentKind, in_words, is_hook_of_node
from memtriage.observe.classes import name_of
from memtriage.observe.containers import bound_of, known_bounds
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.host import mapped_ranges
from memtriage.observe.kinds import NODE, TENSOR, FrameLocals
from memtriage.observe.store_statements import Store
from memtriage.observe.stores import forget_sources, pack_hook, registering_line, storing_line
from memtriage.observe.tensors import is_shared

_SITES: Final = 48
"""Storages of a group whose allocation site is looked up. More would not change the most frequent line."""
_HOLDERS: Final = 64
"""Storages whose other holders are searched, and paths whose storing line is read for `_carrier`."""
_ALSO_HELD_BY: Final = 5
"""Other holders that are named."""

LineNamer = Callable[[Sequence[tuple[str, int]]], str | None]
"""Names a stack of one line, (file, line), as `file.py:line in function`."""
SiteOf = Callable[[Any], str | None]
"""Returns where an object was allocated (`file.py:line in function`), or None."""


@dataclass(slots=True)
class GroupDetails:
    """Details of groups of one census. The graph must outlive it.

    Args:
        anchors: of the graph's nodes, by position.
        site_of: returns where a tensor was allocated; called for some of a group's storages, newest and
            oldest first.
        named: names a line of the source; without it the lines that store are not searched.
    """

    graph: HeapGraph
    namer: PathNamer
    held: HeldStorages
    holders: HolderIndex
    anchors: Mapping[int, HolderPath]
    site_of: SiteOf
    named: LineNamer | None = None
    _bounds: dict[int, int] = field(default_factory=dict)
    _mapped: list[range] = field(default_factory=list)

    def of(
        self,
        wanted: Sequence[GroupKey],
        prefer: Mapping[GroupKey, HolderPath],
        alone: Container[GroupKey] | None,
    ) -> dict[GroupKey, GroupDetail]:
        """Return details of some groups, as `CensusView.details`."""
        members: dict[GroupKey, list[HeldStorage]] = {key: [] for key in wanted}
        for held in self.held.values():
            key = held.facts.device, self.namer.path(held.position).anchor
            if key in members:
                members[key].append(held)
        if not any(members.values()):
            return {key: GroupDetail() for key in members}
        # A partial census knows sizes and sites, but not what else holds a group.
        asked = [key for key, group in members.items() if group and (alone is None or key in alone)]
        retained = None
        if asked and self.graph.cut is None:
            retained = RetainedSizes(self.graph, (*self.graph.tensors, *self.graph.nodes))
        meter = None
        if retained is not None:
            meter = CutMeter(self.graph, self.namer, self.held, self.holders, self.anchors, retained, members)
        modules = module_of_nodes(self.graph, self.namer)
        self._bounds = known_bounds(self.graph.objects[at] for at in self.graph.optimizers)
        details = {}
        for key, group in members.items():
            details[key] = self._detail(group, prefer.get(key), retained if key in asked else None)
            details[key].saved_by = self._saved_by(group, modules)
            if meter is not None and key in asked and not details[key].elsewhere:
                details[key].cuts = meter.of(key)
            if group:
                self._add_holder_facts(details[key], key[1], group)
        forget_sources()
        return details

    def _saved_by(self, group: list[HeldStorage], modules: dict[int, HolderPath]) -> str | None:
        """Name the node that saved the largest storage of a group: `AddmmBackward0 in model.fc`."""
        graph = self.graph
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

    def _add_holder_facts(self, detail: GroupDetail, anchor: HolderPath, group: list[HeldStorage]) -> None:
        """Add facts from the holder's classes, from its graph and from the source."""
        graph = self.graph
        sample = max(group, key=lambda held: held.facts.nbytes)
        holder, _ = self.holders.holder_of(sample.position)
        facts = holder_facts(graph, holder)
        detail.classes, detail.in_optimizer = facts.classes, facts.in_optimizer
        if ANY_ITEM in anchor:
            detail.collected = collects(graph, [held.position for held in _from_the_ends(group)[:_SITES]])
        nodes = [at for at, name in self.anchors.items() if name == anchor]
        detail.differentiated = differentiates(graph, nodes)
        detail.backward_ran = backward_ran(graph, nodes)
        native = anchor[0].kind in (SegmentKind.NATIVE, SegmentKind.UNSEEN)
        detail.packs_itself = native and packs_itself(graph, [held.position for held in group[:_SITES]])
        if self.named is None:
            return
        if native:
            store = None
            if detail.packs_itself:
                store = pack_hook(program_files())
            elif is_hook_of_node(anchor):
                store = registering_line(anchor[2:], program_files())
        else:
            # No object of the program leads to a context variable.
            of_context = anchor[0].kind is SegmentKind.CONTEXT_VARIABLE
            files = program_files() if of_context else facts.files
            store = store_of(anchor, files, detail.allocated_at)
        if nodes and ANY_ITEM not in anchor and not (store is not None and store.itself):
            detail.carrier, carrying = self._carrier(anchor, nodes)
            store = carrying or store
        if store is not None:
            detail.stored_at = self.named([(store.filename, store.line)])
            detail.stored_value, detail.carried = store.value, store.itself
            detail.stored_depth = store.depth

    def _carrier(self, anchor: HolderPath, nodes: Sequence[int]) -> tuple[HolderPath | None, Store | None]:
        """Find the variable that carries a graph from step to step, if the shortest path begins at another.

        An output and the next state come from the same nodes, and the output is closer to most of them.

        Returns:
            Its path and the line that stores it; None if there is none.
        """
        graph, namer = self.graph, self.namer
        asked: set[HolderPath] = {anchor}
        for position in graph.tensors:
            path = namer.path(position)
            if path.attached or path.anchor in asked or has_no_graph(graph.objects[position]):
                continue
            if len(asked) > _HOLDERS:
                break
            asked.add(path.anchor)
            holder, _ = self.holders.holder_of(position)
            store = storing_line(path.anchor, holder_facts(graph, holder).files)
            if store is not None and store.itself and leads_to(graph, position, nodes):
                return path.anchor, store
        return None, None

    def _detail(
        self,
        group: list[HeldStorage],
        preferred: HolderPath | None,
        retained: RetainedSizes | None,
    ) -> GroupDetail:
        if not group:
            return GroupDetail()
        namer, graph = self.namer, self.graph
        sample = max(group, key=lambda held: held.facts.nbytes)
        holder, element = self.holders.holder_of(sample.position)
        detail = GroupDetail()
        holding = graph.objects[holder]
        detail.holder_kind = "frame" if type(holding) is FrameLocals else name_of(type(holding))
        detail.bound, detail.entries = bound_of(
            graph.objects[self.holders.container_of(element)], self._bounds
        )
        if sample.facts.device == "cpu":
            detail.shared = is_shared(graph.objects[sample.position])
            detail.mapped = detail.shared or self._is_mapped(sample.facts.address)
        elements = {self.holders.holder_of(held.position)[1] for held in group}
        detail.elsewhere = retained is not None and not retained.elsewhere.isdisjoint(elements)
        if retained is not None and not detail.elsewhere:
            detail.retained = self._retained(group, retained)
            detail.retained_of = sum(held.facts.nbytes for held in group)
            others: dict[HolderPath, None] = {}
            for held in group[:_HOLDERS]:
                _, own_element = self.holders.holder_of(held.position)
                others.update(dict.fromkeys(self._others(own_element, retained)))
            detail.also_held_by = list(others)[:_ALSO_HELD_BY]
        preferring = [held for held in group if namer.path(held.position).whole == preferred]
        for held in (_from_the_ends(preferring) + _from_the_ends(group))[:_SITES]:
            detail.allocated_at = self._site(held.position)
            if detail.allocated_at is not None:
                break
        return detail

    def _is_mapped(self, address: int) -> bool:
        self._mapped = self._mapped or mapped_ranges()  # once for all groups: there may be thousands
        at = bisect_right(self._mapped, address, key=attrgetter("start"))
        return at > 0 and address in self._mapped[at - 1]

    def _others(self, element: int, retained: RetainedSizes) -> list[HolderPath]:
        """Return other paths to an element than by its holder, without those below the element."""
        graph, namer = self.graph, self.namer
        inside = namer.path(element).anchor
        paths = [
            namer.edge(other, element).whole
            for other in retained.referrers[element]
            if other != graph.parents[element] and graph.kind(other) != NODE
        ]
        return [path for path in paths if path[: len(inside)] != inside]

    def _retained(self, group: list[HeldStorage], retained: RetainedSizes) -> int:
        """Return the bytes of a group that its holders alone keep alive, never more than the group has.

        Counted by element, because a variable's holder is the namespace of a whole module with other names.
        """
        alone = []
        for holder, element in {self.holders.holder_of(held.position) for held in group}:
            if element != holder and retained.dominator[element] != holder:
                continue
            if self.namer.path(holder).namespace and self._others(element, retained):
                continue  # another name of the same namespace keeps it
            alone.append(element)
        nbytes = {held.position: held.facts.nbytes for held in group}
        return retained.bytes_below(alone, nbytes)

    def _site(self, position: int) -> str | None:
        """Return where a storage was allocated, from its tensor, else from the node that keeps it."""
        graph = self.graph
        site = self.site_of(graph.objects[position])
        at = graph.parents[position]
        while site is None and at >= 0 and graph.kind(at) in (NODE, TENSOR):
            site = self.site_of(graph.objects[at])
            at = graph.parents[at]
        return site


def _from_the_ends(group: list[HeldStorage]) -> list[HeldStorage]:
    """Order storages so that the newest come soon, whether the walk met them first or last."""
    inwards = sorted(group, key=lambda held: held.position)
    half = len(inwards) // 2
    mixed = [held for pair in zip(inwards, inwards[::-1], strict=True) for held in pair]
    return mixed[: 2 * half] + inwards[half : len(inwards) - half]
