"""Memory reserved above the peak of what was allocated, and the settings that would have saved it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, forward, optimizer, user

MIB = 1 << 20


def changing_sizes(program: Program) -> None:
    """Each step needs one block, larger than those of all steps before."""
    for step in range(30):
        program.free(program.alloc((200 + 20 * step) * MIB, forward(30)))
        program.free(program.alloc(4096, optimizer(41)))
        program.step_span()


def test_reserved_far_above_the_peak_is_found_with_what_helps(
    read: Callable[[Program], DeviceRecording],
) -> None:
    program = Program()
    changing_sizes(program)
    device = read(program)
    (finding,) = device.findings
    reserved, allocated = device.timeline.reserved.max(), device.timeline.allocated.max()
    assert (finding.kind, finding.bytes) == ("fragmentation", reserved - allocated)
    assert "expandable_segments:True" in (finding.fix or "")
    assert any("expandable_segments:True 782.0 MiB" in line for line in finding.evidence)


def test_a_surplus_that_was_given_back_is_none(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    changing_sizes(program)
    program.simulator.empty_cache()
    assert read(program).findings == ()


def test_a_surplus_that_no_setting_saves_advises_none(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program("expandable_segments:True")
    program.free(program.alloc(4000 * MIB, user(5, "evaluate"), stream=3))
    program.free([program.alloc(3000 * MIB, forward(30))])
    program.alloc(10 * MIB, forward(31))
    surplus = [finding for finding in read(program).findings if finding.kind == "fragmentation"]
    assert [("expandable_segments" in (finding.fix or "")) for finding in surplus] == [False]


def test_reserved_as_the_peak_needs_it_is_healthy(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for _ in range(10):
        program.free([program.alloc(400 * MIB, forward(30 + layer)) for layer in range(8)])
    assert read(program).findings == ()


def test_each_setting_is_told_with_what_it_reserves(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    changing_sizes(program)
    (finding,) = read(program).findings
    peaks, replayed, compaction, end = finding.evidence
    assert peaks == "at most 780.0 MiB allocated, but 14.4 GiB reserved"
    assert replayed.startswith(
        "the recording replayed from an empty cache, most reserved: the recorded settings 14.4 GiB, "
        "expandable_segments:True 782.0 MiB, max_split_size_mb:128 "
    )
    assert compaction == "compaction could not go below 780.0 MiB, the most allocated in that replay"
    assert end == "at the snapshot 14.4 GiB is in wholly free segments, and 0 B is stranded"


@pytest.mark.parametrize(("waste", "found"), [(1022, False), (1024, True)])
def test_a_surplus_has_a_floor(read: Callable[[Program], DeviceRecording], waste: int, found: bool) -> None:
    program = Program()
    program.free(program.alloc(waste * MIB, forward(30)))
    program.free(program.alloc((waste + 2) * MIB, forward(31)))
    assert any(finding.kind == "fragmentation" for finding in read(program).findings) == found


def test_after_an_out_of_memory_error_there_is_no_surplus(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program(capacity=17_000 * MIB)
    changing_sizes(program)
    assert read(program).findings
    program.fails(18_000 * MIB, forward(30))
    assert [finding.kind for finding in read(program).findings] == ["out_of_memory"]
