"""What a watch notes of host memory from its start to its end, as evidence for the judgment."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from memtriage.account.census import CensusView
from memtriage.account.host_reading import HostReading, read_host
from memtriage.diagnose.host.evidence import (
    HostEvidence,
    PinnedBlock,
    PinnedUse,
    Population,
    Pressure,
    Retention,
    SharedMemoryUse,
    WorkerGrowth,
)
from memtriage.diagnose.host.findings import POLICY
from memtriage.model.census import StorageRecord
from memtriage.model.paths import ANY_ITEM
from memtriage.observe.cgroup import CgroupMemory
from memtriage.observe.classes import name_of
from memtriage.observe.counters import Reading
from memtriage.observe.host import ChildSample, HostSample, ShmUse, host_peak
from memtriage.observe.malloc import malloc_info
from memtriage.observe.populations import largest_population
from memtriage.observe.process_tree import descendants
from memtriage.process.stdlib import threading, time

_READING_SHARE: Final = 0.005
"""Share of the time that full readings of the address space may take, and those of malloc within a step."""


class HostWatch:
    """Gathers `HostEvidence`. Marks come from the program's threads, samples from the sampler's."""

    def __init__(self) -> None:
        self.evidence = HostEvidence()
        self._lock = threading.Lock()
        self._first: dict[int, ChildSample] = {}
        self._growths: dict[int, WorkerGrowth] = {}
        self._reading_due_s = self._between_due_s = self._within_due_s = 0.0
        self._kept = 0
        self._much_kept = False
        self._between_steps: int | None = None
        self._shm_first: int | None = None
        self._peak_before = host_peak()

    # --- at marks -------------------------------------------------------------------------------------------

    def at_mark(self, readings: Iterable[Reading], rss: int | None, step: int) -> None:
        """Check whether malloc keeps much between steps; if so, now and then, how much of it is resident."""
        evidence = self.evidence
        if rss is None:
            return
        evidence.highest_rss = max(evidence.highest_rss or 0, rss)
        own = next((reading for reading in readings if reading.device == "cpu"), None)
        if own is None or own.allocated is None or own.reserved is None:
            return
        self._kept, self._between_steps = own.reserved - own.allocated, None
        self._much_kept = self._kept >= max(POLICY.retained, POLICY.retained_share * rss)
        if not self._much_kept:
            return
        now = time.perf_counter()
        if now >= self._reading_due_s:
            reading = read_host()
            if reading is not None:
                self._note_retention(reading, step)
            self._reading_due_s = now + (time.perf_counter() - now) / _READING_SHARE
        # What a step takes is counted from here, after the watch's own work at this mark.
        now = time.perf_counter()
        if now >= self._between_due_s:
            self._between_steps = _in_malloc()
            self._between_due_s = now + (time.perf_counter() - now) / _READING_SHARE

    def while_training(self) -> None:
        """Note how much more malloc has handed out than at the last mark, in the middle of a step.

        Call it only while the watch itself does nothing: its memory would count as the program's. Does
        nothing until malloc was seen to keep much. Such a heap may be slow to read, so this has a budget of
        time, too.
        """
        now = time.perf_counter()
        if self._between_steps is None or now < self._within_due_s:
            return
        if (in_use := _in_malloc()) is not None:
            taken = max(in_use - self._between_steps, 0)
            self.evidence.taken_by_steps = max(self.evidence.taken_by_steps or 0, taken)
        self._within_due_s = now + (time.perf_counter() - now) / _READING_SHARE

    def _note_retention(self, reading: HostReading, step: int) -> None:
        resident, counters = reading.retained(), reading.malloc
        if resident is None or counters is None:
            return
        self.evidence.retention = Retention(
            step=step,
            resident=resident,
            trimmable=min(sum(arena.trimmable for arena in reading.arenas), resident),
            arenas=sum(arena.free > 0 for arena in reading.arenas),
            rss=reading.classes.total,
        )

    # --- at censuses ----------------------------------------------------------------------------------------

    def at_census(self, view: CensusView, reading: HostReading | None) -> None:
        """Note page-locked tensors, mapped files, and what workers may un-share."""
        self._between_steps = None  # some of its memory stays
        evidence = self.evidence
        if reading is not None:
            evidence.mapped_files = reading.classes.resident("file")
            if evidence.mapped_files_first is None:
                evidence.mapped_files_first = evidence.mapped_files
            evidence.pinned = _pinned_use(view.census().storages, reading)
        whole = bool(descendants()) and view.graph.all_libraries
        population = largest_population(view.graph) if whole else None
        if population is not None:
            position, entries, nbytes = population
            kind = name_of(type(view.graph.objects[position]))
            evidence.population = Population((*view.path(position), ANY_ITEM), kind, entries, nbytes)

    # --- at samples -----------------------------------------------------------------------------------------

    def at_sample(
        self, own: HostSample, below: list[ChildSample], group: CgroupMemory | None, available: int
    ) -> None:
        """Note what children un-shared, and how near limits are."""
        with self._lock:
            evidence = self.evidence
            # A peak that has not changed since the start is from before it. `host_step` resets the peak, so
            # the highest one seen counts.
            if own.peak_rss is not None and own.peak_rss != self._peak_before:
                evidence.peak_rss = max(evidence.peak_rss or 0, own.peak_rss)
            swapped = (own.swap or 0) + sum(child.swap or 0 for child in below)
            evidence.swapped = max(evidence.swapped, swapped)
            for child in below:
                self._follow(child)
            evidence.workers = [growth for growth in self._growths.values() if growth.copied]
            job = (own.pss or own.rss or 0) + sum(child.pss or 0 for child in below)
            pressure = _pressure(group, available, job)
            if pressure is not None and (
                evidence.pressure is None or pressure.usage > evidence.pressure.usage
            ):
                evidence.pressure = pressure

    def at_shared_memory(self, use: ShmUse | None) -> None:
        """Note the fullest `/dev/shm`."""
        if use is None:
            return
        if self._shm_first is None:
            self._shm_first = use.used
        highest = self.evidence.shared_memory
        if highest is None or use.used > highest.used:
            grown = max(use.used - self._shm_first, 0)
            self.evidence.shared_memory = SharedMemoryUse(use.used, use.total, grown)

    def _follow(self, child: ChildSample) -> None:
        if child.uss is None or child.shared_anon is None:
            return
        first = self._first.setdefault(child.pid, child)
        if first.uss is None or first.shared_anon is None:
            return
        # Memory that it allocated itself does not reduce what it shares.
        copied = max(min(first.shared_anon - child.shared_anon, child.uss - first.uss), 0)
        before = self._growths.get(child.pid)
        if before is None or copied > before.copied:
            self._growths[child.pid] = WorkerGrowth(child.pid, child.name, copied, child.uss)

    # --- at the end -----------------------------------------------------------------------------------------

    def conclude(self) -> HostEvidence:
        """Return the evidence. Memory that malloc has returned or handed out since no longer counts."""
        kept = self.evidence.retention
        if kept is not None and not self._much_kept:
            self.evidence.retention = None
        elif kept is not None:
            resident, trimmable = min(kept.resident, self._kept), min(kept.trimmable, self._kept)
            self.evidence.retention = replace(kept, resident=resident, trimmable=trimmable)
        return self.evidence


def _in_malloc() -> int | None:
    info = malloc_info()
    return None if info is None else info.in_use


def _pressure(group: CgroupMemory | None, available: int, job: int) -> Pressure | None:
    if group is None or group.limit is None or group.usage is None:
        return None
    return Pressure(group.usage - (group.inactive_file or 0), group.limit, available, job)


def _pinned_use(storages: list[StorageRecord], reading: HostReading) -> PinnedUse | None:
    """Page-locked tensors of torch's allocator. Memory that others registered has its exact size."""
    torch = sys.modules.get("torch")
    if reading.pinned is None or torch is None:
        return None
    blocks = [
        PinnedBlock(storage.nbytes, storage.path)
        for storage in storages
        if storage.pinned and reading.in_driver_memory(storage)
    ]
    return PinnedUse(tuple(blocks), reading.pinned.owned, str(torch.__version__))
