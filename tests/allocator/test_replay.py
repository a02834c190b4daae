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
from memtriage.model.blocks import Block, BlockState, Segment
from memtriage.model.recording import EVENT_KINDS, Action, FreeRange

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


# --- traces with entries missing ----------------------------------------------------------------------------

BASE = 1 << 40


def traced(*events: tuple[Action, int, int], blocks: str = "", page: int | None = None) -> ReplayedTrace:
    """The replay of events at so many MiB, of so many MiB; the segment of the end has blocks such as `8 -12`.

    Numbers are MiB, with `-` of a free block and `~` of one that awaits a stream.
    """
    made, address = [], BASE
    for text in blocks.split():
        state: BlockState = "free" if text[0] == "-" else "awaiting" if text[0] == "~" else "active"
        size = int(text.lstrip("-~")) * MIB
        made.append(Block(address=address, size=size, requested=size if state != "free" else 0, state=state))
        address += size
    segment = Segment(
        device=0, address=BASE, size=address - BASE, stream=0, pool=(0, 0), expandable=page is not None,
        blocks=tuple(made), page=page,
    )  # fmt: skip
    columns = TraceColumns(
        time_us=np.arange(len(events), dtype=np.int64),
        kind=np.array([EVENT_KINDS.index(kind) for kind, _, _ in events], np.uint8),
        address=np.array([BASE + at * MIB for _, at, _ in events], np.int64),
        size=np.array([size * MIB for _, _, size in events], np.int64),
        stream=np.zeros(len(events), np.int64),
        stack=np.zeros(len(events), np.int32),
        device_free={},
        pool={},
    )
    return replay(columns, [segment] if made else [], AllocatorSettings(), {})


NEW, ALLOC, ASK, FREED, GONE = "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"
MAP, UNMAP, OOM = "segment_map", "segment_unmap", "oom"

BROKEN: dict[str, tuple[list[tuple[Action, int, int]], str, int, list[int], list[int], list[int]]] = {
    # events, blocks of the end; first event from which all is exact; allocated, active, releasable after each
    "a free is missing": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ALLOC, 0, 8)], "8 -12", 3, [0, 5, 8], [0, 5, 8], [20, 0, 0],
    ),
    "so is one of a larger block": (
        [(NEW, 0, 20), (ALLOC, 0, 8), (ALLOC, 5, 5)], "-5 5 -10", 3, [0, 8, 5], [0, 8, 5], [20, 0, 0],
    ),
    "a block is larger than what is free": (
        [(NEW, 0, 20), (ALLOC, 0, 10), (ALLOC, 10, 8), (ASK, 0, 10), (FREED, 0, 10), (ALLOC, 0, 12)], "12 -8",
        6, [0, 10, 18, 8, 8, 12], [0, 10, 18, 18, 8, 12], [20, 0, 0, 0, 0, 0],
    ),
    "a block is in the middle of a free one": (
        [(NEW, 0, 40), (ALLOC, 15, 10)], "-15 10 -15", 2, [0, 10], [0, 10], [40, 0],
    ),
    "the completion of a free is missing": (
        [(NEW, 0, 20), (ALLOC, 0, 12), (ASK, 0, 12), (ALLOC, 0, 10)], "10 -10",
        4, [0, 12, 0, 10], [0, 12, 12, 10], [20, 0, 0, 0],
    ),
    "the request of a free is missing": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (FREED, 0, 5)], "-20", 0, [0, 5, 0], [0, 5, 0], [20, 0, 20],
    ),
    "a segment ends while its block is in use": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (GONE, 0, 20)], "", 3, [0, 5, 0], [0, 5, 0], [20, 0, 0],
    ),
    "a segment ends while its block awaits a stream": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5), (GONE, 0, 20)], "",
        4, [0, 5, 0, 0], [0, 5, 5, 0], [20, 0, 0, 0],
    ),
    "the end of a segment is missing": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (NEW, 0, 20)], "-20", 3, [0, 5, 0], [0, 5, 0], [20, 0, 20],
    ),
    "a last block is free": ([(NEW, 0, 20), (ALLOC, 0, 5)], "-20", 2, [0, 0], [0, 0], [20, 0]),
    "a last block awaits a stream": ([(NEW, 0, 20), (ALLOC, 0, 5)], "~5 -15", 2, [0, 0], [0, 5], [20, 0]),
    "a last block has another size": ([(NEW, 0, 20), (ALLOC, 0, 5)], "6 -14", 2, [0, 6], [0, 6], [20, 0]),
    "a last block that awaited a stream is free": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5)], "-20", 3, [0, 5, 0], [0, 5, 0], [20, 0, 0],
    ),
    "nothing is missing, a block awaits a stream": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5)], "~5 -15", 0, [0, 5, 0], [0, 5, 5], [20, 0, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("events", "blocks", "exact_from", "allocated", "active", "releasable"), BROKEN.values(), ids=BROKEN
)
def test_an_entry_that_is_missing_is_made_up_for(
    events: list[tuple[Action, int, int]],
    blocks: str,
    exact_from: int,
    allocated: list[int],
    active: list[int],
    releasable: list[int],
) -> None:
    replayed = traced(*events, blocks=blocks)
    assert (replayed.lost > 0, replayed.exact_from) == (exact_from > 0, exact_from)
    line = replayed.timeline
    assert [(figures / MIB).tolist() for figures in (line.allocated, line.active, line.releasable)] == [
        allocated, active, releasable,
    ]  # fmt: skip


def test_pages_that_are_unmapped_are_no_longer_free() -> None:
    events = [(MAP, 0, 20), (ALLOC, 0, 5), (UNMAP, 8, 4), (OOM, 0, 90), (MAP, 8, 4)]
    replayed = traced(*events, blocks="5 -15", page=2 * MIB)
    assert replayed.lost == 0
    # The block needs half of its third page: 14 MiB of whole pages are free, 10 without two in the middle.
    assert (replayed.timeline.releasable / MIB).tolist() == [20, 14, 10, 10, 14]
    assert (replayed.timeline.reserved / MIB).tolist() == [20, 20, 16, 16, 20]
    assert [((free.address - BASE) // MIB, free.size // MIB) for free in replayed.free_at_oom[3]] == [
        (12, 8), (5, 3),
    ]  # fmt: skip


def test_pages_that_were_in_use_cannot_be_unmapped() -> None:
    replayed = traced((MAP, 0, 20), (ALLOC, 0, 5), (UNMAP, 2, 8), blocks="5 -7", page=2 * MIB)
    assert replayed.lost > 0
    assert (replayed.timeline.releasable / MIB).tolist() == [20, 14, 14]


def test_a_segment_without_blocks_is_whole_at_an_out_of_memory_error() -> None:
    (free,) = traced((NEW, 0, 20), (OOM, 0, 90), blocks="-20").free_at_oom[1]
    assert free == FreeRange(address=BASE, size=20 * MIB, stream=0, pool=(0, 0), segment=BASE, whole=True)


def test_of_many_out_of_memory_errors_the_first_are_kept() -> None:
    events = [(NEW, 0, 20), *[(OOM, 0, 90)] * 40]
    assert list(traced(*events, blocks="-20").free_at_oom) == list(range(1, 33))


@pytest.mark.parametrize(("asked", "taken"), [(18, 18), (19, 20)])
def test_a_rest_of_at_most_a_mebibyte_stays_with_its_block(asked: int, taken: int) -> None:
    replayed = traced((NEW, 0, 20), (ALLOC, 0, asked), blocks="20" if taken == 20 else "18 -2")
    assert (replayed.lost, replayed.size.tolist()) == (0, [taken * MIB])
