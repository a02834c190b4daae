"""The replay of a recorded trace: every block's size and life, and what was free, event by event.

A trace has requested sizes and addresses, but not the sizes of blocks. The replay keeps the free blocks as
the allocator does (they merge with their neighbors, and the rest of a used one is split off), so sizes, and
with them all figures, are exact to the byte.

Known limitations: entries missing in the middle (a recording that paused, `skip_actions`) cannot be restored;
`ReplayedTrace.exact_from` says after which event the figures are exact again. Pages of expandable segments
are assumed to have their default size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.recorded_start import starting_state
from memtriage.allocator.replay_walk import ReplayWalk
from memtriage.allocator.settings import DIVISION_INTERVALS, AllocatorSettings, ConfError
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import (
    ALLOC,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    FreeRange,
    Int32s,
    Int64s,
    Timeline,
)

_NO_LIMIT: Final = 1 << 62
"""From here on a recorded `max_split_size` means none (it is -1, or the largest number of a type)."""


@dataclass(frozen=True, slots=True)
class ReplayedTrace:
    """What the replay of one device's trace gives; the columns are those of `model.recording.Lives`.

    Attributes:
        born, died, gone, address, size, requested, stream, stack: one entry a life.
        pool: pool of each life's segment.
        life: index of the life for each alloc and free event, -1 for others.
        timeline: figures after each event.
        start: allocated and reserved bytes before the first event.
        exact_from: index of the first event from which on all is exact.
        free_at_oom: free blocks at the first `MAX_OOMS` out-of-memory events, biggest first, by event.
        lost: events that contradict what was known, because entries between are missing.
    """

    born: Int32s
    died: Int32s
    gone: Int32s
    address: Int64s
    size: Int64s
    requested: Int64s
    stream: Int64s
    stack: Int32s
    pool: list[tuple[int, int]]
    life: Int32s
    timeline: Timeline
    start: tuple[int, int]
    exact_from: int
    free_at_oom: dict[int, tuple[FreeRange, ...]]
    lost: int


def recorded_settings(recorded: Mapping[str, object]) -> AllocatorSettings:
    """What decides sizes, from a snapshot's `allocator_settings`; defaults for what is missing.

    Raises:
        ConfError: the divisions are not numbers by size.
    """
    limit = recorded.get("max_split_size")
    divisions = recorded.get("roundup_power2_divisions")
    table = [0] * DIVISION_INTERVALS
    if isinstance(divisions, Mapping):
        counts = {key: value for key, value in divisions.items() if isinstance(key, int | str)}
        for interval in range(DIVISION_INTERVALS):
            count = counts.get(str(1 << interval), counts.get(1 << interval)) or 0
            if type(count) is not int or not 0 <= count < _NO_LIMIT or count & (count - 1):
                raise ConfError("roundup_power2_divisions: expected 0 or a power of two for each size")
            table[interval] = count
    bounded = isinstance(limit, int) and 0 < limit < _NO_LIMIT
    return AllocatorSettings(
        max_split_size=limit if isinstance(limit, int) and bounded else None,
        roundup_power2_divisions=tuple(table),
    )


def replay(
    trace: Events,
    segments: Sequence[Segment],
    settings: AllocatorSettings,
    block_stacks: Mapping[int, int],
) -> ReplayedTrace:
    """Replay one device's trace.

    Args:
        trace: its events.
        segments: its segments at the moment of the snapshot.
        settings: the allocator's, as recorded.
        block_stacks: number of the stack that a block of those segments remembers, by address.
    """
    start = starting_state(trace, segments, settings)
    walk = ReplayWalk(trace, start, settings)
    walk.run()
    walk.settle(segments)
    return _result(walk, segments, block_stacks)


def _result(walk: ReplayWalk, segments: Sequence[Segment], block_stacks: Mapping[int, int]) -> ReplayedTrace:
    trace, old, late = walk.trace, walk.start.blocks, walk.late
    allocs = np.flatnonzero(trace.kind == ALLOC)
    last = len(trace) - 1
    born = np.concatenate([np.full(len(old), -1), allocs, np.full(len(late), last)]).astype(np.int32)
    size = np.array(walk.sizes + [size for _, size, _ in late], np.int64)
    died = np.array(walk.died + [-1] * len(late), np.int32)
    gone = np.array(walk.gone + [-1] * len(late), np.int32)
    address = _joined(
        [block.address for block in old], trace.address[allocs], [block for block, _, _ in late]
    )
    stack = _joined([0] * len(old), trace.stack[allocs], [0] * len(late)).astype(np.int32)
    for life in np.flatnonzero((died < 0) & (stack == 0)).tolist():
        stack[life] = block_stacks.get(int(address[life]), 0)
    homes = [*walk.homes, *([-1] * len(late))]
    timeline = _timeline(walk, segments, born, died, gone, size)
    known = [walk.died[life] for life, one in enumerate(old) if one.guessed]
    return ReplayedTrace(
        born=born,
        died=died,
        gone=gone,
        address=address,
        size=size,
        requested=_joined([block.requested for block in old], trace.size[allocs], [r for _, _, r in late]),
        stream=_joined([block.stream for block in old], trace.stream[allocs], [0] * len(late)),
        stack=stack,
        pool=[
            trace.pool.get(event) or (walk.regions[home].pool if home >= 0 else DEFAULT_POOL)
            for event, home in zip(born.tolist(), homes, strict=True)
        ],
        life=walk.life,
        timeline=timeline,
        start=(int(size[born < 0].sum()), _reserved_at_start(walk.trace, segments)),
        exact_from=max([walk.exact_from, *(index + 1 for index in known)]),
        free_at_oom=walk.at_oom,
        lost=walk.lost,
    )


def _reserved_at_start(trace: Events, segments: Sequence[Segment]) -> int:
    gains, losses = _segment_events(trace)
    change = int(trace.size[gains].sum()) - int(trace.size[losses].sum())
    return sum(segment.size for segment in segments) - change


def _timeline(
    walk: ReplayWalk, segments: Sequence[Segment], born: Int32s, died: Int32s, gone: Int32s, size: Int64s
) -> Timeline:
    trace = walk.trace
    began, ended, freed = born >= 0, died >= 0, gone >= 0
    allocated, active, reserved, releasable, private = np.zeros((5, len(trace)), np.int64)
    np.add.at(allocated, born[began], size[began])
    active += allocated
    np.subtract.at(allocated, died[ended], size[ended])
    np.subtract.at(active, gone[freed], size[freed])
    gains, losses = _segment_events(trace)
    reserved[gains] = trace.size[gains]
    reserved[losses] = -trace.size[losses]
    at, by = np.array(walk.released_at, np.int64), np.array(walk.released_by, np.int64)
    in_private = np.array([region.pool != DEFAULT_POOL for region in walk.regions], np.bool_)
    kept = in_private[np.array(walk.released_in, np.int64)]
    np.add.at(releasable, at[~kept], by[~kept])
    np.add.at(private, at[kept], by[kept])
    old = int(size[~began].sum())
    waiting = sum(size for _, size in walk.start.occupied)
    return Timeline(
        allocated=np.cumsum(allocated) + old,
        active=np.cumsum(active) + old + waiting,
        reserved=np.cumsum(reserved) + _reserved_at_start(walk.trace, segments),
        releasable=np.cumsum(releasable) + walk.releasable_at_start[0],
        private_pools_free=np.cumsum(private) + walk.releasable_at_start[1],
    )


def _segment_events(trace: Events) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the events that add and that take away reserved bytes."""
    gains = (trace.kind == SEGMENT_ALLOC) | (trace.kind == SEGMENT_MAP)
    losses = (trace.kind == SEGMENT_FREE) | (trace.kind == SEGMENT_UNMAP)
    return gains, losses


def _joined(old: Sequence[int], traced: NDArray[np.integer[Any]], late: Sequence[int]) -> Int64s:
    return np.concatenate([np.array(old, np.int64), traced.astype(np.int64), np.array(late, np.int64)])
