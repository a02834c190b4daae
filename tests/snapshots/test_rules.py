"""What a recording shows beyond leaks: pools kept apart, segments that fit nothing, errors."""

from __future__ import annotations

import pytest

from memtriage.model.findings import Finding
from support.raw_snapshot import AUTOGRAD, Program, forward, placement, read, user

MIB = 1 << 20


def test_a_pool_per_captured_graph_is_found() -> None:
    program = Program()
    program.alloc(100 * MIB, placement(3))
    for graph in range(4):
        blocks = [program.alloc(65 * MIB, user(20, "capture"), pool=(graph + 1, 0)) for _ in range(2)]
        program.free(blocks[0])
    device = read(program)
    (finding,) = device.findings
    pools = sum(segment.size for segment in device.segments if segment.pool != (0, 0))
    assert (finding.kind, finding.bytes) == ("private_pool", pools)
    assert finding.allocated_at == "train.py:20 in capture"
    assert "torch.cuda.graph_pool_handle()" in (finding.fix or "")
    assert any("4 private pools" in line for line in finding.evidence)


def test_one_shared_pool_is_healthy() -> None:
    program = Program()
    for _ in range(8):
        program.alloc(65 * MIB, user(20, "capture"), pool=(0, 1))
    assert read(program).findings == ()


def test_free_segments_of_a_private_pool_are_not_releasable() -> None:
    program = Program()
    program.free([program.alloc(30 * MIB, forward(30)), program.alloc(50 * MIB, user(20), pool=(1, 0))])
    device = read(program)
    assert (device.end.releasable, device.end.private_pools_free) == (30 * MIB, 50 * MIB)
    assert device.timeline.releasable[-1] == 30 * MIB
    assert device.timeline.private_pools_free[-1] == 50 * MIB
    assert device.end.stranded == device.timeline.stranded[-1] == 0


def test_what_each_step_keeps_is_a_leak_and_the_error_that_it_ends_in_comes_first() -> None:
    program = Program(capacity=200 * MIB)
    for _ in range(8):
        program.alloc(20 * MIB, user(55, "log"))
        program.free(program.alloc(512, forward(60)))
        program.step_span()
    (leak,) = read(program).findings
    assert (leak.kind, leak.bytes_per_step, leak.allocated_at) == ("leak", 20 * MIB, "train.py:55 in log")
    program.fails(90 * MIB, forward(61))
    assert [finding.kind for finding in read(program).findings] == ["out_of_memory", "leak"]


# What an out-of-memory error in a recording says: what was free, where, and why it did not serve


def died(program: Program) -> Finding:
    first = read(program).findings[0]
    assert first.kind == "out_of_memory"
    return first


def test_what_is_free_for_the_stream_and_what_is_not() -> None:
    program = Program(capacity=1000 * MIB)
    program.alloc(300 * MIB, placement(3))
    own = program.alloc(200 * MIB, forward(30))
    of_stream = program.alloc(200 * MIB, user(7, "prefetch"), stream=94)
    program.alloc(50 * MIB, user(8, "prefetch"), stream=94)
    program.alloc(200 * MIB, user(20), pool=(1, 0))
    program.step_span()
    program.free([own, of_stream])
    program.alloc(50 * MIB, forward(31))
    program.alloc(40 * MIB, user(9, "prefetch"), stream=94)
    program.fails(400 * MIB, forward(32))
    finding = died(program)
    assert (finding.bytes, finding.allocated_at) == (400 * MIB, "train.py:32 in forward")
    assert (finding.phase, finding.step) == ("forward", 1)
    assert finding.evidence == [
        "requested 400.0 MiB; 640.0 MiB allocated, 950.0 MiB reserved",
        "150.0 MiB free in 1 block for this stream, the largest 150.0 MiB: none is large enough",
        "160.0 MiB more is free for other streams or private pools, which cannot lend it",
        "the driver had 0 B free",
        "alive then: parameter at train.py:3 in <module> 300.0 MiB, "
        "variable at train.py:20 in train 200.0 MiB, saved for backward at train.py:31 in forward 50.0 MiB, "
        "variable at train.py:8 in prefetch 50.0 MiB, variable at train.py:9 in prefetch 40.0 MiB",
    ]


def test_of_several_errors_the_first_counts() -> None:
    program = Program(capacity=1000 * MIB)
    program.alloc(300 * MIB, placement(3))
    program.alloc(200 * MIB, forward(30))
    program.fails(600 * MIB, forward(31))
    assert not any("errors in the recording" in line for line in died(program).evidence)
    program.fails(700 * MIB, forward(31))
    finding = died(program)
    assert finding.bytes == 600 * MIB
    assert "the allocator had no free block for this stream" in finding.evidence
    assert finding.evidence[-1] == "2 errors in the recording; this is the first"


def test_a_request_without_frames_is_where_most_is_held() -> None:
    program = Program(capacity=1000 * MIB)
    program.alloc(400 * MIB, AUTOGRAD)
    program.alloc(200 * MIB, forward(30))
    program.fails(600 * MIB, AUTOGRAD)
    finding = died(program)
    assert finding.allocated_at == "train.py:30 in forward"
    assert "(autograd's thread): the site named holds the most" in finding.evidence[-1]


@pytest.mark.parametrize(("spare", "limit"), [(0, False), (1024, True)])
def test_a_driver_with_far_more_than_was_asked_for_did_not_refuse(spare: int, limit: bool) -> None:
    program = Program(capacity=1000 * MIB)
    program.alloc(900 * MIB, placement(3))
    program.fails(200 * MIB, forward(31))
    program.trace[-1]["device_free"] = (200 + spare) * MIB
    finding = died(program)
    line = next(line for line in finding.evidence if line.startswith("the driver had "))
    assert line.endswith("a limit of the allocator, not the device, refused") == limit
    del program.trace[-1]["device_free"]
    assert not any("the driver had" in line for line in died(program).evidence)


@pytest.mark.parametrize("asked", [280, 300])
def test_memory_that_only_private_pools_have_is_a_finding_of_its_own(asked: int) -> None:
    program = Program(capacity=500 * MIB)
    for number, size in enumerate((120, 160)):
        program.free(program.alloc(size * MIB, user(20), pool=(number + 1, 0)))
    program.alloc(200 * MIB, placement(3))
    program.fails(asked * MIB, forward(32))
    found = [finding for finding in read(program).findings if finding.kind == "private_pool"]
    refused = [finding for finding in found if any("was refused" in line for line in finding.evidence)]
    assert [finding.bytes for finding in refused] == ([280 * MIB] if asked == 280 else [])
    for finding in refused:
        assert finding.evidence == [
            "280.0 MiB was refused; 280.0 MiB was free in private pools: pool (2, 0) 160.0 MiB, "
            "pool (1, 0) 120.0 MiB",
            "the default pool had 0 B free",
        ]
