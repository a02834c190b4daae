"""Variables whose old value is alive while the new one is made: `model = Model()`, run a second time.

Python evaluates the right-hand side first, so for a moment there are two models. A weak reference to each
large variable shows when its old value is freed, and what is in use at that instant.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from memtriage.account.census import CensusView
from memtriage.integrations.notebook.words import cell_path
from memtriage.model.cell import Rebinding
from memtriage.model.census import Census
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind
from memtriage.model.units import MIB
from memtriage.observe import cuda
from memtriage.observe.malloc import malloc_info
from memtriage.observe.tensors import StorageFacts, storage_facts

_LEAST: Final = MIB
"""Bytes from which a variable is watched."""
_SHARE: Final = 0.1
"""Of all tensors on the device: smaller values do not matter to the peak."""
_AT_ONCE: Final = 0.5
"""Share of the smaller value that must be in use beyond what was before, when the old one goes."""
_MOST: Final = 64
_MOST_HOLDERS: Final = 3
_MAIN: Final = PathSegment(SegmentKind.MODULE, "__main__")
_NO_VARIABLES: Final = ("get_ipython", "Out")


@dataclass(slots=True)
class _Old:
    """A variable's value before the cell: its bytes on a device, and its largest tensor there."""

    name: str
    facts: StorageFacts
    nbytes: int
    ref: Callable[[], Any]
    in_use: int | None = None
    in_use_when_gone: int | None = None


class Variables:
    """The user's variables with tensors of some size, from before a cell to after it. Holds no tensor.

    Args:
        view: a census before the cell.
    """

    def __init__(self, view: CensusView) -> None:
        sizes = _bytes_by_variable(view.census())
        large = sorted((key for key in sizes if sizes[key] >= _LEAST), key=lambda key: -sizes[key])
        largest: dict[tuple[str, str], tuple[StorageFacts, int]] = {}
        wanted = set(large[:_MOST])
        for position in view.graph.tensors:
            facts = storage_facts(view.graph.objects[position])
            if facts is None:
                continue
            name = _variable(view.path(position))
            key = (facts.device, name or "")
            if key in wanted and (key not in largest or facts.nbytes > largest[key][0].nbytes):
                largest[key] = facts, position
        self._old: list[_Old] = []
        for (device, name), (facts, position) in largest.items():
            self._follow(name, facts, sizes[device, name], view.graph.objects[position])

    def _follow(self, name: str, facts: StorageFacts, nbytes: int, tensor: Any) -> None:
        def gone(_ref: object) -> None:
            old.in_use_when_gone = _in_use(facts.device)

        old = _Old(name, facts, nbytes, weakref.ref(tensor, gone))
        self._old.append(old)

    def begin(self) -> None:
        """The cell is about to run, and no census takes memory any more."""
        for old in self._old:
            old.in_use = _in_use(old.facts.device)

    def rebindings(self, view: CensusView) -> list[Rebinding]:
        """Those whose old and new values were alive at once, largest first.

        Args:
            view: a census behind the cell.
        """
        after = view.census()
        now = _bytes_by_variable(after)
        total: dict[str, int] = {}
        for storage in after.storages:
            total[storage.device] = total.get(storage.device, 0) + storage.nbytes
        rebindings = []
        for old in self._old:
            device = old.facts.device
            new = now.get((device, old.name), 0)
            if min(new, old.nbytes) < max(_LEAST, _SHARE * total.get(device, 0)):
                continue
            rebinding = Rebinding(name=old.name, device=device, old=old.nbytes, new=new)
            if old.ref() is None:
                if old.in_use_when_gone is not None and old.in_use is not None:
                    rebinding.extra = old.in_use_when_gone - old.in_use
                    if rebinding.extra >= _AT_ONCE * min(new, old.nbytes):
                        rebindings.append(rebinding)
            else:
                holders = _other_holders(view, old)
                if holders:
                    rebindings.append(msgspec.structs.replace(rebinding, still_held_by_paths=holders))
        return sorted(rebindings, key=lambda rebinding: -rebinding.old)


def _other_holders(view: CensusView, old: _Old) -> list[HolderPath]:
    """Return what holds an old value; nothing where it is the variable itself, which has not changed then."""
    graph, tensor = view.graph, old.ref()
    position = graph.index.get(id(tensor), -1)
    if position < 0:
        return []
    shortest = view.path(position)
    if _variable(shortest) == old.name:
        return []
    paths = [shortest]
    for holder in gc.get_referrers(tensor):
        at = graph.index.get(id(holder), -1)
        if 0 <= at < graph.first_own and at != graph.parents[position]:
            paths.append(view.path(at))
    return list(dict.fromkeys(map(cell_path, paths)))[:_MOST_HOLDERS]


def _bytes_by_variable(census: Census) -> dict[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for storage in census.storages:
        name = _variable(storage.path or ())
        if name is not None:
            sizes[storage.device, name] = sizes.get((storage.device, name), 0) + storage.nbytes
    return sizes


def _variable(path: HolderPath) -> str | None:
    """The user's variable that a path begins with; IPython's own begin with an underscore, but for two."""
    if path[:1] != (_MAIN,) or len(path) < 2:
        return None
    name = path[1].name
    return None if name.startswith("_") or name in _NO_VARIABLES else name


def _in_use(device: str) -> int | None:
    if device.startswith("cuda:"):
        return cuda.counters(int(device[5:])).allocated
    info = malloc_info()
    return None if info is None else info.in_use
