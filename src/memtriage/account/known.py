"""Which storages of a census the catalogue of known holders has an entry for."""

from __future__ import annotations

from typing import Final

from memtriage.model.census import Owner
from memtriage.observe.heap import HeapGraph
from memtriage.observe.holders.catalogue import holders, read_holders
from memtriage.observe.holders.entry import Holder
from memtriage.observe.holders.scene import Scene

_UNCLAIMED: Final[frozenset[Owner]] = frozenset(("variable", "c++ only"))
"""Owners that say no more than that something holds it."""


def known_holders(graph: HeapGraph) -> dict[tuple[str, int], Holder]:
    """The entry by device and address of each storage that one keeps; the first, where several do.

    The generic detectors are left out: a holder path says more than they do.
    """
    entries = {one.name: one for one in holders(generic=False) if one.keeps}
    with Scene(graph.objects) as scene:
        readings = read_holders(scene, list(entries.values()))
    found: dict[tuple[str, int], Holder] = {}
    for reading in readings:
        for device, address, _ in reading.storages:
            found.setdefault((device, address), entries[reading.name])
    return found


def owner_with(holder: Holder, owner: Owner) -> Owner:
    """What a storage is, given its entry and what its place among the objects tells."""
    if holder.owner is not None:
        return holder.owner
    return "known cache" if owner in _UNCLAIMED else owner
