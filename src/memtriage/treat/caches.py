"""Clear known holders, only those that may be cleared now, and measure what each held and what was freed."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memtriage.account.holder_pins import pinned_by
from memtriage.catalogue.catalogue import choose, find_places, holders
from memtriage.catalogue.entry import Holder, Place
from memtriage.catalogue.finders import read_places
from memtriage.catalogue.scene import Scene
from memtriage.catalogue.situation import Conditions, read_situation
from memtriage.model.holders import (
    CAPTURE_UNDER_WAY,
    AllocatorFigures,
    Cleared,
    HolderOutcome,
    HolderReading,
)
from memtriage.observe import cuda
from memtriage.observe.tensors import StorageFacts, undisturbed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Clearing:
    """An entry being cleared: where it was found, what it held, and the outcome."""

    holder: Holder
    outcome: HolderOutcome
    places: list[Place] = field(default_factory=list)
    storages: list[tuple[str, int, Any]] = field(default_factory=list)
    addresses: list[tuple[str, int, int]] = field(default_factory=list)
    other: dict[str, int] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)


def clear_holders(
    kinds: Iterable[str] | None = None,
    *,
    between_steps: bool = False,
    empty_cache: bool = True,
    idle: bool = False,
) -> Cleared:
    """See `memtriage.clear_caches`.

    Args:
        kinds, between_steps, empty_cache: as there.
        idle: the devices have finished all work on what may be cleared: do not wait for them.
    """
    started = time.perf_counter()
    chosen = choose(kinds)
    asked = kinds is not None
    before = allocator_figures()
    if cuda.capturing():
        return _nothing_done(chosen, before, started)
    work, situation = _look(chosen, between_steps)
    if not idle:
        synchronize()
    for entry in work:
        if not entry.holder.after_collection:
            _treat(entry, situation, asked)
    after_clear = allocator_figures()
    collected = gc.collect()
    for entry in work:
        if entry.holder.after_collection:
            _treat(entry, situation, asked)
    cache = _empty_cache() if empty_cache else "left as it was"
    for entry in work:
        _settle(entry)
    return Cleared(
        entries=[entry.outcome for entry in work],
        before=before,
        after_clear=after_clear,
        after=allocator_figures(),
        collected=collected,
        cache=cache,
        seconds=time.perf_counter() - started,
    )


def allocator_figures() -> dict[str, AllocatorFigures]:
    """Allocated and reserved bytes of each CUDA device in use; empty without CUDA."""
    figures = {}
    for index in cuda.devices():
        counters = cuda.counters(index)
        figures[f"cuda:{index}"] = AllocatorFigures(allocated=counters.allocated, reserved=counters.reserved)
    return figures


def _nothing_done(chosen: Sequence[Holder], before: dict[str, AllocatorFigures], started: float) -> Cleared:
    entries = [
        HolderOutcome(name=holder.name, kind=holder.kind, status="skipped", reason=CAPTURE_UNDER_WAY)
        for holder in chosen
    ]
    return Cleared(
        entries=entries,
        before=before,
        after_clear=before,
        after=before,
        collected=None,
        cache=f"not emptied: {CAPTURE_UNDER_WAY}",
        seconds=time.perf_counter() - started,
    )


def _look(chosen: Sequence[Holder], between_steps: bool) -> tuple[list[_Clearing], Conditions]:
    """Find each entry, and what forbids clearing. The result keeps no tensor alive."""
    work = [
        _Clearing(holder, HolderOutcome(name=holder.name, kind=holder.kind, status="absent"))
        for holder in chosen
    ]
    with Scene() as scene:
        for entry in work:
            _find(entry, scene)
        leftovers = _leftovers(scene)
        segments = cuda.segments()
        with undisturbed():
            situation = read_situation(scene, segments, leftovers, between_steps=between_steps)
    for entry in work:
        if segments and entry.outcome.before:
            entry.outcome.pins = pinned_by(segments, entry.addresses)
    return work, situation


def _find(work: _Clearing, scene: Scene) -> None:
    try:
        work.places = find_places(work.holder, scene)
        reading = _read(work)
    except Exception as error:
        _fail(work, "it could not be read", error)
        return
    work.outcome.places = len(work.places)
    work.outcome.before = dict(reading.nbytes)
    work.addresses = reading.storages
    for place in work.places:
        for device, nbytes in place.other.items():
            work.other[device] = work.other.get(device, 0) + nbytes


def _read(work: _Clearing) -> HolderReading:
    """Read an entry, and keep weak references to its storages, to see later which were freed."""

    def watch(facts: StorageFacts, storage: Any) -> None:
        reference = sys.modules["torch"].multiprocessing.reductions.StorageWeakRef(storage)
        work.storages.append((facts.device, facts.nbytes, reference))

    return read_places(work.holder.name, work.places, watch)


def _leftovers(scene: Scene) -> set[int]:
    """Ids of the tensors of entries that outlive the step that made them."""
    identities: set[int] = set()
    for holder in holders(generic=False):
        try:
            places = find_places(holder, scene) if holder.transient else []
        except Exception:  # it cannot be read; its own entry reports that
            _log.debug("holder %s cannot be read", holder.name, exc_info=True)
            continue
        identities.update(id(value) for place in places for value in place.values())
    return identities


def _treat(work: _Clearing, situation: Conditions, asked: bool) -> None:
    """Clear an entry, or say why not. Never raises."""
    outcome, holder = work.outcome, work.holder
    if outcome.status == "failed" or not work.places:
        return
    reason = _refusal(holder, situation, asked)
    if reason is not None:
        outcome.status, outcome.reason = "skipped", reason
        work.places.clear()
        return
    unmeasured = not work.storages and not work.other
    before = allocator_figures() if unmeasured else {}
    errors: list[Exception] = []
    actions = [holder.clear_all] if holder.clear_all is not None else [place.clear for place in work.places]
    for action in actions:
        try:
            if action is not None:
                action()
        except Exception as error:  # a library's function may raise anything; the others are still cleared
            _log.debug("clearing %s failed", holder.name, exc_info=True)
            errors.append(error)
    outcome.status = "cleared"
    if unmeasured:
        after = allocator_figures()
        pairs = {device: (then.allocated, after[device].allocated) for device, then in before.items()}
        work.counted = {
            device: then - now
            for device, (then, now) in pairs.items()
            if then is not None and now is not None
        }
    if errors:
        _fail(work, f"{len(errors)} of {len(actions)} could not be cleared", errors[0])
    _read_after(work)
    work.places.clear()


def _refusal(holder: Holder, situation: Conditions, asked: bool) -> str | None:
    if holder.policy == "never":
        return holder.why + (f" (what does: {holder.clears})" if holder.clears else "")
    if holder.policy == "on request" and not asked:
        return f"{holder.why}; asked for by name, clear_caches(kinds=[{holder.name!r}]) does it"
    return situation.forbids(holder.forbidden)


def _read_after(work: _Clearing) -> None:
    try:
        work.outcome.after = dict(read_places(work.holder.name, _again(work)).nbytes)
    except Exception as error:
        _fail(work, "it could not be read again", error)


def _again(work: _Clearing) -> list[Place]:
    """The same places, with the figures of objects other than storages read again."""
    if not work.other:
        return work.places
    with Scene(()) as nothing:
        return find_places(work.holder, nothing)


def _fail(work: _Clearing, what: str, error: Exception) -> None:
    work.outcome.status = "failed"
    work.outcome.reason = f"{what}: {type(error).__name__}: {error}"


def _settle(work: _Clearing) -> None:
    """Count the storages that were freed, also of a failed entry: part of it may have been released."""
    freed = dict(work.counted)
    if work.outcome.status in ("cleared", "failed"):
        for device, nbytes, reference in work.storages:
            if reference.expired():
                freed[device] = freed.get(device, 0) + nbytes
        for device, nbytes in work.other.items():
            freed[device] = max(0, nbytes - work.outcome.after.get(device, 0))
    work.outcome.freed = {device: nbytes for device, nbytes in freed.items() if nbytes > 0}
    work.storages.clear()


def synchronize() -> None:
    """Wait for every device in use: another stream may get a cleared block at once."""
    for index in cuda.devices():
        sys.modules["torch"].cuda.synchronize(index)


def _empty_cache() -> str:
    if not cuda.initialized():
        return "not emptied: no CUDA in use"
    try:
        sys.modules["torch"].cuda.empty_cache()
    except RuntimeError as error:  # a kernel that failed earlier raises at the next synchronization
        return f"not emptied: {error}"
    return "emptied"


def clear_caches(
    kinds: Iterable[str] | None = None, *, between_steps: bool = False, empty_cache: bool = True
) -> Cleared:
    """Clear the known holders (`memtriage holders`) whose contents can be made again. Sizes in bytes.

    Every CUDA device in use is synchronized first. After clearing, garbage is collected and the allocator's
    cache emptied. An entry that must not be cleared now is skipped, with the reason: some while captured CUDA
    graphs may be replayed, some while a backward is running or pending, and always those whose contents the
    program could not make again. If clearing one fails, that is reported, and the others are still cleared.

    Args:
        kinds: kinds or names of holders, as `memtriage holders` lists them, or first parts of names (`te`).
            Entries cleared `on request` are only cleared if their kind or name is given here. None for all
            others, without the generic detectors.
        between_steps: the caller says that no graph still alive will be run backward, as at the end of a
            phase. Otherwise such a graph counts as a pending backward.
        empty_cache: return free segments to the driver at the end.

    Raises:
        ValueError: there is no such kind or holder.

    Limits: a capture or a backward in another thread is not seen.
    """
    return clear_holders(kinds, between_steps=between_steps, empty_cache=empty_cache)
