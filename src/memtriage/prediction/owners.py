"""Whose the bytes of the peak instant are."""

from __future__ import annotations

from typing import Final

from memtriage.prediction.lifetimes import FREE, AllocationTrace
from memtriage.prediction.simulate import StepCounters, phase_at
from memtriage.prediction.trace import Trace

ROUNDING: Final = "rounding"
ACTIVATION: Final = "activation"
TEMPORARY: Final = "temporary"
KEPT: Final = "kept"


def owners_at(trace: Trace, counters: StepCounters) -> dict[str, int]:
    """Bytes by owner right after the event of the peak, largest first; sums to the allocated bytes."""
    bytes_by_owner: dict[str, int] = {}
    for number, owner in owned_at(trace, counters.peak_event):
        bytes_by_owner[owner] = bytes_by_owner.get(owner, 0) + trace.recording.blocks[number].size
    rest = counters.peak_allocated - sum(bytes_by_owner.values())
    if rest:
        bytes_by_owner[ROUNDING] = rest
    return dict(sorted(bytes_by_owner.items(), key=lambda item: -item[1]))


def owned_at(trace: Trace, event: int) -> list[tuple[int, str]]:
    """The blocks that are live right after an event, each with its owner."""
    recording = trace.recording
    starts = [marker.event for marker in recording.markers if marker.phase == "backward"]
    if phase_at(recording, event) == "forward":
        begins = min((start for start in starts if start > event), default=event + 1)
    else:
        begins = max((start for start in starts if start <= event), default=event + 1)
    needed = {
        number for number in _live_at(recording, begins - 1) if recording.blocks[number].phase == "forward"
    }
    return [
        (
            number,
            trace.owners.get(number) or recording.blocks[number].owner or _other(recording, number, needed),
        )
        for number in _live_at(recording, event)
    ]


def _other(recording: AllocationTrace, number: int, needed: set[int]) -> str:
    """Made in forward for backward, or made again by a checkpoint within backward; kept since the program
    built its model; else of the moment."""
    block = recording.blocks[number]
    if block.phase == "build":
        return KEPT
    return ACTIVATION if number in needed or (block.phase == "backward" and block.recorded) else TEMPORARY


def _live_at(recording: AllocationTrace, event: int) -> list[int]:
    live: dict[int, None] = {}
    for change in recording.events[: event + 1]:
        if change.size == FREE:
            del live[change.block]
        else:
            live[change.block] = None
    return list(live)
