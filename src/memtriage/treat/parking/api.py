"""`memtriage.park` and `memtriage.unpark`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from memtriage.model.units import size
from memtriage.treat.parking.choose import Selection, choose
from memtriage.treat.parking.errors import ParkError, ParkRefused
from memtriage.treat.parking.handle import Moved, Parked
from memtriage.treat.parking.registry import LOCK, PARKED, ParkedStorage
from memtriage.treat.parking.transfer import ARENAS, forget_unwanted, no_work, park_choice, unpark_entries


def park(*what: Any, despite_graphs: bool = False) -> Parked:
    """Moves storages to page-locked host memory and gives their device memory back. Sizes in bytes.

    Every view and alias stays valid, as the storage objects stay: they are empty meanwhile. Using a parked
    tensor raises `memtriage.ParkedError`. The host memory is kept for the next time;
    `release_parking()` gives it back.

    Args:
        what: models, optimizers, tensors, storages, and containers of these. A model stands for its
            parameters, gradients and buffers, an optimizer for its state. The names `parameters`,
            `gradients`, `buffers` and `optimizer_state` among them restrict models and optimizers to these.
        despite_graphs: the caller says that no captured CUDA graph that is still alive uses any of it.
            Otherwise nothing is parked while there is one.

    Returns:
        What was moved; also a context manager that brings it back.

    Raises:
        memtriage.ParkError: something of it is parked already, or is nothing that can be parked; a
            RuntimeError. Nothing was moved.
        MemoryError: the host has too little memory. Nothing was moved.
        Whatever else interrupts has a note that says what is parked and what is on the device.

    Limits: waits for all work on the device. CPU storages are parked only in a process without CUDA.
    Memory whose address somebody keeps (a captured CUDA graph, DLPack) must not be parked; see docs/park.md.

    Warns:
        ParkRefused: some storages cannot be parked and stay.
    """
    return _warn_refused(park_choice(choose(what), graphs=despite_graphs))


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
        left = [storage for storage in choice.storages if storage.storage._cdata not in PARKED]
        if not left:
            return None
        rest = Selection(left, choice.modules, choice.leaves)
        return _warn_refused(park_choice(rest, graphs=despite_graphs, meanwhile=meanwhile))


def _warn_refused(parked: Parked) -> Parked:
    if parked.refused:
        first = parked.refused[0]
        total = sum(storage.nbytes for storage in parked.refused)
        warnings.warn(
            f"{len(parked.refused)} storages ({size(total)}) stay where they are, e.g. {first.name}: "
            f"{first.reason}",
            ParkRefused,
            stacklevel=3,
        )
    return parked


def unpark(*what: Any) -> Moved:
    """Brings parked storages back to the device that they came from, bit for bit. Sizes in bytes.

    Args:
        what: as for `park`, or what `park` returned; nothing for all that is parked.

    Raises:
        memtriage.ParkError: nothing of it is parked, or something got device memory from elsewhere
            meanwhile; a RuntimeError.
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


def parked_by_device(*what: Any) -> dict[int, int]:
    """Bytes that are parked of it, by CUDA index. Arguments as of `unpark`."""
    parked: dict[int, int] = {}
    for entry in _entries(what) if PARKED else ():
        if entry.device.type == "cuda":
            parked[entry.device.index] = parked.get(entry.device.index, 0) + entry.nbytes
    return parked


def release_parking() -> int:
    """Gives host memory that `park` keeps for the next time back to the system.

    Returns:
        Its bytes. What holds parked storages stays.
    """
    with LOCK:
        forget_unwanted()
        return sum(arena.release() for arena in ARENAS.values())


def addresses() -> frozenset[int]:
    """Addresses of the host memory that parking keeps."""
    return frozenset(address for arena in ARENAS.values() for address in arena.addresses())


def _entries(what: tuple[Any, ...]) -> list[ParkedStorage]:
    """Those that are parked of what was given, in the order in which they were parked."""
    if not what:
        return list(PARKED.values())
    serials = {serial for item in what if isinstance(item, Parked) for serial in item.serials}
    keys = {
        storage.storage._cdata
        for storage in choose(item for item in what if not isinstance(item, Parked)).storages
    }
    return [entry for key, entry in PARKED.items() if entry.serial in serials or key in keys]
