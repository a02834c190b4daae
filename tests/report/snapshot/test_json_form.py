"""A recording as JSON."""

from __future__ import annotations

import io
import json

import msgspec

from memtriage.model.blocks import Block, Segment
from memtriage.model.findings import Finding
from memtriage.model.recording import PinnedSegment
from memtriage.report.snapshot.json_form import as_json, stranded_by, write_stream
from support.recordings import MIB, Tape, recording, stack


def pinned(stream: int, pool: tuple[int, int], stranded: int) -> PinnedSegment:
    block = Block(address=1, size=512, requested=512, state="active")
    segment = Segment(
        device=0, address=1, size=2 * MIB, stream=stream, pool=pool, expandable=False, blocks=(block,)
    )
    return PinnedSegment(segment, stranded, (block,), ("variable",))


def test_stranded_bytes_are_summed_by_stream_and_pool_most_first() -> None:
    shares = [(0, (0, 0), 5), (7, (0, 0), 8), (0, (0, 1), 1), (0, (0, 0), 6), (7, (0, 1), 9)]
    segments = [pinned(*share) for share in shares]
    assert stranded_by(segments) == [((0, (0, 0)), 11), ((7, (0, 1)), 9), ((7, (0, 0)), 8), ((0, (0, 1)), 1)]
    assert stranded_by([]) == []


def training_with_pins() -> Tape:
    """Two steps; blocks of two streams keep their segments, most of which is free."""
    finding = Finding(kind="leak", device="cuda:0", holder="kept", bytes=MIB)
    tape = Tape(
        [stack("train.py:3 in load"), stack("train.py:7 in step")], findings=[finding], notes=["said of it"]
    )
    first, second = tape.segment(20 * MIB), tape.segment(10 * MIB, stream=7, pool=(0, 1))
    for _ in range(2):
        tape.alloc(first, MIB, "parameter")
        tape.free(tape.alloc(first, 8 * MIB, "forward temporary", stack=1, requested=8 * MIB - 100))
        tape.alloc(second, MIB, "variable", stack=1)
        tape.free(tape.alloc(second, 3 * MIB, "variable", stack=1), complete=False)
        tape.step()
    return tape


def test_the_whole_result_is_one_line() -> None:
    taken = recording(training_with_pins().end(), stacks=[])
    stream = io.BytesIO()
    write_stream(taken, stream)
    (line,) = stream.getvalue().splitlines()
    assert stream.getvalue().endswith(b"}\n")
    result = json.loads(line)
    assert result == json.loads(msgspec.json.encode(as_json(taken)))
    assert [device["device"] for device in result["devices"]] == ["cuda:0"]


def test_the_biggest_sites_and_pins_are_listed() -> None:
    tape = Tape([stack(f"train.py:{line} in step") for line in range(130)])
    at = tape.segment(200 * MIB)
    for line in range(130):
        tape.alloc(at, MIB // 2, "variable", stack=line)
    for line in range(130):
        tape.alloc(tape.segment(4 * MIB), MIB, "variable", stack=line)
    (device,) = as_json(recording(tape.end(), stacks=[])).devices
    assert len(device.sites) == len(device.pinned) == 100
    largest = max(device.pinned, key=lambda segment: len(segment.pins))
    assert len(largest.pins) == 100
