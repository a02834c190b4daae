"""The pass over a recorded trace, against the simulator and for traces with entries missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.allocator.recordings import (
    ALLOC,
    ASK,
    BASE,
    CALLS,
    CONFS,
    FREED,
    GONE,
    MAP,
    MIB,
    NEW,
    OOM,
    PRIVATE_POOL,
    UNMAP,
    at,
    segment_at,
    taped,
    traced,
)

from memtriage.account.gpu_ledger import segment_totals
from memtriage.allocator.replay import ReplayedTrace, replay
from memtriage.allocator.replay_walk import rounded
from memtriage.allocator.settings import parse_conf
from memtriage.model.blocks import Segment
from memtriage.model.recording import Action, FreeRange

KIB = 1 << 10


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


@given(st.lists(st.integers(1, 1 << 38), max_size=30), st.sampled_from(CONFS))
def test_columns_are_rounded_as_single_requests_are(sizes: list[int], conf: str) -> None:
    rules = parse_conf(conf, "2.11.0")
    assert rounded(np.array(sizes, np.int64), rules).tolist() == [rules.round_size(size) for size in sizes]


Event = tuple[Action, float, float]


def ending(blocks: str) -> list[Segment]:
    """A segment such as `8 -12`, or `@20 8 -12` if it begins so many MiB behind `BASE`."""
    place, words = blocks.split(maxsplit=1) if blocks[:1] == "@" else ("@0", blocks)
    return [segment_at(float(place[1:]), words)] if words else []


def free_places(replayed: ReplayedTrace, event: int) -> list[tuple[float, float]]:
    return [((free.address - BASE) / MIB, free.size / MIB) for free in replayed.free_at_oom[event]]


# --- traces with entries missing ----------------------------------------------------------------------------

BROKEN: dict[str, tuple[list[Event], str, int, list[float], list[float], list[float]]] = {
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
    "a block is near the end of a free one": (
        [(NEW, 0, 20), (ALLOC, 9, 10)], "-9 11", 2, [0, 11], [0, 11], [20, 0],
    ),
    "a block is not so near the end of a free one": (
        [(NEW, 0, 20), (ALLOC, 9, 9.5)], "-9 9.5 -1.5", 2, [0, 9.5], [0, 9.5], [20, 0],
    ),
    "a block is where no segment is known": (
        [(NEW, 0, 20), (ALLOC, 20, 5), (ASK, 20, 5), (FREED, 20, 5), (ALLOC, 20, 5)], "-20",
        5, [0, 5, 0, 0, 0], [0, 5, 5, 0, 0], [20] * 5,
    ),
    "a segment ends while it is in use, and more happens": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ALLOC, 5, 5), (ASK, 5, 5), (GONE, 0, 20), (OOM, 0, 90)], "",
        5, [0, 5, 10, 5, 0, 0], [0, 5, 10, 10, 0, 0], [20, 0, 0, 0, 0, 0],
    ),
    "a last block awaits a stream for a reason not told": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5), (FREED, 0, 5)], "~5 -15",
        0, [0, 5, 0, 0], [0, 5, 5, 0], [20, 0, 0, 20],
    ),
    "a segment ends twice": (
        [(NEW, 0, 20), (GONE, 0, 20), (GONE, 0, 20)], "", 3, [0] * 3, [0] * 3, [20, 0, 0],
    ),
    "a block is freed twice": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5), (FREED, 0, 5), (ASK, 0, 5)], "-20",
        5, [0, 5, 0, 0, 0], [0, 5, 5, 0, 0], [20, 0, 0, 20, 20],
    ),
    "a block is freed twice and both are complete at once": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5), (FREED, 0, 5), (ASK, 0, 5), (FREED, 0, 5)], "-20",
        6, [0, 5, 0, 0, 0, 0], [0, 5, 5, 0, 0, 0], [20, 0, 0, 20, 20, 20],
    ),
    "a free is completed twice": (
        [(NEW, 0, 20), (ALLOC, 0, 5), (ASK, 0, 5), (FREED, 0, 5), (FREED, 0, 5)], "-20",
        5, [0, 5, 0, 0, 0], [0, 5, 5, 0, 0], [20, 0, 0, 20, 20],
    ),
    "a segment ends whose neighbor has blocks in use": (
        [
            (NEW, 0, 20), (NEW, 20, 20), (ALLOC, 0, 5), (ALLOC, 20, 5), (ALLOC, 25, 5), (ASK, 25, 5),
            (GONE, 0, 20),
        ],
        "@20 5 ~5 -10", 7, [0, 0, 5, 10, 15, 10, 5], [0, 0, 5, 10, 15, 15, 10], [20, 40, 20, 0, 0, 0, 0],
    ),
    "a segment ends behind one that has blocks in use": (
        [
            (NEW, 0, 20), (NEW, 20, 20), (ALLOC, 0, 20), (ALLOC, 20, 5), (GONE, 20, 20), (ASK, 0, 20),
            (FREED, 0, 20),
        ],
        "-20", 5, [0, 0, 20, 25, 20, 0, 0], [0, 0, 20, 25, 20, 20, 0], [20, 40, 20, 0, 0, 0, 20],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("events", "blocks", "exact_from", "allocated", "active", "releasable"), BROKEN.values(), ids=BROKEN
)
def test_an_entry_that_is_missing_is_made_up_for(
    events: list[Event],
    blocks: str,
    exact_from: int,
    allocated: list[float],
    active: list[float],
    releasable: list[float],
) -> None:
    replayed = traced(*events, segments=ending(blocks))
    assert (replayed.lost > 0, replayed.exact_from) == (exact_from > 0, exact_from)
    line = replayed.timeline
    assert [(figures / MIB).tolist() for figures in (line.allocated, line.active, line.releasable)] == [
        allocated, active, releasable,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("unmapped", "blocks", "exact_from", "releasable"),
    [
        ([(2, 8)], "5 -7", 3, [20, 14, 14]),
        ([(0, 20)], "5 -15", 3, [20, 14, 14]),
        ([(6, 14)], "5 -1", 0, [20, 14, 0]),
        ([(6, 14), (6, 14)], "5 -1", 4, [20, 14, 0, 0]),
    ],
)
def test_only_pages_that_are_free_can_be_unmapped(
    unmapped: list[tuple[int, int]], blocks: str, exact_from: int, releasable: list[int]
) -> None:
    events: list[Event] = [(MAP, 0, 20), (ALLOC, 0, 5), *[(UNMAP, *pages) for pages in unmapped]]
    replayed = traced(*events, segments=[segment_at(0, blocks, page=2 * MIB)])
    assert replayed.exact_from == exact_from
    assert (replayed.timeline.releasable / MIB).tolist() == releasable


def test_pages_that_are_unmapped_are_no_longer_free() -> None:
    events = [(MAP, 0, 20), (ALLOC, 0, 5), (UNMAP, 8, 4), (OOM, 0, 90), (MAP, 8, 4)]
    replayed = traced(*events, segments=[segment_at(0, "5 -15", page=2 * MIB)])
    assert replayed.lost == 0
    # The block needs half of its third page: 14 MiB of whole pages are free, 10 without two in the middle.
    assert (replayed.timeline.releasable / MIB).tolist() == [20, 14, 10, 10, 14]
    assert (replayed.timeline.reserved / MIB).tolist() == [20, 20, 16, 16, 20]
    assert free_places(replayed, 3) == [(12, 8), (5, 3)]


@pytest.mark.parametrize(
    ("unmapped", "left"),
    [
        ((6, 14), [(5, 1)]),
        ((6, 2), [(8, 12), (5, 1)]),
        ((18, 2), [(5, 13)]),
        ((5, 15), []),
        ((5, 5), [(10, 10)]),
    ],
)
def test_what_is_left_around_unmapped_pages_is_free(
    unmapped: tuple[int, int], left: list[tuple[int, int]]
) -> None:
    free = [segment_at(at, f"-{size}", page=2 * MIB) for at, size in left]
    events: list[Event] = [(MAP, 0, 20), (ALLOC, 0, 5), (UNMAP, *unmapped), (OOM, 0, 90)]
    replayed = traced(*events, segments=[segment_at(0, "5", page=2 * MIB), *free])
    assert free_places(replayed, 3) == left


def test_nothing_of_a_segment_that_ended_is_free() -> None:
    used: list[Event] = [(ALLOC, 0, 5), (ALLOC, 5, 5), (ASK, 0, 5), (FREED, 0, 5)]
    replayed = traced(
        (NEW, 0, 20), (NEW, 20, 20), *used, (GONE, 0, 20), (OOM, 0, 90), segments=ending("@20 -20")
    )
    assert free_places(replayed, 7) == [(20, 20)]


def test_pages_between_two_mapped_ranges_join_what_is_free_there() -> None:
    ends = [segment_at(0, "8 -12", page=2 * MIB), segment_at(40, "-4 16", page=2 * MIB)]
    events = [
        (OOM, 0, 90),
        (MAP, 20, 20),
        (OOM, 0, 90),
        (ALLOC, 8, 33),
        (ASK, 8, 33),
        (FREED, 8, 33),
        (UNMAP, 20, 20),
    ]
    replayed = traced(*events, segments=ends)
    assert replayed.lost == 0
    assert free_places(replayed, 0) == [(8, 12), (40, 4)]
    assert free_places(replayed, 2) == [(8, 36)]
    # Of the page at 40 the block has a half.
    assert (replayed.timeline.releasable / MIB).tolist() == [16, 36, 36, 2, 2, 36, 16]


def test_an_out_of_memory_error_sees_all_that_is_free_the_biggest_first() -> None:
    there = [
        segment_at(0, "5 -15"),
        segment_at(100, "-20", pool=PRIVATE_POOL),
        segment_at(200, "~2 6 -12", page=2 * MIB),
        segment_at(300, "-20"),
    ]
    replayed = traced((NEW, 300, 20), (OOM, 0, 90), segments=there)
    assert replayed.free_at_oom == {
        1: tuple(
            FreeRange(
                address=BASE + int(at * MIB),
                size=size * MIB,
                stream=7,
                pool=pool,
                segment=BASE + base * MIB,
                whole=whole,
            )
            for at, size, pool, base, whole in [
                (100, 20, PRIVATE_POOL, 100, True),
                (300, 20, (0, 0), 300, True),
                (5, 15, (0, 0), 0, False),
                (208, 12, (0, 0), 200, False),
            ]
        )
    }
    assert (replayed.timeline.releasable / MIB).tolist() == [32, 32]
    assert (replayed.timeline.private_pools_free / MIB).tolist() == [20, 20]


def test_of_many_out_of_memory_errors_the_first_are_kept() -> None:
    events = [(NEW, 0, 20), *[(OOM, 0, 90)] * 40]
    assert list(traced(*events, segments=[segment_at(0, "-20")]).free_at_oom) == list(range(1, 33))


TWO_SEGMENTS = [(NEW, 0, 20), (NEW, 20, 20), (ALLOC, 0, 20), (ALLOC, 20, 20)]


@pytest.mark.parametrize(
    "frees",
    [
        [(ASK, 0, 20), (FREED, 0, 20), (ASK, 20, 20), (FREED, 20, 20)],
        [(ASK, 20, 20), (FREED, 20, 20), (ASK, 0, 20), (FREED, 0, 20)],
        [(ASK, 0, 20), (ASK, 20, 20), (FREED, 0, 20), (FREED, 20, 20)],
        [(ASK, 20, 20), (ASK, 0, 20), (FREED, 20, 20), (FREED, 0, 20)],
    ],
)
def test_free_blocks_of_neighboring_segments_stay_two(frees: list[Event]) -> None:
    replayed = traced(
        *TWO_SEGMENTS, *frees, (OOM, 0, 90), segments=[segment_at(0, "-20"), segment_at(20, "-20")]
    )
    assert replayed.lost == 0
    assert free_places(replayed, 8) == [(0, 20), (20, 20)]
    assert replayed.timeline.releasable[-1] == 40 * MIB


LEFT, MIDDLE, RIGHT = (0, 5), (5, 5), (10, 10)


@pytest.mark.parametrize(
    ("order", "free"),
    [
        ([LEFT, MIDDLE, RIGHT], [(0, 10)]),
        ([LEFT, RIGHT, MIDDLE], [RIGHT, LEFT]),
        ([MIDDLE, LEFT, RIGHT], [(0, 10)]),
        ([MIDDLE, RIGHT, LEFT], [(5, 15)]),
        ([RIGHT, LEFT, MIDDLE], [RIGHT, LEFT]),
        ([RIGHT, MIDDLE, LEFT], [(5, 15)]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_free_neighbors_in_a_segment_become_one(
    order: list[tuple[int, int]], free: list[tuple[int, int]], at_once: bool
) -> None:
    def freed(*blocks: tuple[int, int]) -> list[Event]:
        if at_once:
            return [(action, *block) for block in blocks for action in (ASK, FREED)]
        return [(action, *block) for action in (ASK, FREED) for block in blocks]

    allocs: list[Event] = [(ALLOC, *block) for block in (LEFT, MIDDLE, RIGHT)]
    last = freed(order[2]) if at_once else [(ASK, *order[2]), (OOM, 0, 90), (FREED, *order[2])]
    events = [(NEW, 0, 20), *allocs, *freed(*order[:2]), (OOM, 0, 90), *last, (OOM, 0, 90)]
    replayed = traced(*events, segments=[segment_at(0, "-20")])
    assert replayed.lost == 0
    assert free_places(replayed, 8) == free
    assert free_places(replayed, len(events) - 1) == [(0, 20)]


def test_every_block_event_has_its_life() -> None:
    events = [
        (ASK, 0, 5), (FREED, 0, 5), (ALLOC, 0, 6), (ASK, 0, 6), (ALLOC, 10, 2), (FREED, 0, 6), (OOM, 0, 9),
        (FREED, 15, 3),
    ]  # fmt: skip
    replayed = traced(*events, segments=[segment_at(0, "-10 2 -8")])
    assert replayed.life.tolist() == [0, 0, 2, 2, 3, 2, -1, 1]
    assert (replayed.born.tolist(), replayed.died.tolist(), replayed.gone.tolist()) == (
        [-1, -1, 2, 4], [0, 7, 3, -1], [1, 7, 5, -1],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("conf", "reserved", "at", "asked", "taken"),
    [
        ("", 20, 0, 18.5, 18.5),
        ("", 20, 0, 19, 20),
        ("", 2, 0, 0.5, 0.5),
        ("max_split_size_mb:32", 40, 0, 31, 31),
        ("max_split_size_mb:32", 40, 0, 32, 40),
        ("max_split_size_mb:32", 60, 10, 31, 31),
        ("max_split_size_mb:32", 60, 10, 32, 50),
    ],
)
def test_what_is_left_of_a_free_block_may_stay_with_its_block(
    conf: str, reserved: float, at: float, asked: float, taken: float
) -> None:
    replayed = traced((NEW, 0, reserved), (ALLOC, at, asked), (OOM, 0, 90), conf=conf)
    assert replayed.size.tolist() == [taken * MIB]
    rest = reserved - at - taken
    assert sorted(free_places(replayed, 2)) == [(0, at)] * (at > 0) + [(at + taken, rest)] * (rest > 0)
