"""What the blocks of a recording are, and their bytes by site, at an instant and over steps."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.replay import ReplayedTrace
from memtriage.model.recording import OWNERS, DeviceRecording, LabelRow, OwnedBytes, Stack
from memtriage.snapshots.owners import SiteIndex, alive_at, index_sites, owned_bytes, site_series
from support.raw_snapshot import (
    AUTOGRAD,
    MIB,
    Program,
    custom_backward,
    forward,
    frame,
    optimizer,
    placement,
    read,
    user,
)

COLLECTIVE = [frame("site-packages/torch/distributed/distributed_c10d.py", 1, "all_gather"), *user(9)]


def owners(program: Program) -> dict[int, str]:
    """Owner by requested size, which each block of these programs has for itself."""
    one: DeviceRecording = read(program)
    sizes, codes = one.lives.requested.tolist(), one.lives.owner.tolist()
    return {size: OWNERS[code] for size, code in zip(sizes, codes, strict=True)}


def test_only_what_was_there_already_comes_from_before_the_recording() -> None:
    program = Program()
    program.alloc(5001, [])
    program.alloc(5002, user(1))
    for _ in range(3):
        program.alloc(2, forward(6))
        program.step_span()
    assert owners(program)[5001] != "before the recording"


def test_a_block_is_what_its_stack_and_its_life_make_it() -> None:
    program = Program()
    program.alloc(1001, placement(1))
    program.alloc(1002, COLLECTIVE)
    batch = program.alloc(1003, user(2))
    scratch = program.alloc(1004, forward(3))
    saved = program.alloc(1005, forward(3))
    program.free(scratch)
    program.alloc(1, forward(3))
    temporary = program.alloc(1006, AUTOGRAD)
    gradient = program.alloc(1007, AUTOGRAD)
    program.free([temporary, saved])
    program.alloc(1008, optimizer(4, "_init_group"))
    program.free(program.alloc(1009, optimizer(4)))
    program.step_span()
    program.free([gradient, batch])
    kept = program.alloc(1010, custom_backward(5))
    for _ in range(3):
        program.alloc(2, forward(6))
        program.step_span()
    told = owners(program)
    assert kept.requested == 1010
    expected = {
        1001: "parameter",
        1002: "communication buffer",
        1003: "variable",
        1004: "forward temporary",
        1005: "saved for backward",
        1006: "backward temporary",
        1007: "gradient",
        1008: "optimizer state",
        1009: "optimizer temporary",
        1010: "autograd context",
    }
    assert told.items() >= expected.items()


def test_a_workspace_is_known_by_its_size_and_its_loneliness() -> None:
    program = Program()
    program.alloc(32 * MIB, forward(1))
    program.alloc(MIB, forward(1))
    program.alloc(MIB, placement(2))
    program.alloc(MIB, forward(3))  # of that size too, but no cuBLAS workspace comes from there
    program.alloc(5, forward(1))
    program.step_span()
    one = read(program)
    totals = {(row.owner, row.site): row.bytes for row in one.owners}
    assert totals["cuBLAS workspace", "train.py:1 in forward"] == 33 * MIB
    assert totals["parameter", "train.py:2 in <module>"] == MIB
    assert totals["saved for backward", "train.py:3 in forward"] == MIB


def test_many_blocks_of_a_workspaces_size_are_no_workspaces() -> None:
    program = Program()
    for _ in range(5):
        program.alloc(32 * MIB, forward(1))
    program.step_span()
    assert set(owners(program).values()) == {"saved for backward"}


def test_without_any_stacks_nothing_is_called_a_gradient() -> None:
    program = Program()
    for _ in range(6):
        program.alloc(700, AUTOGRAD)
        program.step_span()
    assert set(owners(program).values()) == {"c++ only"}


def test_what_is_older_than_the_recording_is_called_so() -> None:
    program = Program()
    program.alloc(5 * MIB, AUTOGRAD)
    program.trace.clear()
    program.alloc(6 * MIB, forward(1))
    program.step_span()
    assert owners(program)[5 * MIB] == "before the recording"


# Bytes by site, at an instant and over steps


EVENTS = 60


@st.composite
def lives(draw: st.DrawFn) -> ReplayedTrace:
    pairs = draw(
        st.lists(st.tuples(st.integers(-1, EVENTS - 1), st.integers(1, EVENTS)), min_size=1, max_size=30)
    )
    born = np.array([one for one, _ in pairs], np.int32)
    died = np.array([one + length if one + length < EVENTS else -1 for one, length in pairs], np.int32)
    died = np.where(died == 0, 1, died)
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    values = dict.fromkeys(names) | {"born": born, "died": died, "size": np.arange(1, len(pairs) + 1) * 512}
    return ReplayedTrace(**values)


def index(count: int) -> SiteIndex:
    return SiteIndex(("a", "b", "c"), np.arange(count) % 3)


@given(
    replayed=lives(), ends=st.sets(st.integers(1, EVENTS), min_size=1, max_size=20), most=st.integers(2, 30)
)
def test_a_series_is_what_is_alive_at_each_end(replayed: ReplayedTrace, ends: set[int], most: int) -> None:
    marks, sites = sorted(ends), index(len(replayed.born))
    series = site_series(replayed, sites, marks, most)
    assert len(series.steps) <= most
    assert series.steps[-1] == len(marks)
    for column, step in enumerate(series.steps.tolist()):
        alive = alive_at(replayed, marks[step - 1] - 1)
        for site in range(3):
            here = alive & (sites.of_life == site)
            assert series.bytes[site, column] == replayed.size[here].sum()
            assert series.blocks[site, column] == here.sum()


@given(replayed=lives(), event=st.integers(-1, EVENTS - 1))
def test_owned_bytes_sum_to_what_is_alive(replayed: ReplayedTrace, event: int) -> None:
    alive = alive_at(replayed, event)
    owners = (np.arange(len(replayed.born)) % 2).astype(np.uint8)
    rows = owned_bytes(alive, replayed.size, owners, index(len(replayed.born)))
    assert sum(row.bytes for row in rows) == replayed.size[alive].sum()
    assert sum(row.count for row in rows) == alive.sum()
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert len({(row.owner, row.site) for row in rows}) == len(rows)


def test_owner_and_site_are_told_in_words() -> None:
    alive = np.array([True, True, False])
    rows = owned_bytes(alive, np.array([512, 1024, 4096]), np.array([1, 1, 1], np.uint8), index(3))
    assert rows == (OwnedBytes(OWNERS[1], "b", 1024, 1), OwnedBytes(OWNERS[1], "a", 512, 1))


def test_a_life_is_alive_from_its_allocation_to_its_free() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    born, died = np.array([-1, 2, 3], np.int32), np.array([4, -1, 3], np.int32)
    replayed = ReplayedTrace(
        **dict.fromkeys(names) | {"born": born, "died": died, "size": np.array([1, 2, 4])}
    )
    alive = [alive_at(replayed, event).tolist() for event in (-1, 1, 2, 3, 4)]
    assert alive == [
        [True, False, False], [True, False, False], [True, True, False], [True, True, False],
        [False, True, False],
    ]  # fmt: skip
    series = site_series(replayed, index(3), [2, 3, 5], 9)
    assert series.steps.tolist() == [1, 2, 3]
    assert series.bytes.tolist() == [[1, 1, 0], [0, 2, 2], [0, 0, 0]]


def test_steps_looked_at_are_evenly_spread_and_end_with_the_last() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    one = {"born": np.array([0], np.int32), "died": np.array([-1], np.int32), "size": np.array([8])}
    replayed = ReplayedTrace(**dict.fromkeys(names) | one)
    series = site_series(replayed, index(1), list(range(1, 102)), 5)
    assert series.steps.tolist() == [1, 26, 51, 76, 101]


def test_sites_are_the_innermost_lines() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    replayed = ReplayedTrace(**dict.fromkeys(names) | {"stack": np.array([2, 0, 1, 2])})
    stacks = [Stack(site, ()) for site in ("a", "b", "a")]
    sites = index_sites(replayed, stacks)
    assert (sites.names, sites.of_life.tolist()) == (("a", "b"), [0, 0, 1, 0])


def annotate(program: Program, block: SimBlock, label: str) -> None:
    """As `torch.cuda.memory._annotate_tensor` records it."""
    program.clock += 7
    program.trace.append(
        {
            "action": "annotate",
            "addr": block.address,
            "size": block.size,
            "stream": 0,
            "time_us": program.clock,
            "user_metadata": label,
        }
    )


def test_labels_have_the_bytes_of_their_blocks() -> None:
    program = Program()
    weights = program.alloc(64 * MIB, placement(3))
    for _ in range(2):  # the same address twice: each annotation names the block of its moment
        first = len(program.trace)
        cache = program.alloc(32 * MIB, user(7))
        for event in program.trace[first:]:
            event["user_metadata"] = "prefill"
        annotate(program, cache, "KV cache")
        program.free(cache)
    annotate(program, weights, "weights")
    annotate(program, cache, "nothing is there")
    device = read(program)
    assert device.labels == (
        LabelRow("weights", 64 * MIB, 64 * MIB, 1),
        LabelRow("KV cache", 32 * MIB, 0, 2),
        LabelRow("prefill", 32 * MIB, 0, 2),
    )
    assert not any("left out" in note for note in device.notes)


def test_a_recording_without_labels_has_none() -> None:
    program = Program()
    program.alloc(64 * MIB, placement(3))
    assert read(program).labels == ()
