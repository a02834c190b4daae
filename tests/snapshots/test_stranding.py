"""Free memory that long-lived blocks, streams or pools keep, and memory reserved above the peak."""

from __future__ import annotations

from typing import Any

import pytest

from support.raw_snapshot import Program, forward, optimizer, placement, read, user

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


def test_stranded_bytes_are_divided_by_the_site_of_what_pins() -> None:
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


def test_a_segment_line_names_the_largest_pins() -> None:
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
def test_what_training_needs_strands_nothing_by_itself(frames: list[dict[str, Any]], found: bool) -> None:
    assert bool(read(stranding(*[frames] * 4)).findings) == found


def test_avoidable_blocks_are_blamed_before_needed_ones() -> None:
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


@pytest.mark.parametrize(("later", "found"), [(0, []), (1, [152 * MIB])])
def test_only_blocks_that_survive_the_ends_of_two_steps_pin_for_long(later: int, found: list[int]) -> None:
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
def test_growth_is_a_leak_or_fragmentation_by_what_it_strands(room: int, kinds: list[str]) -> None:
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


# Free memory that only one stream, or one private pool, can use again


def test_each_pool_is_told_with_what_it_has_free() -> None:
    program = Program()
    program.alloc(300 * MIB, forward(3))
    for number, pool in enumerate([(1, 0), (2, 0), (0, 3)]):
        freed = program.alloc((50 + 20 * number) * MIB, user(20, "capture"), pool=pool)
        program.alloc(20 * MIB, user(21, "capture"), pool=pool)
        program.free(freed)
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("private_pool", 270 * MIB)
    assert finding.allocated_at == "train.py:20 in capture"
    assert finding.evidence == [
        "270.0 MiB reserved in 3 private pools, of which 210.0 MiB is free at the snapshot",
        "by pool: pool (0, 3) 110.0 MiB (90.0 MiB free), pool (2, 0) 90.0 MiB (70.0 MiB free), "
        "pool (1, 0) 70.0 MiB (50.0 MiB free)",
        "one shared pool saves at most 160.0 MiB: all but the largest",
        "2 pools made by a capture without `pool=`",
        "a snapshot does not say which of the graphs are still alive",
    ]


def test_of_many_pools_the_largest_are_listed() -> None:
    program = Program()
    for number in range(8):
        program.alloc((40 + 2 * number) * MIB, user(20), pool=(0, number + 1))
    (finding,) = read(program).findings
    (line,) = [line for line in finding.evidence if line.startswith("by pool: ")]
    assert line.startswith("by pool: pool (0, 8) 54.0 MiB (0 B free), pool (0, 7) 52.0 MiB")
    assert line.endswith(f", and {8 - line.count('MiB')} more")
    assert not any("without `pool=`" in line for line in finding.evidence)


def test_without_events_no_site_is_named() -> None:
    program = Program()
    for number in range(2):
        program.free(program.alloc(100 * MIB, user(1), pool=(0, number + 1)))
    program.trace.clear()
    (finding,) = read(program).findings
    assert (finding.bytes, finding.allocated_at) == (200 * MIB, None)


def test_a_busy_side_stream_with_free_memory_is_found() -> None:
    program = Program()
    for _ in range(8):
        batch = program.alloc(200 * MIB, user(7, "prefetch"), stream=94)
        work = [program.alloc(150 * MIB, forward(30 + layer)) for layer in range(4)]
        program.free([batch, *work])
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 200 * MIB)
    assert finding.allocated_at == "train.py:7 in prefetch"
    assert "most of the work" in (finding.fix or "")


def test_streams_that_keep_little_are_healthy() -> None:
    program = Program()
    for _ in range(8):
        batch = program.alloc(40 * MIB, user(7, "prefetch"), stream=94)
        program.free([batch, program.alloc(600 * MIB, forward(30))])
    assert read(program).findings == ()


def test_the_stream_that_does_the_work_is_no_side_stream() -> None:
    program = Program()
    program.alloc(100 * MIB, placement(3))
    for _ in range(8):
        program.free([program.alloc(300 * MIB, forward(30), stream=94)])
    assert read(program).findings == ()


