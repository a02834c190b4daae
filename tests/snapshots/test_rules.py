"""What a recording shows beyond leaks: pools kept apart, segments that fit nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memtriage.model.recording import DeviceRecording
from memtriage.snapshots.read import load_snapshot
from support.raw_snapshot import Program, forward, placement, user

DATA = Path(__file__).parents[1] / "data" / "snapshots"
MIB = 1 << 20


def test_a_pool_per_captured_graph_is_found(read: Callable[[Program], DeviceRecording]) -> None:
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


def test_one_shared_pool_is_healthy(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for _ in range(8):
        program.alloc(65 * MIB, user(20, "capture"), pool=(0, 1))
    assert read(program).findings == ()


def test_free_segments_of_a_private_pool_are_not_releasable(
    read: Callable[[Program], DeviceRecording],
) -> None:
    program = Program()
    program.free([program.alloc(30 * MIB, forward(30)), program.alloc(50 * MIB, user(20), pool=(1, 0))])
    device = read(program)
    assert (device.end.releasable, device.end.private_pools_free) == (30 * MIB, 50 * MIB)
    assert device.timeline.releasable[-1] == 30 * MIB
    assert device.timeline.private_pools_free[-1] == 50 * MIB
    assert device.end.stranded == device.timeline.stranded[-1] == 0


def test_each_headline_has_the_bytes_that_its_site_pins() -> None:
    (device,) = load_snapshot(DATA / "fragmentation.pickle.gz").devices
    workspace, kept = device.findings
    assert (workspace.kind, workspace.allocated_at) == ("fragmentation", None)
    assert "cuBLAS workspace" in (workspace.mechanism or "")
    assert (kept.kind, kept.allocated_at) == ("fragmentation", "train.py:82 in per")
    assert (workspace.bytes or 0) + (kept.bytes or 0) == device.end.stranded
    assert (workspace.bytes or 0) > (kept.bytes or 0)


def test_what_each_step_keeps_is_a_leak_and_the_error_that_it_ends_in_comes_first(
    read: Callable[[Program], DeviceRecording],
) -> None:
    program = Program(capacity=200 * MIB)
    for _ in range(8):
        program.alloc(20 * MIB, user(55, "log"))
        program.free(program.alloc(512, forward(60)))
        program.step_span()
    (leak,) = read(program).findings
    assert (leak.kind, leak.bytes_per_step, leak.allocated_at) == ("leak", 20 * MIB, "train.py:55 in log")
    program.fails(90 * MIB, forward(61))
    assert [finding.kind for finding in read(program).findings] == ["out_of_memory", "leak"]
