"""`memtriage.park` and `memtriage.unpark`."""

from __future__ import annotations

import warnings
from typing import Any

from memtriage.model.units import size
from memtriage.treat.park.choose import Choice, choose
from memtriage.treat.park.errors import ParkError, ParkRefused
from memtriage.treat.park.handle import Moved, Parked
from memtriage.treat.park.parking import ARENAS, park_choice, unpark_entries
from memtriage.treat.park.registry import LOCK, PARKED, Entry


def park(*what: Any, despite_graphs: bool = False) -> Parked:
    """Moves storages to page-locked host memory and gives their device memory back. Sizes in bytes.

    Every view and alias stays valid, as the storage objects stay: they are empty meanwhile. Using a parked
    tensor raises `ParkedError`. The host memory is kept for the next time (`release_parking()` gives it
    back).

    Args:
        what: models, optimizers, tensors, storages, and containers of these. A model stands for its
            parameters, gradients and buffers, an optimizer for its state. The names `parameters`,
            `gradients`, `buffers` and `optimizer_state` among them restrict models and optimizers to these.

        despite_graphs: the caller says that no captured CUDA graph that is still alive uses any of it.
            Otherwise nothing is parked while there is one.

    Returns:
        What was moved; also a context manager that brings it back.

    Raises:
        ParkError: something of it is parked already, or is nothing that can be parked.
        MemoryError: the host has too little memory.
        Nothing was moved then. If anything else interrupts, a note on the exception says what is parked.

    Warns:
        ParkRefused: some storages cannot be parked and stay.

    Limits: waits for all work on the device. CPU storages are parked only in a process that uses no GPU
    (to try things out); elsewhere they are where they belong already. Memory whose
    address somebody else keeps (a captured CUDA graph, registered NCCL buffers, DLPack) must not be parked.
    """
    return _told(park_choice(choose(what), graphs=despite_graphs))


def park_rest(*what: Any, despite_graphs: bool = False) -> Parked | None:
    """Parks what is not parked yet of it; None if all is. Otherwise as `park`."""
    with LOCK:
        choice = choose(what)
        left = [one for one in choice.storages if one.storage._cdata not in PARKED]
        if not left:
            return None
        rest = Choice(left, choice.modules, choice.leaves)
        return _told(park_choice(rest, graphs=despite_graphs))


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
    """Brings parked storages back to where they were, bit for bit. Sizes in bytes.

    Args:
        what: as for `park`, or what `park` returned; nothing for all that is parked.

    Raises:
        ParkError: nothing of it is parked, or something got device memory from elsewhere meanwhile.
        torch.OutOfMemoryError: too little device memory. What was brought back stays; the rest is still
            parked, and the call can be repeated.
    """
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
    """Gives host memory that parking keeps for the next time back to the system.

    Returns:
        Its bytes. What holds parked storages stays.
    """
    with LOCK:
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
