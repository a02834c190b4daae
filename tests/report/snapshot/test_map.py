"""The map shows every byte of every segment once, and says what it draws together."""

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.blocks import Block
from memtriage.model.recording import OWNERS, DeviceRecording
from memtriage.report.html.columns import Texts
from memtriage.report.snapshot.map import segment_map
from support.page_data import unpack
from support.recordings import MIB, Tape, stack

_USED, _AWAITING, _STRANDED, _RELEASABLE, _MIXED = range(5)
_NO_OWNER = 255  # as in assets/snapshot_segments.js


def _parts(drawn: dict[str, Any]) -> list[tuple[int, int, int]]:
    columns = drawn["parts"]
    return list(zip(*(unpack(columns[name]) for name in ("size", "state", "count")), strict=True))


def _tape() -> Tape:
    return Tape([stack("model.py:10 in __init__"), stack("train.py:3 in main")])


def test_a_free_part_is_stranded_where_a_block_pins_it() -> None:
    tape = _tape()
    tape.alloc(tape.segment(8 * MIB), MIB, "parameter")
    tape.segment(4 * MIB)
    drawn = segment_map(tape.end(), Texts(), 100)
    assert _parts(drawn) == [(MIB, _USED, 1), (7 * MIB, _STRANDED, 1), (4 * MIB, _RELEASABLE, 1)]
    assert unpack(drawn["segments"]["stranded"]) == [7 * MIB, 0]


def test_whole_free_pages_of_an_expandable_segment_are_releasable() -> None:
    tape = _tape()
    tape.alloc(tape.segment(10 * MIB, page=2 * MIB), 3 * MIB, "parameter")
    assert _parts(segment_map(tape.end(), Texts(), 100)) == [
        (3 * MIB, _USED, 1),
        (MIB, _STRANDED, 1),
        (6 * MIB, _RELEASABLE, 1),
    ]


def test_blocks_have_owner_site_and_state() -> None:
    tape = _tape()
    segment = tape.segment(4 * MIB)
    tape.alloc(segment, MIB, "gradient", stack=1)
    tape.free(tape.alloc(segment, MIB, "parameter"), complete=False)
    texts = Texts()
    drawn = segment_map(tape.end(), texts, 100)
    assert [state for _, state, _ in _parts(drawn)] == [_USED, _AWAITING, _STRANDED]
    owners = unpack(drawn["parts"]["owner"])
    assert [OWNERS[owner] for owner in owners[:2]] == ["gradient", "parameter"]
    assert owners[2] == _NO_OWNER
    sites = unpack(drawn["parts"]["site"])
    assert [texts.all[site] for site in sites[:2]] == ["train.py:3 in main", "model.py:10 in __init__"]
    assert sites[2] == -1


def test_groups_are_streams_and_pools_and_say_what_is_in_them() -> None:
    tape = _tape()
    tape.segment(2 * MIB)
    tape.segment(4 * MIB, stream=9)
    tape.segment(6 * MIB, pool=(0, 2), page=2 * MIB)
    drawn = segment_map(tape.end(), Texts(), 100)
    assert drawn["groups"] == [
        "default pool, default stream: 2.0 MiB in 1 segment",
        "default pool, stream 0x9: 4.0 MiB in 1 segment",
        "private pool 0.2, default stream, expandable: 6.0 MiB in 1 segment",
    ]
    assert unpack(drawn["segments"]["group"]) == [0, 1, 2]


def test_pins_are_named_by_site_with_the_rest_counted() -> None:
    stacks = [stack(f"model.py:{line} in f") for line in range(5)]
    tape = Tape(stacks)
    segment = tape.segment(64 * MIB)
    for number in range(5):
        for _ in range(2):
            tape.alloc(segment, (number + 1) * MIB, "parameter", stack=number)
    texts = Texts()
    (row,) = segment_map(tape.end(), texts, 100)["pinned"]
    assert [(pin["bytes"], pin["count"], texts.all[pin["site"]]) for pin in row["pins"]] == [
        (10 * MIB, 2, "model.py:4 in f"),
        (8 * MIB, 2, "model.py:3 in f"),
        (6 * MIB, 2, "model.py:2 in f"),
    ]
    assert row["more"] == {"bytes": 6 * MIB, "count": 4}
    assert (row["stranded"], row["size"]) == (34 * MIB, 64 * MIB)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=60), st.integers(1, 30))
def test_merged_parts_keep_every_byte_and_block(blocks: list[tuple[int, bool]], limit: int) -> None:
    device = _with_blocks([(size * 512, used) for size, used in blocks])
    drawn = _parts(segment_map(device, Texts(), limit))
    assert sum(size for size, _, _ in drawn) == sum(size * 512 for size, _ in blocks)
    assert sum(count for *_, count in drawn) == len(blocks)
    assert len(drawn) <= max(limit, 1)
    assert all(count > 1 for _, state, count in drawn if state == _MIXED)


def test_only_small_neighbors_are_merged() -> None:
    device = _with_blocks([(512, True), (512, False), (512, True), (MIB, True), (512, True), (512, True)])
    drawn = segment_map(device, Texts(), 3)
    assert _parts(drawn) == [(1536, _MIXED, 3), (MIB, _USED, 1), (1024, _USED, 2)]
    assert unpack(drawn["parts"]["requested"]) == [1024, MIB, 1024]  # of mixed parts: what is in use
    assert drawn["note"] == "1 segment, 6 blocks; small neighbors drawn together: 3 parts"


def test_many_small_blocks_keep_their_detail() -> None:
    device = _with_blocks([(512, number % 100 < 50) for number in range(1000)])
    drawn = _parts(segment_map(device, Texts(), 300))
    assert 150 < len(drawn) <= 300
    assert {state for _, state, _ in drawn} == {_USED, _STRANDED, _MIXED}
    assert sum(size for size, state, _ in drawn if state == _MIXED) < 100 * 512


def _with_blocks(sizes: list[tuple[int, bool]]) -> DeviceRecording:
    """A device with one segment of just these blocks, each in use or free."""
    tape = _tape()
    tape.segment(sum(size for size, _ in sizes))
    device = tape.end()
    segment = device.segments[0]
    at = segment.address
    blocks = []
    for size, used in sizes:
        state = "active" if used else "free"
        blocks.append(Block(address=at, size=size, requested=size if used else 0, state=state))
        at += size
    return replace(device, segments=(msgspec.structs.replace(segment, blocks=tuple(blocks)),))


def test_more_segments_than_parts_are_allowed_have_one_part_each() -> None:
    tape = _tape()
    for _ in range(3):
        tape.alloc(tape.segment(4 * MIB), MIB, "parameter")
    assert len(_parts(segment_map(tape.end(), Texts(), 2))) == 3
