"""A recording as JSON."""

from __future__ import annotations

from memtriage.model.blocks import Block, Segment
from memtriage.model.recording import PinnedSegment
from memtriage.report.snapshot.json_form import as_json, stranded_by
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