def test_a_stream_that_is_used_no_more_is_called_so() -> None:
    program = Program()
    program.free(program.alloc(200 * MIB, user(7, "prefetch"), stream=94))
    for _ in range(20):
        program.free(program.alloc(600 * MIB, forward(30)))
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 200 * MIB)
    assert "the stream allocated nothing in the last quarter of the recording" in finding.evidence
    assert "1 allocation recorded on this stream, most bytes at train.py:7 in prefetch" in finding.evidence
    assert "most of the work" not in (finding.fix or "")


def test_one_stream_of_the_default_pool_keeps_nothing_from_others() -> None:
    """A graph's pool may be of another stream, and work more."""
    program = Program()
    program.free(program.alloc(200 * MIB, forward(30)))
    for _ in range(8):
        program.alloc(65 * MIB, user(20, "capture"), stream=94, pool=(0, 1))
    assert [finding for finding in read(program).findings if finding.kind == "stream_pool"] == []


def test_without_events_the_stream_with_most_in_use_does_the_work() -> None:
    program = Program()
    program.alloc(100 * MIB, placement(3))
    program.free(program.alloc(300 * MIB, forward(30), stream=94))
    program.trace.clear()
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("stream_pool", 300 * MIB)
    assert finding.allocated_at is None
    assert len(finding.evidence) == 1


# Memory reserved above the peak of what was allocated, and the settings that would have saved it


def changing_sizes(program: Program) -> None:
    """Each step needs one block, larger than those of all steps before."""
    for step in range(30):
        program.free(program.alloc((200 + 20 * step) * MIB, forward(30)))
        program.free(program.alloc(4096, optimizer(41)))
        program.step_span()


def test_a_surplus_that_was_given_back_is_none() -> None:
    program = Program()
    changing_sizes(program)
    program.simulator.empty_cache()
    assert read(program).findings == ()


def test_a_surplus_that_no_setting_saves_advises_none() -> None:
    program = Program("expandable_segments:True")
    program.free(program.alloc(4000 * MIB, user(5, "evaluate"), stream=3))
    program.free([program.alloc(3000 * MIB, forward(30))])
    program.alloc(10 * MIB, forward(31))
    surplus = [finding for finding in read(program).findings if finding.kind == "fragmentation"]
    assert [("expandable_segments" in (finding.fix or "")) for finding in surplus] == [False]


def test_reserved_as_the_peak_needs_it_is_healthy() -> None:
    program = Program()
    for _ in range(10):
        program.free([program.alloc(400 * MIB, forward(30 + layer)) for layer in range(8)])
    assert read(program).findings == ()


def test_each_setting_is_told_with_what_it_reserves() -> None:
    program = Program()
    changing_sizes(program)
    device = read(program)
    (finding,) = device.findings
    reserved, allocated = device.timeline.reserved.max(), device.timeline.allocated.max()
    assert (finding.kind, finding.bytes) == ("fragmentation", reserved - allocated)
    assert "expandable_segments:True" in (finding.fix or "")
    peaks, replayed, compaction, end = finding.evidence
    assert peaks == "at most 780.0 MiB allocated, but 14.4 GiB reserved"
    assert replayed.startswith(
        "the recording replayed from an empty cache, most reserved: the recorded settings 14.4 GiB, "
        "expandable_segments:True 782.0 MiB, max_split_size_mb:128 "
    )
    assert compaction == "compaction could not go below 780.0 MiB, the most allocated in that replay"
    assert end == "at the snapshot 14.4 GiB is in wholly free segments, and 0 B is stranded"


def test_after_an_out_of_memory_error_there_is_no_surplus() -> None:
    program = Program(capacity=17_000 * MIB)
    changing_sizes(program)
    assert read(program).findings
    program.fails(18_000 * MIB, forward(30))
    assert [finding.kind for finding in read(program).findings] == ["out_of_memory"]
