"""Memory that only one stream can reuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, forward, placement, user

MIB = 1 << 20


def test_a_busy_side_stream_with_free_memory_is_found(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for _ in range(8):
        batch = program.alloc(200 * MIB, user(7, "prefetch"), stream=94)
        work = [program.alloc(150 * MIB, forward(30 + layer)) for layer in range(4)]
        program.free([batch, *work])
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 200 * MIB)
    assert finding.allocated_at == "train.py:7 in prefetch"
    assert "most of the work" in (finding.fix or "")


def test_streams_that_keep_little_are_healthy(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for _ in range(8):
        batch = program.alloc(40 * MIB, user(7, "prefetch"), stream=94)
        program.free([batch, program.alloc(600 * MIB, forward(30))])
    assert read(program).findings == ()


def test_the_stream_that_does_the_work_is_no_side_stream(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    program.alloc(100 * MIB, placement(3))
    for _ in range(8):
        program.free([program.alloc(300 * MIB, forward(30), stream=94)])
    assert read(program).findings == ()


def test_a_stream_that_is_used_no_more_is_called_so(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    program.free(program.alloc(200 * MIB, user(7, "prefetch"), stream=94))
    for _ in range(20):
        program.free(program.alloc(600 * MIB, forward(30)))
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 200 * MIB)
    assert "the stream allocated nothing in the last quarter of the recording" in finding.evidence
    assert "1 allocation recorded on this stream, most bytes at train.py:7 in prefetch" in finding.evidence
    assert "most of the work" not in (finding.fix or "")


@pytest.mark.parametrize(("work", "found"), [(1800, [200 * MIB]), (1801, [])])
def test_it_must_be_a_tenth_of_what_is_reserved(
    read: Callable[[Program], DeviceRecording], work: int, found: list[int]
) -> None:
    program = Program()
    for _ in range(8):
        batch = program.alloc(200 * MIB, user(7, "prefetch"), stream=94)
        program.free([batch, program.alloc(work * MIB, forward(30))])
    assert [finding.bytes for finding in read(program).findings] == found


def test_one_stream_of_the_default_pool_keeps_nothing_from_others(
    read: Callable[[Program], DeviceRecording],
) -> None:
    """A graph's pool may be of another stream, and work more."""
    program = Program()
    program.free(program.alloc(200 * MIB, forward(30)))
    for _ in range(8):
        program.alloc(65 * MIB, user(20, "capture"), stream=94, pool=(0, 1))
    assert [finding for finding in read(program).findings if finding.kind == "stream_pool"] == []


def test_without_events_the_stream_with_most_in_use_does_the_work(
    read: Callable[[Program], DeviceRecording],
) -> None:
    program = Program()
    program.alloc(100 * MIB, placement(3))
    program.free(program.alloc(300 * MIB, forward(30), stream=94))
    program.trace.clear()
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 300 * MIB)
    assert finding.allocated_at is None
    assert len(finding.evidence) == 1
