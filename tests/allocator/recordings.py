"""Recordings for tests: real ones from a GPU, and ones that the simulator itself makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from hypothesis import strategies as st

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.replay import ReplayedTrace, replay
from memtriage.allocator.settings import AllocatorSettings, parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.trace_columns import StackTable, last_events, trace_columns
from memtriage.model.blocks import DEFAULT_POOL, Block, BlockState, Segment
from memtriage.model.recording import EVENT_KINDS, Action, Events
from memtriage.observe.cuda import parse_segments
from memtriage.snapshots.file import loaded

DATA: Final = Path(__file__).parents[1] / "data"
H200: Final = sorted((DATA / "snapshots").glob("*.pickle.gz"))
"""Recorded on an H200 with torch 2.11 and default settings."""
UNDER_SETTINGS: Final = sorted((DATA / "allocator_traces").glob("*.pickle.gz"))
"""Recorded by `tests/gpu/test_simulator_gpu.py`; with what, a JSON file beside each says."""

MIB: Final = 1 << 20


def read(path: Path) -> tuple[Events, list[Segment]]:
    """The first device's trace, and its segments at the end."""
    with loaded(path) as raw:
        return trace_columns(raw["device_traces"][0], StackTable()), parse_segments(raw["segments"], 0)


def part(trace: Events, first: int) -> Events:
    """A trace without its oldest events, as a ring buffer keeps it."""
    return last_events(trace, len(trace) - first)


def columns(events: list[AllocatorEvent]) -> Events:
    """Events as a recording has them, with pools."""
    count = len(events)
    return Events(
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
) -> tuple[Events, list[Segment], Simulator]:
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


# --- programs that the simulator runs and the replay replays ------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(4096, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 90 * MIB),
)
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:4",
)
PRIVATE_POOL = (0, 3)

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 0, 1, 7])),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["record", "done", "empty"]), st.integers(0, 1000), st.just(0)),
    ),
    min_size=1,
    max_size=60,
)


@dataclass
class Taped:
    """A program run by the simulator: its events, and the truth at the events that end a call."""

    conf: str
    capacity: int | None = None
    events: list[AllocatorEvent] = field(default_factory=list)
    truth: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    live: list[SimBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = parse_conf(self.conf, "2.11.0")
        self.simulator = Simulator(self.settings, capacity=self.capacity, hook=self.events.append)

    def do(self, call: tuple[str, int, int]) -> None:
        what, amount, which = call
        simulator = self.simulator
        if what == "malloc":
            pool = PRIVATE_POOL if which == 7 else (0, 0)
            try:
                self.live.append(simulator.malloc(amount, stream=which % 2, pool=pool))
            except OutOfMemory:
                pass
        elif what == "free" and self.live:
            simulator.free(self.live.pop(amount % len(self.live)))
        elif what == "record" and self.live:
            simulator.record_stream(self.live[amount % len(self.live)], 5)
        elif what == "done":
            simulator.synchronize()
        elif what == "empty":
            simulator.empty_cache()
        if self.events:
            self.truth[len(self.events) - 1] = (
                simulator.allocated,
                simulator.active,
                simulator.reserved,
                simulator.releasable,
            )

    def columns(self, first: int = 0) -> Events:
        return replace(columns(self.events[first:]), pool={})

    def segments(self) -> tuple[Segment, ...]:
        return self.simulator.snapshot()

    def replayed(self, first: int = 0) -> ReplayedTrace:
        return replay(self.columns(first), self.segments(), self.settings, {})


def taped(conf: str, calls: list[tuple[str, int, int]], capacity: int | None = None) -> Taped:
    tape = Taped(conf, capacity)
    for call in calls:
        tape.do(call)
    return tape


def at(replayed: ReplayedTrace, event: int) -> tuple[int, int, int, int]:
    line = replayed.timeline
    free_segments = line.releasable + line.private_pools_free
    return tuple(int(series[event]) for series in (line.allocated, line.active, line.reserved, free_segments))


# --- traces by hand -----------------------------------------------------------------------------------------

BASE: Final = 1 << 40
NEW, ALLOC, ASK, FREED, GONE = "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"
MAP, UNMAP, OOM = "segment_map", "segment_unmap", "oom"


def segment_at(
    at: float, blocks: str, *, page: int | None = None, pool: tuple[int, int] = DEFAULT_POOL
) -> Segment:
    """A segment so many MiB behind `BASE`, with blocks such as `8 -12`.

    Numbers are MiB, with `-` of a free block and `~` of one that awaits a stream.
    """
    made, address = [], BASE + int(at * MIB)
    for text in blocks.split():
        state: BlockState = "free" if text[0] == "-" else "awaiting" if text[0] == "~" else "active"
        size = int(float(text.lstrip("-~")) * MIB)
        requested = 0 if state == "free" else size
        made.append(Block(address=address, size=size, requested=requested, state=state))
        address += size
    return Segment(
        device=0, address=made[0].address, size=address - made[0].address, stream=7, pool=pool,
        expandable=page is not None, blocks=tuple(made), page=page,
    )  # fmt: skip


def trace_of(*events: tuple[Action, float, float], pools: dict[int, tuple[int, int]] | None = None) -> Events:
    """Events so many MiB behind `BASE`, of so many MiB, on stream 7, with stacks 1, 2, 3…"""
    return Events(
        time_us=np.arange(len(events), dtype=np.int64),
        kind=np.array([EVENT_KINDS.index(kind) for kind, _, _ in events], np.uint8),
        address=np.array([BASE + int(at * MIB) for _, at, _ in events], np.int64),
        size=np.array([int(size * MIB) for _, _, size in events], np.int64),
        stream=np.full(len(events), 7, np.int64),
        stack=np.arange(1, len(events) + 1, dtype=np.int32),
        device_free={},
        pool=pools or {},
    )


def traced(
    *events: tuple[Action, float, float],
    segments: Sequence[Segment] = (),
    conf: str = "",
    stacks: dict[int, int] | None = None,
    pools: dict[int, tuple[int, int]] | None = None,
) -> ReplayedTrace:
    """The replay of events as `trace_of` makes them."""
    return replay(trace_of(*events, pools=pools), segments, parse_conf(conf, "2.11.0"), stacks or {})
