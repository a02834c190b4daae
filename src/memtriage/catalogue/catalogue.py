"""The whole catalogue of known holders: entries of libraries, of the program, and generic ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from memtriage.catalogue.entry import Holder, Place
from memtriage.catalogue.finders import read_places
from memtriage.catalogue.frameworks import FRAMEWORKS
from memtriage.catalogue.generic import GENERIC
from memtriage.catalogue.pytorch import PYTORCH
from memtriage.catalogue.registered import registered
from memtriage.catalogue.scene import Scene
from memtriage.catalogue.transformer_engine import TRANSFORMER_ENGINE
from memtriage.model.census import Owner
from memtriage.model.holders import KINDS, HolderReading
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.tensors import undisturbed

SPECIFIC: Final[tuple[Holder, ...]] = (*TRANSFORMER_ENGINE, *FRAMEWORKS, *PYTORCH)
"""Entries of known libraries: those that release tensors come before those that return memory."""

BUILT_IN: Final[tuple[Holder, ...]] = (*SPECIFIC, *GENERIC)


def holders(*, generic: bool = True) -> tuple[Holder, ...]:
    """Every entry there is now, the program's own last but for the generic ones.

    Args:
        generic: the generic detectors too, which look at every class and function.
    """
    return (*SPECIFIC, *registered(), *(GENERIC if generic else ()))


def choose(wanted: Iterable[str] | None) -> list[Holder]:
    """The entries of some kinds, names or first parts of names (`te`), in the catalogue's order.

    For None all but the generic ones.

    Raises:
        ValueError: there is no such kind, name or library; the text lists what there is.
    """
    if wanted is None:
        return list(holders(generic=False))
    entries = holders()
    asked = [wanted] if isinstance(wanted, str) else list(wanted)
    known = {*KINDS, *(holder.name for holder in entries), *map(_first_part, entries)}
    unknown = [name for name in asked if name not in known]
    if unknown:
        names = ", ".join(holder.name for holder in entries)
        raise ValueError(
            f"there is no kind of holder and no holder called {unknown[0]!r}; kinds: {', '.join(KINDS)}; "
            f"holders: {names}"
        )
    return [holder for holder in entries if {holder.kind, holder.name, _first_part(holder)} & set(asked)]


def _first_part(holder: Holder) -> str:
    return holder.name.partition(".")[0]


def find_places(holder: Holder, scene: Scene) -> list[Place]:
    """Where an entry is found now. Raises whatever the structures of an unforeseen version make it raise."""
    if holder.package and holder.package not in sys.modules:
        return []
    with undisturbed():
        return list(holder.find(scene))


def read_holders(scene: Scene, chosen: Sequence[Holder]) -> list[HolderReading]:
    """What entries hold now; those of which nothing is found are left out.

    An entry that cannot be read is returned as `failed`. What two entries find counts for both: an attribute
    of a module that is a known workspace is also one of the generic attributes.
    """
    readings = []
    for holder in chosen:
        try:
            places = find_places(holder, scene)
            if places:
                readings.append(read_places(holder.name, places))
        except Exception as error:
            if is_programs_exception(error):
                raise
            readings.append(HolderReading(name=holder.name, failed=f"{type(error).__name__}: {error}"))
    return readings


_UNCLAIMED: Final[frozenset[Owner]] = frozenset(("variable", "c++ only"))
"""Owners that say no more than that something holds it."""


def known_holders(graph: HeapGraph) -> dict[tuple[str, int], Holder]:
    """The entry by device and address of each storage that one keeps; the first, where several do.

    The generic detectors are left out: a holder path says more than they do.
    """
    entries = {holder.name: holder for holder in holders(generic=False) if holder.keeps}
    with Scene(graph.objects) as scene:
        readings = read_holders(scene, list(entries.values()))
    by_storage: dict[tuple[str, int], Holder] = {}
    for reading in readings:
        for device, address, _ in reading.storages:
            by_storage.setdefault((device, address), entries[reading.name])
    return by_storage


def owner_with(holder: Holder, owner: Owner) -> Owner:
    """Return what a storage is, given its entry and its owner by its place among the objects."""
    if holder.owner is not None:
        return holder.owner
    return "known cache" if owner in _UNCLAIMED else owner
