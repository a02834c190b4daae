"""The replay against the simulator, which knows the truth after every call."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.account.gpu_ledger import segment_totals
from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.replay import ReplayedTrace, recorded_settings, replay
from memtriage.allocator.replay_walk import rounded
from memtriage.allocator.settings import AllocatorSettings, parse_conf
from memtriage.allocator.simulator import OutOfMemory, Simulator
from memtriage.allocator.trace_columns import TraceColumns
from memtriage.model.blocks import Segment
from memtriage.model.recording import EVENT_KINDS

KIB, MIB = 1 << 10, 1 << 20
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
POOL = (0, 3)


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
            pool = POOL if which == 7 else (0, 0)
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

    def columns(self, first: int = 0) -> TraceColumns:
        events = self.events[first:]
        codes = [EVENT_KINDS.index(event.action) for event in events]
        return TraceColumns(
            time_us=np.arange(first, first + len(events), dtype=np.int64),
            kind=np.array(codes, np.uint8),
            address=np.array([event.address for event in events], np.int64),
            size=np.array([event.size for event in events], np.int64),
            stream=np.array([event.stream for event in events], np.int64),
            stack=np.zeros(len(events), np.int32),
            device_free={},
            pool={},
        )

    def segments(self) -> tuple[Segment, ...]:
        return self.simulator.snapshot()

    def replayed(self, first: int = 0) -> ReplayedTrace:
        return replay(self.columns(first), self.segments(), self.settings, {})


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 0, 1, 7])),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["record", "done", "empty"]), st.integers(0, 1000), st.just(0)),
    ),
    min_size=1,
    max_size=60,
)


def taped(conf: str, calls: list[tuple[str, int, int]], capacity: int | None = None) -> Taped:
    tape = Taped(conf, capacity)
    for call in calls:
        tape.do(call)
    return tape


def at(replayed: ReplayedTrace, event: int) -> tuple[int, int, int, int]:
    line = replayed.timeline
    free_segments = line.releasable + line.private_pools_free
    return tuple(int(series[event]) for series in (line.allocated, line.active, line.reserved, free_segments))


@settings(deadline=None, max_examples=150)
@given(conf=st.sampled_from(CONFS), calls=CALLS)
def test_every_figure_is_the_allocators_own_after_every_call(
    conf: str, calls: list[tuple[str, int, int]]
) -> None:
    tape = taped(conf, calls)
    replayed = tape.replayed()
    assert replayed.lost == 0
    assert replayed.exact_from == 0
    for event, truth in tape.truth.items():
        assert at(replayed, event) == truth


@settings(deadline=None, max_examples=150)
@given(conf=st.sampled_from(CONFS), calls=CALLS, cut=st.floats(0, 1))
def test_a_trace_cut_at_its_start_says_from_where_it_is_exact(
    conf: str, calls: list[tuple[str, int, int]], cut: float
) -> None:
    tape = taped(conf, calls)
    first = int(cut * len(tape.events))
    replayed = tape.replayed(first)
    for event, truth in tape.truth.items():
        if event - first >= replayed.exact_from:
            assert at(replayed, event - first) == truth


@settings(deadline=None, max_examples=80)
@given(conf=st.sampled_from(CONFS), calls=CALLS, first=st.integers(0, 100))
def test_the_end_is_the_segments_to_the_byte(
    conf: str, calls: list[tuple[str, int, int]], first: int
) -> None:
    tape = taped(conf, calls)
    first = min(first, len(tape.events))
    replayed, totals = tape.replayed(first), segment_totals(tape.segments())
    alive = replayed.died < 0
    assert int(replayed.size[alive].sum()) == totals.allocated
    assert int(replayed.requested[alive].sum()) == totals.requested
    if first < len(tape.events):
        assert at(replayed, -1)[:3] == (totals.allocated, totals.allocated + totals.awaiting, totals.reserved)


@settings(deadline=None, max_examples=60)
@given(calls=CALLS, holes=st.sets(st.integers(0, 200), max_size=6))
def test_entries_missing_in_the_middle_are_noticed_and_survived(
    calls: list[tuple[str, int, int]], holes: set[int]
) -> None:
    tape = taped("", calls)
    segments = tape.segments()
    tape.events = [one for number, one in enumerate(tape.events) if number not in holes]
    replayed = replay(tape.columns(), segments, tape.settings, {})
    assert int(replayed.size[replayed.died < 0].sum()) == segment_totals(segments).allocated
    assert (replayed.size >= replayed.requested).all()


def test_a_block_keeps_a_small_rest_and_frees_it_again() -> None:
    tape = taped("", [("malloc", 20 * MIB, 0), ("free", 0, 0), ("malloc", 20 * MIB - 512 * KIB, 0)])
    replayed = tape.replayed()
    assert replayed.size.tolist() == [20 * MIB, 20 * MIB]
    assert replayed.requested.tolist() == [20 * MIB, 20 * MIB - 512 * KIB]


def test_the_free_blocks_at_an_out_of_memory_error_are_kept() -> None:
    calls = [("malloc", 30 * MIB, 0)] * 3 + [("free", 1, 0), ("malloc", 20 * MIB, 0), ("malloc", 40 * MIB, 0)]
    tape = taped("", calls, capacity=100 * MIB)
    assert tape.events[-1].action == "oom"
    ((event, free),) = tape.replayed().free_at_oom.items()
    assert event == len(tape.events) - 1
    assert [(block.size, block.whole) for block in free] == [(10 * MIB, False)]


def test_what_was_there_before_the_trace_has_no_birth() -> None:
    tape = taped("", [("malloc", 5 * MIB, 0), ("malloc", 3 * MIB, 0), ("free", 0, 0), ("malloc", 2 * MIB, 0)])
    first = next(n for n, one in enumerate(tape.events) if one.action == "free_requested")
    replayed = tape.replayed(first)
    assert replayed.start == (8 * MIB, 20 * MIB)
    assert sorted(zip(replayed.born.tolist(), replayed.requested.tolist(), strict=True))[:2] == [
        (-1, 3 * MIB),
        (-1, 5 * MIB),
    ]


def test_pools_are_those_of_the_segments() -> None:
    tape = taped("", [("malloc", MIB, 0), ("malloc", MIB, 7)])
    assert tape.replayed().pool == [(0, 0), POOL]


def test_without_events_the_blocks_are_all_there_is() -> None:
    tape = taped("", [("malloc", 3 * MIB, 0), ("malloc", 1000, 0)])
    replayed = tape.replayed(len(tape.events))
    assert sorted(replayed.size.tolist()) == [1024, 3 * MIB]
    assert len(replayed.timeline.allocated) == 0
    assert replayed.start == (3 * MIB + 1024, 22 * MIB)


@given(st.lists(st.integers(1, 1 << 38), max_size=30), st.sampled_from(CONFS))
def test_columns_are_rounded_as_single_requests_are(sizes: list[int], conf: str) -> None:
    rules = parse_conf(conf, "2.11.0")
    assert rounded(np.array(sizes, np.int64), rules).tolist() == [rules.round_size(size) for size in sizes]


@pytest.mark.parametrize("limit", [-1, 0, None, (1 << 64) - 1])
def test_a_recorded_limit_that_is_none(limit: int | None) -> None:
    assert recorded_settings({"max_split_size": limit}).max_split_size is None


def test_recorded_settings_are_read() -> None:
    recorded = {
        "max_split_size": 32 * MIB,
        "roundup_power2_divisions": {str(1 << power): 8 if power < 8 else 0 for power in range(16)},
        "a_newer_key": object(),
    }
    expected = replace_divisions((8,) * 8 + (0,) * 8, 32 * MIB)
    assert recorded_settings(recorded) == expected
    assert recorded_settings({}) == AllocatorSettings()


def replace_divisions(divisions: tuple[int, ...], limit: int) -> AllocatorSettings:
    return AllocatorSettings(max_split_size=limit, roundup_power2_divisions=divisions)


def test_blocks_older_than_the_trace_have_the_stack_of_the_snapshot() -> None:
    tape = taped("", [("malloc", 30 * MIB, 0), ("malloc", 40 * MIB, 0)])
    older, freed = (block.address for block in tape.live)
    cut = len(tape.events)
    for call in (("free", 1, 0), ("malloc", 60 * MIB, 0)):
        tape.do(call)
    stacks = {older: 7, freed: 8}
    replayed = replay(tape.columns(cut), tape.segments(), tape.settings, stacks)
    by_name = dict(zip(replayed.address.tolist(), replayed.stack.tolist(), strict=True))
    assert by_name[older] == 7
    assert by_name[freed] == 0, "what was freed meanwhile is not in the snapshot"
