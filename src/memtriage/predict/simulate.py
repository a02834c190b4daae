"""From lifetimes to the allocator's counters, and to the owners of the peak instant."""

from __future__ import annotations

from dataclasses import dataclass

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.settings import Settings
from memtriage.allocator.simulator import Simulator
from memtriage.predict.lifetimes import FREE, Recording, StreamUse


@dataclass(frozen=True, slots=True)
class StepCounters:
    """The counters of one step, in bytes, and the index of the event after which `allocated` was highest."""

    peak_allocated: int
    peak_reserved: int
    end_allocated: int
    peak_event: int


def replay(
    recording: Recording, settings: Settings, device_memory: int, steps: int, limit: int | None = None
) -> list[StepCounters]:
    """Feeds a recording to the simulated allocator.

    Args:
        limit: bytes that the process may reserve; None for no limit.

    Raises:
        memtriage.allocator.events.OutOfMemory: the limit is too small, even after the cache was flushed.
    """
    simulator = Simulator(settings, device_memory=device_memory, limit=limit)
    live: dict[int, SimBlock] = {}
    begins = _step_starts(recording, steps)
    releases = set(recording.releases)
    uses = _uses_by_event(recording)
    counters: list[StepCounters] = []
    position = 0
    for step in range(-1, steps):
        end = begins[step + 1] if step + 1 < steps else len(recording.events)
        simulator.reset_peaks()
        peak, peak_event = simulator.allocated, position
        while position < end:
            if position in releases:
                simulator.empty_cache()
            for use in uses.get(position, ()):
                if use.block is None:
                    simulator.stream_done(use.stream)
                else:
                    simulator.record_stream(live[use.block], use.stream)
            event = recording.events[position]
            if event.size == FREE:
                simulator.free(live.pop(event.block))
            else:
                live[event.block] = simulator.malloc(event.size, recording.blocks[event.block].stream)
                if simulator.allocated > peak:
                    peak, peak_event = simulator.allocated, position
            position += 1
        if step >= 0:
            counters.append(StepCounters(peak, simulator.peak_reserved, simulator.allocated, peak_event))
    return counters


def _uses_by_event(recording: Recording) -> dict[int, list[StreamUse]]:
    found: dict[int, list[StreamUse]] = {}
    for use in recording.uses:
        found.setdefault(use.event, []).append(use)
    return found


def _step_starts(recording: Recording, steps: int) -> list[int]:
    """Index of the first event of each step."""
    starts: dict[int, int] = {}
    for marker in recording.markers:
        if marker.step >= 0:
            starts.setdefault(marker.step, marker.event)
    return [starts[step] for step in range(steps)]


def phase_at(recording: Recording, event: int) -> str:
    """The phase that an event belongs to."""
    phase = recording.markers[0].phase
    for marker in recording.markers:
        if marker.event > event:
            break
        phase = marker.phase
    return phase
