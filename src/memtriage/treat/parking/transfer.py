"""Move storages to the host and back, so that at every instant all values are complete in one place.

On the way down a storage is copied, then recorded as parked, and only then is its device memory freed. On the
way up it gets memory, then its values, and only when these have arrived is the host's copy freed. After any
interruption the record says which storages are parked, and both directions can be called again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

from memtriage.model.units import size
from memtriage.observe import cuda
from memtriage.process.collector import collector_paused
from memtriage.treat.parking.arena import HostArena
from memtriage.treat.parking.choose import Chosen, Selection
from memtriage.treat.parking.device import Ways, ways_to
from memtriage.treat.parking.guard import Guard, uncover
from memtriage.treat.parking.handle import Moved, NotParked, Parked, ParkError
from memtriage.treat.parking.registry import LOCK, PARKED, ParkedStorage, parked_bytes

BATCH: Final = 256 << 20
"""Most bytes that get device memory before their copies begin."""
_NAMED: Final = 3

WaysTo = Callable[[torch.device], Ways]
GUARD: Final = Guard()
ARENAS: Final = {pin: HostArena(pin=pin) for pin in (True, False)}
"""The process's host memory for parking: page-locked for devices that need it, and not."""


def no_work() -> None:
    """Do nothing on the host while copies are running."""


def park_choice(
    choice: Selection,
    *,
    graphs: bool = False,
    find_ways: WaysTo = ways_to,
    meanwhile: Callable[[], None] = no_work,
) -> Parked:
    """Park what was chosen. See `memtriage.park`.

    Args:
        graphs: captured CUDA graphs are not a reason to stay.
        meanwhile: the host's work while the copies are running; called once if anything is copied. All other
            work on these devices is done by then. What it raises stops the parking, with all values on the
            device.
    """
    with LOCK, collector_paused():  # a collection would take longer than starting all copies
        started = time.perf_counter()
        forget_unwanted()
        asked = _movable(choice.storages)
        ways = {
            device: find_ways(device) for device in dict.fromkeys(entry.storage.device for entry in asked)
        }
        to_park, refused = _sorted_out(asked, ways, graphs)
        entries = _homes_for(to_park, ways)
        housed = time.perf_counter()
        _copy_down(entries, ways, meanwhile)
        copied = time.perf_counter()
        _release(entries, to_park, choice, ways)
        ended = time.perf_counter()
        return Parked(
            serials=frozenset(entry.serial for entry in entries),
            nbytes=parked_bytes(entries),
            storages=len(entries),
            owners=_by_owner(entries),
            refused=refused,
            seconds=ended - started,
            host_seconds=housed - started,
            copy_seconds=copied - housed,
            bring_back=_bring_back,
        )


def unpark_entries(entries: Sequence[ParkedStorage], find_ways: WaysTo = ways_to) -> Moved:
    """Bring entries of `PARKED` back. See `memtriage.unpark`."""
    with LOCK, collector_paused():
        started = time.perf_counter()
        _forget([entry for entry in entries if not entry.wanted])
        entries = [entry for entry in entries if entry.wanted]
        taken = [entry for entry in entries if entry.storage.nbytes() and not entry.arriving]
        if taken:
            raise ParkError(
                f"{_listed(taken)} got device memory from somebody else while parked (a framework that "
                "reloads it?). Nothing was moved; the parked values are still on the host. To have them, "
                "resize the storage to 0 first"
            )
        back: list[ParkedStorage] = []
        try:
            with ExitStack() as landings:  # all devices at once
                for device in dict.fromkeys(entry.device for entry in entries):
                    group = [entry for entry in entries if entry.device == device]
                    way = find_ways(device)
                    _copy_up(group, way, landings.enter_context(_landed(way, back)))
        except BaseException as error:
            left = [entry for entry in entries if entry not in back]
            error.add_note(
                f"memtriage.unpark: {len(back)} of {len(entries)} storages ({size(parked_bytes(back))}) are "
                f"back on the device; {len(left)} ({size(parked_bytes(left))}) are still parked, their "
                "values whole on the host: make room and call unpark() again"
            )
            raise
        return Moved(
            nbytes=parked_bytes(back),
            storages=len(back),
            owners=_by_owner(back),
            seconds=time.perf_counter() - started,
        )


def _bring_back(serials: frozenset[int]) -> Moved | None:
    """Bring back what one call of `park` has still parked; None if nothing."""
    with LOCK:
        entries = [entry for entry in PARKED.values() if entry.serial in serials]
        return unpark_entries(entries) if entries else None


def _movable(chosen: Sequence[Chosen]) -> list[Chosen]:
    """The storages that have memory on a device.

    Raises:
        ParkError: some of it is parked already, or is on a device that is not supported.
    """
    parked = [PARKED[candidate.storage._cdata] for candidate in chosen if candidate.storage._cdata in PARKED]
    if parked:
        raise ParkError(
            f"{_listed(parked)} {'is' if len(parked) == 1 else 'are'} parked already; nothing was moved. "
            "Call unpark() first, or park what is left"
        )
    present = [candidate for candidate in chosen if candidate.storage.nbytes()]
    strange = [candidate for candidate in present if candidate.storage.device.type not in ("cpu", "cuda")]
    if strange:
        raise ParkError(
            f"{strange[0].title} is on {strange[0].storage.device}: only CUDA devices are supported"
        )
    if not cuda.initialized():
        return present
    # Storages of the CPU stay where they are.
    return [candidate for candidate in present if candidate.storage.device.type != "cpu"]


