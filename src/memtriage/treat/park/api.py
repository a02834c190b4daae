"""`memtriage.park` and `memtriage.unpark`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from memtriage.model.units import size
from memtriage.treat.park.choose import Choice, choose
from memtriage.treat.park.errors import ParkError, ParkRefused
from memtriage.treat.park.handle import Moved, Parked
from memtriage.treat.park.parking import ARENAS, forget_unwanted, no_work, park_choice, unpark_entries
from memtriage.treat.park.registry import LOCK, PARKED, Entry


def park(*what: Any, despite_graphs: bool = False) -> Parked:
    """See `memtriage.park`.

    Warns:
        ParkRefused: some storages cannot be parked and stay.
    """
    return _told(park_choice(choose(what), graphs=despite_graphs))


def park_rest(
    *what: Any, despite_graphs: bool = False, meanwhile: Callable[[], None] = no_work
) -> Parked | None:
    """Parks what is not parked yet of it; None if all is. Otherwise as `park`.

    Args:
        what, despite_graphs: as of `park`.
        meanwhile: as of `park_choice`.
    """
    with LOCK:
        choice = choose(what)
        left = [one for one in choice.storages if one.storage._cdata not in PARKED]
        if not left:
            return None
        rest = Choice(left, choice.modules, choice.leaves)
        return _told(park_choice(rest, graphs=despite_graphs, meanwhile=meanwhile))


def _told(parked: Parked) -> Parked:
    if parked.refused:
        first = parked.refused[0]
        total = sum(one.nbytes for one in parked.refused)
        warnings.warn(
            f"{len(parked.refused)} storages ({size(total)}) stay where they are, e.g. {first.name}: "
            f"{first.reason}",
            ParkRefused,
            stacklevel=3,
        )
    return parked


def unpark(*what: Any) -> Moved:
    """See `memtriage.unpark`."""
    with LOCK:
        entries = _entries(what)
        if not entries:
            raise ParkError(
                "nothing is parked"
                if not what
                else "nothing of what was given is parked (brought back already?)"
            )
        return unpark_entries(entries)


def is_parked(*what: Any) -> bool:
    """Whether anything of it is parked; without arguments, anything at all. Arguments as of `unpark`."""
    return bool(_entries(what))


def release_parking() -> int:
    """See `memtriage.release_parking`."""
    with LOCK:
        forget_unwanted()
        return sum(arena.release() for arena in ARENAS.values())


def addresses() -> frozenset[int]:
    """Addresses of the host memory that parking keeps."""
    return frozenset(address for arena in ARENAS.values() for address in arena.addresses())


def _entries(what: tuple[Any, ...]) -> list[Entry]:
    """Those that are parked of what was given, in the order in which they were parked."""
    if not what:
        return list(PARKED.values())
    serials = {serial for one in what if isinstance(one, Parked) for serial in one.serials}
    keys = {one.storage._cdata for one in choose(one for one in what if not isinstance(one, Parked)).storages}
    return [entry for key, entry in PARKED.items() if entry.serial in serials or key in keys]
