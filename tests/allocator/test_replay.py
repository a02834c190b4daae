"""What the replay says of a recording, against the simulator, which knows the truth after every call."""

from __future__ import annotations

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
    MIB,
    PRIVATE_POOL,
    at,
    segment_at,
    taped,
    traced,
)

from memtriage.account.gpu_ledger import segment_totals
from memtriage.allocator.replay import recorded_settings, replay
from memtriage.allocator.settings import AllocatorSettings


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


def test_the_unsplit_rest_of_a_block_from_before_the_trace_contradicts_nothing() -> None:
    calls = [("malloc", 5 * MIB, 0), ("malloc", 4 * MIB, 0), ("malloc", 3 * MIB, 0), ("free", 1, 0)]
    calls += [("malloc", 4 * MIB - MIB // 2, 0), ("free", 1, 0)]  # half a MiB stays with the block
    before = len(taped("", calls).events)
    replayed = taped("", [*calls, ("malloc", 2 * MIB, 0), ("free", 1, 0)]).replayed(before)
    assert replayed.lost == 0
    assert replayed.start == (9 * MIB, 20 * MIB)
    assert replayed.timeline.allocated.tolist() == [11 * MIB, 7 * MIB, 7 * MIB]


def test_every_block_has_its_entry_old_ones_first_and_unexplained_ones_last() -> None:
    there = [segment_at(0, "4 ~2 6 -3 5 -20"), segment_at(-100, "3 -17", pool=PRIVATE_POOL)]
    events = [(ALLOC, 6, 6), (FREED, 12, 3), (ASK, 15, 4), (FREED, 15, 4), (ALLOC, -100, 3)]
    replayed = traced(*events, segments=there, stacks={BASE: 50, BASE + 6 * MIB: 60, BASE + 12 * MIB: 70})
    columns = zip(
        replayed.born.tolist(),
        replayed.died.tolist(),
        replayed.gone.tolist(),
        ((replayed.address - BASE) / MIB).tolist(),
        (replayed.size / MIB).tolist(),
        (replayed.requested / MIB).tolist(),
        replayed.stream.tolist(),
        replayed.stack.tolist(),
        replayed.pool,
        strict=True,
    )
    assert list(columns) == [
        (-1, -1, -1, 0, 4, 4, 7, 50, (0, 0)),
        (-1, 1, 1, 12, 3, 3, 7, 0, (0, 0)),
        (-1, 2, 3, 15, 4, 4, 7, 0, (0, 0)),
        (0, -1, -1, 6, 6, 6, 7, 1, (0, 0)),
        (4, -1, -1, -100, 3, 3, 7, 5, PRIVATE_POOL),
        (4, -1, -1, 15, 5, 5, 0, 0, (0, 0)),
    ]
    assert (replayed.start, replayed.lost, replayed.exact_from) == ((11 * MIB, 60 * MIB), 1, 5)
    line = replayed.timeline
    assert [
        (figures / MIB).tolist()
        for figures in (
            line.allocated, line.active, line.reserved, line.releasable, line.private_pools_free,
        )
    ] == [
        [17, 14, 10, 10, 18],
        [19, 16, 16, 12, 20],
        [60] * 5,
        [0] * 5,
        [20, 20, 20, 20, 0],
    ]  # fmt: skip


def test_where_only_the_end_of_an_old_free_is_told_what_comes_before_it_is_not_exact() -> None:
    replayed = traced(
        (FREED, 12, 3), (ALLOC, 0, 6), (ASK, 9, 3), (FREED, 9, 3), segments=[segment_at(0, "6 -14")]
    )
    assert (replayed.lost, replayed.exact_from) == (0, 1)
    line = replayed.timeline
    assert [(figures / MIB).tolist() for figures in (line.allocated, line.active)] == [
        [3, 9, 6, 6], [3, 9, 9, 6],
    ]  # fmt: skip


@pytest.mark.parametrize(("recorded", "expected"), [({}, (0, 0)), ({0: (1, 2)}, (1, 2))])
def test_the_pool_of_an_allocation_may_be_recorded_itself(
    recorded: dict[int, tuple[int, int]], expected: tuple[int, int]
) -> None:
    replayed = traced((ALLOC, 0, 6), segments=[segment_at(0, "6 -14")], pools=recorded)
    assert replayed.pool == [expected]


@pytest.mark.parametrize(
    ("recorded", "limit"),
    [
        (-1, None),
        (0, None),
        (None, None),
        ((1 << 64) - 1, None),
        (1 << 62, None),
        (1, 1),
        ((1 << 62) - 1,) * 2,
    ],
)
def test_a_recorded_limit_may_mean_none(recorded: int | None, limit: int | None) -> None:
    assert recorded_settings({"max_split_size": recorded}).max_split_size == limit


def test_recorded_settings_are_read() -> None:
    recorded = {
        "max_split_size": 32 * MIB,
        "roundup_power2_divisions": {str(1 << power): 8 if power < 8 else 0 for power in range(16)},
        "a_newer_key": object(),
    }
    assert recorded_settings(recorded) == AllocatorSettings(
        max_split_size=32 * MIB, roundup_power2_divisions=(8,) * 8 + (0,) * 8
    )
    assert recorded_settings({}) == AllocatorSettings()


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
