"""`memtriage.park` and `memtriage.unpark`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from memtriage.model.units import size
from memtriage.treat.parking.choose import Selection, choose
from memtriage.treat.parking.handle import Moved, Parked, ParkError, ParkRefused
from memtriage.treat.parking.registry import LOCK, PARKED, ParkedStorage
from memtriage.treat.parking.transfer import ARENAS, forget_unwanted, no_work, park_choice, unpark_entries


def park(*what: Any, despite_graphs: bool = False) -> Parked:
    """Move storages to page-locked host memory and free their device memory. Sizes in bytes.

    Views and aliases stay valid: the storage objects remain, and are empty meanwhile. Using a parked tensor
    raises `memtriage.ParkedError`. The host memory is kept for the next time; `release_parking()` frees it.

    Args:
        what: models, optimizers, tensors, storages, and containers of these. A model means its parameters,
            gradients and buffers, an optimizer its state. If the names `parameters`, `gradients`, `buffers`
            or `optimizer_state` are given, too, only these parts of models and optimizers are parked.
        despite_graphs: the caller says that no captured CUDA graph still alive uses any of it. Otherwise
            nothing is parked while there is one.

    Returns:
        What was moved; also a context manager that brings it back.

    Raises:
        memtriage.ParkError: some of it is parked already, or cannot be parked; a RuntimeError. Nothing was
            moved.
        MemoryError: the host has too little memory. Nothing was moved.
        Any other exception has a note that says what is parked and what is on the device.

    Limits: waits for all work on the device. CPU storages are parked only in a process without CUDA. Memory
    whose address is kept elsewhere (a captured CUDA graph, DLPack) must not be parked; see docs/park.md.

    Warns:
        ParkRefused: some storages cannot be parked and stay.
    """
    return _warn_refused(park_choice(choose(what), graphs=despite_graphs))


def park_rest(
    *what: Any, despite_graphs: bool = False, meanwhile: Callable[[], None] = no_work
) -> Parked | None:
    """As `park`, but skip what is parked already; None if all is."""
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
    """Bring parked storages back to their device, bit for bit. Sizes in bytes.

    Args:
        what: as for `park`, or what `park` returned; without arguments all that is parked.

    Raises:
        memtriage.ParkError: none of it is parked, or a parked storage was given other memory meanwhile; a
            RuntimeError.
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
    """Whether any of it is parked; without arguments, anything at all. Arguments as for `unpark`."""
    return bool(_entries(what))


def parked_by_device(*what: Any) -> dict[int, int]:
    """Parked bytes of it, by CUDA index. Arguments as for `unpark`."""
    parked: dict[int, int] = {}
    for entry in _entries(what) if PARKED else ():
        if entry.device.type == "cuda":
            parked[entry.device.index] = parked.get(entry.device.index, 0) + entry.nbytes
    return parked


def release_parking() -> int:
    """Free the host memory that `park` keeps for the next time.

    Returns:
        Bytes freed. Memory of parked storages stays.
    """
    with LOCK:
        forget_unwanted()
        return sum(arena.release() for arena in ARENAS.values())


def addresses() -> frozenset[int]:
    """Addresses of the host memory that parking keeps."""
    return frozenset(address for arena in ARENAS.values() for address in arena.addresses())


def _entries(what: tuple[Any, ...]) -> list[ParkedStorage]:
    """The parked entries among what was given, in the order in which they were parked."""
    if not what:
        return list(PARKED.values())
    serials = {serial for item in what if isinstance(item, Parked) for serial in item.serials}
    keys = {
        storage.storage._cdata
        for storage in choose(item for item in what if not isinstance(item, Parked)).storages
    }
    return [entry for key, entry in PARKED.items() if entry.serial in serials or key in keys]
