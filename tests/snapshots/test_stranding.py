"""Free memory in segments that long-lived blocks pin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, forward, optimizer, placement, user

MIB = 1 << 20


def stranding(*pins: list[dict[str, Any]], room: int = 38) -> Program:
    """Segments in which a block of 2 MiB is left; the room beside it is used until the end of a step."""
    program = Program()
    program.step_span()
    fills = []
    for frames in pins:
        program.free(program.alloc((room + 2) * MIB, forward(60)))
        program.alloc(2 * MIB, frames)
        fills.append(program.alloc(room * MIB, forward(61)))
    for _ in range(3):
        program.free(program.alloc(512, forward(62)))
        program.step_span()
    program.free(fills)
    return program


def test_stranded_bytes_are_divided_by_the_site_of_what_pins(
    read: Callable[[Program], DeviceRecording],
) -> None:
    (finding,) = read(stranding(*[user(55, "log")] * 3, user(56, "log"))).findings
    assert (finding.kind, finding.bytes, finding.bytes_per_step) == ("fragmentation", 152 * MIB, None)
    assert (finding.allocated_at, finding.step) == ("train.py:55 in log", 3)
    assert finding.evidence[:3] == [
        "162.0 MiB reserved, 8.0 MiB allocated at the snapshot; 2.0 MiB could be released",
        "4 segments pinned by 8.0 MiB, and 152.0 MiB in them can't be released",
        "pinned by site: train.py:55 in log (114.0 MiB), train.py:56 in log (38.0 MiB)",
    ]
    assert "expandable_segments" in (finding.fix or "")
    assert not [line for line in finding.evidence if line.startswith("expandable segments")]
    (*_, line) = [line for line in finding.evidence if line.startswith("segment ")]
    assert "of 40.0 MiB: 38.0 MiB stranded by 2.0 MiB at 0x" in line
    assert line.endswith("in log (variable)")


def test_a_segment_line_names_the_largest_pins(read: Callable[[Program], DeviceRecording]) -> None:
    program = stranding(*[user(55, "log")] * 3)
    for size in (4, 3, 2):
        program.alloc(size * MIB, user(70 + size, "log"))
    program.step_span()
    program.step_span()
    (finding,) = read(program).findings
    (line,) = [line for line in finding.evidence if " more" in line and line.startswith("segment ")]
    assert "29.0 MiB stranded by 4.0 MiB at 0x" in line and "from train.py:74 in log" in line
    assert ", 3.0 MiB at 0x" in line and line.endswith(" and 2 more")


@pytest.mark.parametrize(
    ("frames", "found"),
    [(user(55, "log"), True), (placement(10), False), (optimizer(41, "_init_group"), False)],
)
def test_what_training_needs_strands_nothing_by_itself(
    read: Callable[[Program], DeviceRecording], frames: list[dict[str, Any]], found: bool
) -> None:
    assert bool(read(stranding(*[frames] * 4)).findings) == found


def test_avoidable_blocks_are_blamed_before_needed_ones(read: Callable[[Program], DeviceRecording]) -> None:
    program = stranding(*[user(55, "log")] * 4, *[placement(10)] * 2)
    first, second = read(program).findings
    assert (first.bytes, first.allocated_at) == (152 * MIB, "train.py:55 in log")
    assert (second.bytes, second.allocated_at) == (76 * MIB, "train.py:10 in <module>")
    small = stranding(*[user(55, "log")] * 4, placement(10))
    (finding,) = read(small).findings
    assert finding.bytes == 152 * MIB
    assert finding.evidence[-1].startswith(
        "38.0 MiB more is stranded next to blocks from train.py:10 in <module> (38.0 MiB)"
    )


@pytest.mark.parametrize(("room", "found"), [(14, []), (16, [64 * MIB])])
def test_64_mib_must_be_stranded(
    read: Callable[[Program], DeviceRecording], room: int, found: list[int]
) -> None:
    program = stranding(*[user(55, "log")] * 4, room=room)
    assert [finding.bytes for finding in read(program).findings] == found


@pytest.mark.parametrize(("kept", "found"), [(76, [80 * MIB]), (84, [])])
def test_a_fifth_of_the_segments_must_be_stranded(
    read: Callable[[Program], DeviceRecording], kept: int, found: list[int]
) -> None:
    program = Program()
    program.step_span()
    fills = []
    for _ in range(4):
        program.free(program.alloc((kept + 20) * MIB, forward(60)))
        program.alloc(kept * MIB, user(55, "log"))
        fills.append(program.alloc(20 * MIB, forward(61)))
    for _ in range(3):
        program.free(program.alloc(512, forward(62)))
        program.step_span()
    program.free(fills)
    assert [finding.bytes for finding in read(program).findings] == found


@pytest.mark.parametrize(("later", "found"), [(0, []), (1, [152 * MIB])])
def test_only_blocks_that_survive_the_ends_of_two_steps_pin_for_long(
    read: Callable[[Program], DeviceRecording], later: int, found: list[int]
) -> None:
    program = Program()
    fills = []
    for step in range(3 + later):
        program.free(program.alloc(512, forward(62)))
        for _ in range(4 * (step == 2)):
            program.free(program.alloc(40 * MIB, forward(60)))
            program.alloc(2 * MIB, user(55, "log"))
            fills.append(program.alloc(38 * MIB, forward(61)))
        program.step_span()
    program.free(fills)
    assert [finding.bytes for finding in read(program).findings] == found


@pytest.mark.parametrize(
    ("room", "kinds"),
    [
        pytest.param(14, ["leak"], id="less than it holds"),
        pytest.param(16, ["fragmentation", "leak"], id="as much as it holds"),
        pytest.param(30, ["fragmentation", "leak"], id="almost twice as much"),
        pytest.param(32, ["fragmentation"], id="twice as much"),
    ],
)
def test_growth_is_a_leak_or_fragmentation_by_what_it_strands(
    read: Callable[[Program], DeviceRecording], room: int, kinds: list[str]
) -> None:
    """Each of eight steps keeps 14 MiB; seven of these are old enough to pin the room next to them."""
    program = Program()
    fills = []
    for _ in range(8):
        program.free(program.alloc((14 + room) * MIB, forward(60)))
        program.alloc(14 * MIB, user(55, "log"))
        fills.append(program.alloc(room * MIB, forward(61)))
        program.step_span()
    program.free(fills)
    findings = read(program).findings
    assert sorted(finding.kind for finding in findings) == kinds
    assert all(finding.bytes_per_step == 14 * MIB for finding in findings)
    for finding in findings:
        if finding.kind == "fragmentation":
            assert finding.bytes == 7 * room * MIB
            assert finding.evidence[-1] == "each step keeps 14.0 MiB more at train.py:55 in log"
            # Room that is smaller than a page of 20 MiB is stranded with expandable segments, too.
            refuted = any(line.startswith("expandable segments do not help") for line in finding.evidence)
            assert refuted == (room < 20) == ("expandable_segments" not in (finding.fix or ""))
