"""What a recorded run would have reserved under other allocator settings.

The allocations and frees of the recording go through the simulator in order, under each setting. Known
limitations: new segments get other addresses than in the recording, so up to torch 2.12 ties between blocks
of equal size are broken differently; a program that reacts to a lack of memory (it retries with a smaller
batch) is assumed to act as recorded; what was alive before the recording is allocated again in order of
address; if memory is limited, every flush of the cache in the recording is assumed to be caused by that
limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.feed import GIVEN_BACK, Feed
from memtriage.allocator.priming import Blocks, prime
from memtriage.allocator.recorded_start import starting_state
from memtriage.allocator.replay import recorded_settings
from memtriage.allocator.requests import RequestLog
from memtriage.allocator.settings import NEWEST, AllocatorSettings, ConfError, parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import Segment
from memtriage.model.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    DeviceRecording,
    Events,
)
from memtriage.model.units import MIB

_BLOCK_EVENTS: Final = (ALLOC, FREE_REQUESTED, FREE_COMPLETED)

TRIED_SPLIT_SIZES: Final = (128 * MIB, 512 * MIB)
"""A small and a large `max_split_size`: what helps depends on the sizes that come again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How much there is, in bytes; None for no limit.

    Attributes:
        capacity: what the driver has for this process's allocator.
        limit: what the process may reserve (`torch.cuda.set_per_process_memory_fraction`).
    """

    capacity: int | None = None
    limit: int | None = None


UNLIMITED: Final = Memory()


class WhatIf(NamedTuple):
    """What came of a recording under some settings.

    Attributes:
        simulator: the allocator after the last event, or after the one at which memory ran out.
        fits: no allocation fails, nor one that failed in the recording.
    """

    simulator: Simulator
    fits: bool


def alternatives(recorded: AllocatorSettings) -> dict[str, AllocatorSettings]:
    """Settings worth a try, by their text; without the one that is set already."""
    change = msgspec.structs.replace
    expandable = change(recorded, expandable_segments=True, max_split_size=None)
    tried = {"expandable_segments:True": expandable}
    for size in TRIED_SPLIT_SIZES:
        name = f"max_split_size_mb:{size // MIB}"
        tried[name] = change(recorded, expandable_segments=False, max_split_size=size)
    return {name: settings for name, settings in tried.items() if settings != recorded}


def settings_of(recorded: Mapping[str, object]) -> AllocatorSettings:
    """The settings of a recording: by the text that it keeps, else by its fields.

    No recording names its version of torch: the newest is assumed.
    """
    try:
        return parse_conf(str(recorded.get("PYTORCH_CUDA_ALLOC_CONF") or ""), NEWEST)
    except ConfError:
        expandable = recorded.get("expandable_segments") is True
        return msgspec.structs.replace(recorded_settings(recorded), expandable_segments=expandable)


def what_if(
    trace: Events,
    segments: Sequence[Segment],
    recorded: AllocatorSettings,
    settings: AllocatorSettings,
    *,
    memory: Memory = UNLIMITED,
    primed: Blocks = (),
    log: RequestLog | None = None,
) -> WhatIf:
    """Replay a recording under other settings; it begins with what was alive and nothing else.

    Args:
        trace: the events of one device.
        segments: its segments after the last of them.
        recorded: the settings it was recorded with.
        settings: those to try.
        memory: what there is; see `known_memory`.
        primed: sizes of blocks that are allocated and freed first.
        log: collects what is asked for.
    """
    simulator = Simulator(settings, capacity=memory.capacity, limit=memory.limit, hook=log)
    start = starting_state(trace, segments, recorded)
    fits = True
    flushing = False
    try:
        prime(simulator, primed)
        live = {one.address: simulator.malloc(one.requested, one.stream) for one in start.blocks}
        feed = Feed(simulator, trace, segments, live)
        for index, kind in enumerate(trace.kind.tolist()):
            if kind in _BLOCK_EVENTS:
                flushing = False
                feed.event(index)
            elif kind in GIVEN_BACK:
                if memory == UNLIMITED and not flushing:
                    feed.empty_cache(index)
                    if log is not None:
                        log.emptied()
                flushing = True
            elif kind == OOM:
                fits = fits and feed.can_allocate(index)
    except OutOfMemory:
        fits = False
    return WhatIf(simulator, fits)


def known_memory(recording: DeviceRecording) -> Memory:
    """What memory the recorded process certainly had, where it ran out of it; else `UNLIMITED`.

    The driver's free memory tells it, unless that would have been enough: then a limit of the process was
    met. No recording has that limit: what was reserved at most replaces it.
    """
    if not recording.ooms:
        return UNLIMITED
    reached = int(max(recording.timeline.reserved.max(initial=0), recording.start[1]))
    physical = [
        oom.reserved + oom.device_free
        for oom in recording.ooms
        if oom.device_free is not None and oom.device_free < oom.requested
    ]
    return Memory(capacity=max([reached, *physical])) if physical else Memory(limit=reached)
