"""Recordings for tests: real ones from a GPU, and ones that the simulator itself makes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import numpy as np

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.trace_columns import StackTable, TraceColumns, trace_columns
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import EVENT_KINDS
from memtriage.observe.cuda import parse_segments
from memtriage.snapshots.file import loaded

DATA: Final = Path(__file__).parents[1] / "data"
H200: Final = sorted((DATA / "snapshots").glob("*.pickle.gz"))
"""Recorded on an H200 with torch 2.11 and default settings."""
UNDER_SETTINGS: Final = sorted((DATA / "allocator_traces").glob("*.pickle.gz"))
"""Recorded by `tests/gpu/test_simulator_gpu.py`; with what, a JSON file beside each says."""

MIB: Final = 1 << 20


def read(path: Path) -> tuple[TraceColumns, list[Segment]]:
    """The first device's trace, and its segments at the end."""
    with loaded(path) as raw:
        return trace_columns(raw["device_traces"][0], StackTable()), parse_segments(raw["segments"], 0)


def part(trace: TraceColumns, first: int) -> TraceColumns:
    """A trace without its oldest events, as a ring buffer keeps it."""
    return TraceColumns(
        time_us=trace.time_us[first:],
        kind=trace.kind[first:],
        address=trace.address[first:],
        size=trace.size[first:],
        stream=trace.stream[first:],
        stack=trace.stack[first:],
        device_free={},
        pool={index - first: pool for index, pool in trace.pool.items() if index >= first},
    )


def columns(events: list[AllocatorEvent]) -> TraceColumns:
    """Events as a recording has them, with pools."""
    count = len(events)
    return TraceColumns(
        time_us=np.arange(count, dtype=np.int64),
        kind=np.array([EVENT_KINDS.index(event.action) for event in events], np.uint8),
        address=np.array([event.address for event in events], np.int64),
        size=np.array([event.size for event in events], np.int64),
        stream=np.array([event.stream for event in events], np.int64),
        stack=np.zeros(count, np.int32),
        device_free={},
        pool={
            index: event.pool
            for index, event in enumerate(events)
            if event.action == "alloc" and event.pool != DEFAULT_POOL
        },
    )


def simulated(
    settings: AllocatorSettings,
    *,
    seed: int,
    count: int = 2000,
    memory: int | None = None,
    streams: tuple[int, ...] = (0,),
    pools: tuple[tuple[int, int], ...] = (DEFAULT_POOL,),
    flush_every: int = 0,
) -> tuple[TraceColumns, list[Segment], Simulator]:
    """A recording of a made-up program: it allocates, shares and frees; some sizes come again and again."""
    chance = random.Random(seed)
    events: list[AllocatorEvent] = []
    one = Simulator(settings, device_memory=memory or 1 << 37, hook=events.append)
    sizes = [int(2 ** chance.uniform(6, 26.5)) for _ in range(24)]
    live: list[SimBlock] = []
    for step in range(count):
        if flush_every and step % flush_every == flush_every - 1:
            one.empty_cache()
        if live and chance.random() < len(live) / 60:
            one.free(live.pop(chance.randrange(len(live))))
            continue
        try:
            block = one.malloc(chance.choice(sizes), chance.choice(streams), chance.choice(pools))
        except OutOfMemory:
            continue
        live.append(block)
        if len(streams) > 1 and chance.random() < 0.2:
            one.record_stream(block, chance.choice(streams))
        if chance.random() < 0.1:
            one.stream_done(chance.choice(streams))
    return columns(events), list(one.snapshot()), one
