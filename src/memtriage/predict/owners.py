"""Whose the bytes of the peak instant are."""

from __future__ import annotations

from typing import Final

from memtriage.predict.lifetimes import FREE, Block, Recording
from memtriage.predict.simulate import StepCounters, phase_at
from memtriage.predict.trace import Trace

ROUNDING: Final = "rounding"
ACTIVATION: Final = "activation"
TEMPORARY: Final = "temporary"


def owners_at(trace: Trace, counters: StepCounters) -> dict[str, int]:
    """Bytes by owner right after the event of the peak, largest first; sums to the allocated bytes."""
    recording = trace.recording
    needed = _needed_by_backward(recording, counters.peak_event)
    found: dict[str, int] = {}
    for number in _live_at(recording, counters.peak_event):
        block = recording.blocks[number]
        owner = block.owner or trace.owners.get(number) or _other(block, number in needed)
        found[owner] = found.get(owner, 0) + block.size
    rest = counters.peak_allocated - sum(found.values())
    if rest:
        found[ROUNDING] = rest
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _other(block: Block, needed: bool) -> str:
    """Made in forward for backward, or made again by a checkpoint within backward; else of the moment."""
    return ACTIVATION if needed or (block.phase == "backward" and block.recorded) else TEMPORARY


def _live_at(recording: Recording, event: int) -> list[int]:
    live: dict[int, None] = {}
    for each in recording.events[: event + 1]:
        if each.size == FREE:
            del live[each.block]
        else:
            live[each.block] = None
    return list(live)


def _needed_by_backward(recording: Recording, event: int) -> set[int]:
    """The blocks made in the forward phases that are live when the backward of this instant begins."""
    starts = [marker.event for marker in recording.markers if marker.phase == "backward"]
    if phase_at(recording, event) == "forward":
        begins = min((start for start in starts if start > event), default=event + 1)
    else:
        begins = max((start for start in starts if start <= event), default=event + 1)
    return {
        number for number in _live_at(recording, begins - 1) if recording.blocks[number].phase == "forward"
    }