def _sorted_out(
    chosen: Sequence[Chosen], ways: dict[torch.device, Ways], graphs: bool
) -> tuple[list[Chosen], tuple[NotParked, ...]]:
    """What to park, and what cannot be parked."""
    to_park: list[Chosen] = []
    refused: list[NotParked] = []
    for device, way in ways.items():
        on_device = [candidate for candidate in chosen if candidate.storage.device == device]
        spots = way.look([candidate.storage for candidate in on_device], graphs=graphs)
        for candidate, spot in zip(on_device, spots, strict=True):
            candidate.stream = spot.stream
            if spot.reason is None:
                to_park.append(candidate)
            else:
                refused.append(NotParked(candidate.title, candidate.storage.nbytes(), spot.reason))
    return to_park, tuple(refused)


def _homes_for(chosen: Sequence[Chosen], ways: dict[torch.device, Ways]) -> list[ParkedStorage]:
    """Make entries with homes, without copying.

    Raises:
        MemoryError: there is too little host memory; nothing is taken.
    """
    entries: list[ParkedStorage] = []
    try:
        for pin, arena in ARENAS.items():
            alike = [candidate for candidate in chosen if ways[candidate.storage.device].pins == pin]
            homes = arena.take([candidate.storage.nbytes() for candidate in alike])
            entries += [
                ParkedStorage(candidate, home, arena) for candidate, home in zip(alike, homes, strict=True)
            ]
    except BaseException as error:
        _give_homes(entries)
        error.add_note(f"memtriage.park: {_NOTHING_MOVED}")
        raise
    order = {candidate.storage._cdata: number for number, candidate in enumerate(chosen)}
    return sorted(entries, key=lambda entry: order[entry.key])


_NOTHING_MOVED: Final = "nothing was moved, all values are on the device"


def _copy_down(
    entries: Sequence[ParkedStorage], ways: dict[torch.device, Ways], meanwhile: Callable[[], None]
) -> None:
    try:
        for way in ways.values():
            way.synchronize()
        for entry in entries:
            ways[entry.device].down(entry.storage, entry.home)
        meanwhile()
        for way in ways.values():
            way.synchronize()
    except BaseException as error:
        for way in ways.values():
            way.synchronize()  # no copy may still write into a home that is freed
        _give_homes(entries)
        error.add_note(f"memtriage.park: {_NOTHING_MOVED}")
        raise


def _release(
    entries: Sequence[ParkedStorage],
    chosen: Sequence[Chosen],
    choice: Selection,
    ways: dict[torch.device, Ways],
) -> None:
    """Record each as parked, then free its device memory."""
    tensors = {candidate.storage._cdata: candidate.tensors for candidate in chosen}
    try:
        for entry in entries:
            PARKED[entry.key] = entry
            entry.tensors += [weakref.ref(tensor) for tensor in tensors[entry.key] if GUARD.cover(tensor)]
            ways[entry.device].resize(entry.storage, 0, entry.stream)
        GUARD.watch(choice.modules)
        GUARD.watch_gradients(choice.leaves)
        for way in ways.values():
            way.release()
    except BaseException as error:
        unparked = [entry for entry in entries if entry.storage.nbytes()]
        parked = [entry for entry in entries if entry not in unparked]
        _forget(unparked)
        error.add_note(
            f"memtriage.park: {len(parked)} of {len(entries)} storages ({size(parked_bytes(parked))}) are "
            "parked (unpark() brings them back); what is not is on the device, as it was"
        )
        raise


@contextmanager
def _landed(way: Ways, back: list[ParkedStorage]) -> Iterator[list[ParkedStorage]]:
    """Start copies in the block. After it, even on error, those started are done and recorded as back."""
    issued: list[ParkedStorage] = []
    try:
        yield issued
    finally:
        way.synchronize()
        for entry in issued:
            entry.arriving = False
            back.append(entry)
        _forget(issued)


def _copy_up(entries: Sequence[ParkedStorage], way: Ways, issued: list[ParkedStorage]) -> None:
    way.synchronize()  # wait for earlier uses of the blocks, on any stream
    for batch in _batches(entries):
        try:
            for entry in batch:
                entry.arriving = True
                way.resize(entry.storage, entry.nbytes, entry.stream)
            for entry in batch:
                way.up(entry.storage, entry.home)
                issued.append(entry)
        except BaseException:
            way.synchronize()
            for entry in batch:
                if entry not in issued:
                    way.resize(entry.storage, 0, entry.stream)
                    entry.arriving = False
            raise


def _batches(entries: Iterable[ParkedStorage]) -> Iterator[list[ParkedStorage]]:
    batch: list[ParkedStorage] = []
    nbytes = 0
    for entry in entries:
        batch.append(entry)
        nbytes += entry.nbytes
        if nbytes >= BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def forget_unwanted() -> None:
    """Free the homes of storages that nothing else refers to: they died while they were parked."""
    with LOCK:
        _forget([entry for entry in PARKED.values() if not entry.wanted])


def _forget(entries: Iterable[ParkedStorage]) -> None:
    """Remove entries: restore their objects, free their homes."""
    for entry in entries:
        PARKED.pop(entry.key, None)
        for reference in entry.tensors:
            tensor = reference()
            if tensor is not None:
                uncover(tensor)
        entry.arena.give([entry.home])
    GUARD.sweep()


def _give_homes(entries: Iterable[ParkedStorage]) -> None:
    for entry in entries:
        entry.arena.give([entry.home])


def _by_owner(entries: Iterable[ParkedStorage]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for entry in entries:
        owners[entry.owner] = owners.get(entry.owner, 0) + entry.nbytes
    return owners


def _listed(entries: Sequence[ParkedStorage]) -> str:
    named = ", ".join(entry.title for entry in entries[:_NAMED])
    more = len(entries) - _NAMED
    return named + (f" and {more} more" if more > 0 else "")
