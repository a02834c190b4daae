"""Snapshot files to findings: six real ones, and programs that the simulator runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtriage.model.recording import OWNERS, DeviceRecording, SnapshotError
from memtriage.snapshots.read import load_snapshot
from support.raw_snapshot import (
    AUTOGRAD,
    Frames,
    Program,
    forward,
    frame,
    optimizer,
    placement,
    read,
    recording_of,
    snapshot_of,
    train,
    user,
)

MIB = 1 << 20
DATA = Path(__file__).parents[1] / "data" / "snapshots"

REAL: dict[str, dict[str, Any]] = {
    # (allocated, reserved) at the snapshot, as torch's own counters said; segments; events
    "ctx_attr": {"end": (729130496, 1281359872), "counts": (41, 4847)},
    "fp8_residue": {"end": (242323456, 513802240), "counts": (30, 12570)},
    "fragmentation": {"end": (493806592, 1098907648), "counts": (27, 15803)},
    "healthy": {"end": (152165888, 950009856), "counts": (38, 6078)},
    "loss_list": {"end": (2761948672, 3269459968), "counts": (76, 5380)},
    "oom": {"end": (1585988096, 1736441856), "counts": (72, 300)},
}


@functools.cache
def real(name: str) -> DeviceRecording:
    (device,) = load_snapshot(DATA / f"{name}.pickle.gz").devices
    return device


@pytest.mark.parametrize("name", REAL)
def test_the_end_is_what_the_allocator_counted(name: str) -> None:
    one = real(name)
    assert (one.end.allocated, one.end.reserved) == REAL[name]["end"]
    assert (len(one.segments), len(one.events)) == REAL[name]["counts"]
    assert (one.timeline.allocated[-1], one.timeline.reserved[-1]) == REAL[name]["end"]
    assert one.timeline.releasable[-1] == one.end.releasable
    assert one.timeline.stranded[-1] == one.end.stranded
    assert one.exact_from_us is None


def test_the_peak_may_be_before_the_first_event() -> None:
    program = Program()
    blocks = [program.alloc(size * MIB, user(7)) for size in (40, 30)]
    program.trace.clear()
    program.free(blocks[0])
    program.alloc(20 * MIB, user(8))
    one = read(program)
    assert (one.peak.event, one.peak.allocated) == (-1, 70 * MIB)
    assert one.peak.time_us == program.trace[0]["time_us"]
    assert one.exact_from_us is not None


def test_a_site_counts_every_block_that_was_allocated_there() -> None:
    program = Program()
    first, _, _ = (program.alloc(512, user(7)) for _ in range(3))
    program.free(first)
    one = read(program)
    (row,) = one.sites
    assert (row.site, row.allocations, row.allocated) == ("train.py:7 in train", 3, 1536)
    assert (row.count_at_end, row.at_end, row.at_peak) == (2, 1024, 1536)


@pytest.mark.parametrize("name", REAL)
def test_parts_sum_to_the_whole(name: str) -> None:
    one = real(name)
    end = one.end
    free = end.releasable + end.stranded + end.private_pools_free
    assert end.reserved == end.allocated + end.awaiting + free
    assert end.allocated == end.requested + end.rounding
    assert sum(row.bytes for row in one.owners) == end.allocated
    assert sum(row.bytes for row in one.peak.owners) == one.peak.allocated == one.timeline.allocated.max()
    assert sum(row.at_end for row in one.sites) == end.allocated
    assert sum(row.at_peak for row in one.sites) == one.peak.allocated
    assert sum(pinned.stranded for pinned in one.pinned) == end.stranded
    by_owner = sum(one.owner_timeline(owner) for owner in range(len(OWNERS)))
    assert np.array_equal(by_owner, one.timeline.allocated)


def test_a_healthy_recording_has_no_finding() -> None:
    assert real("healthy").findings == ()
    assert real("healthy").steps.count == 8


def test_a_graph_kept_by_a_log_is_one_leak_of_all_its_sites() -> None:
    (finding,) = real("loss_list").findings
    assert (finding.kind, finding.bytes_per_step, finding.phase) == ("leak", 326321152, "forward")
    assert finding.allocated_at == "train.py:17 in forward"
    assert finding.bytes == pytest.approx(8 * 326321152, rel=0.001)


def test_what_a_custom_backward_keeps_is_found_where_it_was_made() -> None:
    (finding,) = real("ctx_attr").findings
    assert (finding.kind, finding.bytes_per_step, finding.phase) == ("leak", 67109376, "backward")
    assert finding.allocated_at == "train.py:66 in backward"


def test_what_stays_after_the_parameters_left_is_residue() -> None:
    (finding,) = real("fp8_residue").findings
    assert (finding.kind, finding.bytes, finding.bytes_per_step) == ("residue", 174166016, 12800)
    assert finding.allocated_at == "train.py:93 in quant"


def test_kept_blocks_that_pin_segments_are_fragmentation() -> None:
    one = real("fragmentation")
    workspace, kept = one.findings
    assert (workspace.kind, workspace.allocated_at) == ("fragmentation", None)
    assert "cuBLAS workspace" in (workspace.mechanism or "")
    assert (kept.kind, kept.allocated_at) == ("fragmentation", "train.py:82 in per")
    assert workspace.bytes is not None and kept.bytes is not None and workspace.bytes > kept.bytes
    assert workspace.bytes + kept.bytes == one.end.stranded
    pins = [pin for segment in one.pinned for pin in segment.pins if pin.site == "train.py:82 in per"]
    assert len(pins) == 14


def test_an_error_is_explained_by_what_was_free() -> None:
    one = real("oom")
    (finding,) = one.findings
    (oom,) = one.ooms
    assert (finding.kind, finding.bytes, finding.step) == ("out_of_memory", 65536000, 0)
    assert oom.device_free == 147653263360
    assert oom.free[0].size < oom.requested < sum(free.size for free in oom.free)
    assert any("a limit of the allocator" in line for line in finding.evidence)


# --- programs -----------------------------------------------------------------------------------------------


def test_a_training_loop_is_healthy_and_its_owners_are_told() -> None:
    program = Program()
    train(program, 12)
    one = read(program)
    assert one.findings == ()
    assert (one.steps.count, one.steps.source) == (12, "annotations")
    assert {row.owner: row.bytes for row in one.owners} == {
        "parameter": 96 * MIB,
        "optimizer state": 192 * MIB,
    }
    peak = {row.owner for row in one.peak.owners}
    assert {"saved for backward", "gradient", "backward temporary", "variable"} <= peak


def test_bounded_cache_copy_and_accumulated_gradient_are_clean() -> None:
    program = Program()
    recent: list[Any] = []

    def each(step: int) -> None:
        recent.append(program.alloc(5 * MIB, forward(78)))
        if len(recent) > 6:
            program.free(recent.pop(0))
        if step == 9:
            program.alloc(96 * MIB, user(60, "copy_weights"))

    train(program, 30, each)
    assert read(program).findings == ()


def test_a_growing_tensor_that_replaces_itself_is_a_leak() -> None:
    program = Program()
    held: list[Any] = []

    def each(step: int) -> None:
        longer = program.alloc((step + 1) * 2 * MIB, user(57, "append"))
        program.free(held)
        held[:] = [longer]

    train(program, 20, each)
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes_per_step) == ("leak", 2 * MIB)


def test_residue_of_a_known_holder_uses_the_catalogue() -> None:
    program = Program()
    base = "/venv/lib/python3.12/site-packages/transformer_engine/pytorch/module/base.py"
    quantize = [{"filename": base, "line": 1500, "name": "get_weight_workspace"}, *forward(71)]
    cache: list[Any] = []
    held = train(program, 6, lambda step: cache or cache.append(program.alloc(40 * MIB, quantize)))
    program.free(held)
    program.simulator.empty_cache()
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes) == ("residue", 40 * MIB)
    assert finding.mechanism is not None and "_fp8_workspaces" in finding.mechanism
    assert finding.fix is not None and "memtriage.clear_caches(['te.fp8_workspaces'])" in finding.fix
    assert any("te.fp8_workspaces 40.0 MiB" in line for line in finding.evidence)


def test_memory_in_holes_is_told_from_a_full_device() -> None:
    program = Program(capacity=250 * MIB)
    program.free(program.alloc(200 * MIB, forward(29)))
    blocks = [program.alloc(20 * MIB, forward(30)) for _ in range(10)]
    program.free(blocks[::2])
    program.fails(90 * MIB, forward(31))
    finding = read(program).findings[0]
    assert (finding.kind, finding.bytes, finding.playbook) == ("out_of_memory", 90 * MIB, "M8")
    assert finding.allocated_at == "train.py:31 in forward"
    assert any("100.0 MiB free in 5 blocks" in line for line in finding.evidence)
    full = Program(capacity=400 * MIB)
    kept = [full.alloc(20 * MIB, forward(30)) for _ in range(18)]
    full.fails(90 * MIB, forward(31))
    (other,) = read(full).findings
    assert (other.playbook, len(kept)) == ("M4", 18)


KEEP = user(82, "keep")


def keeping_small_blocks(program: Program, steps: int, frames: list[dict[str, Any]] = KEEP) -> None:
    """Each step needs one more large block, as the others are in use, and keeps a small one in its place."""
    train(program, 3)
    for step in range(steps):
        work = [program.alloc(size, forward(31)) for size in free_sizes(program) if size > 2 * MIB]
        program.free(program.alloc((50 + 2 * step) * MIB, forward(32)))
        program.alloc(2 * MIB, frames)
        program.free(work)
        program.free(program.alloc(4096, optimizer(41)))
        program.step_span()


def free_sizes(program: Program) -> list[int]:
    """Sizes of the free blocks, the biggest first."""
    parts = [part for segment in program.segments() for part in segment["blocks"]]
    return sorted((part["size"] for part in parts if part["state"] == "inactive"), reverse=True)


def test_small_blocks_in_large_free_segments_are_fragmentation() -> None:
    program = Program()
    keeping_small_blocks(program, 12)
    one = read(program)
    (finding,) = one.findings
    assert (finding.kind, finding.allocated_at) == ("fragmentation", "train.py:82 in keep")
    assert finding.bytes_per_step == 2 * MIB
    assert finding.bytes is not None
    assert 64 * MIB <= finding.bytes <= one.end.stranded


def test_known_holder_that_strands_segments_is_named() -> None:
    program = Program()
    softmax = "/venv/lib/python3.12/site-packages/transformer_engine/pytorch/softmax.py"
    mask = {"filename": softmax, "line": 250, "name": "_get_default_causal_mask"}
    keeping_small_blocks(program, 12, [mask, *KEEP])
    (finding,) = read(program).findings
    assert finding.kind == "fragmentation"
    assert any("te.causal_mask" in line for line in finding.evidence)
    assert (finding.fix or "").startswith("memtriage.clear_caches(['te.causal_mask']) where a phase ends; ")


def test_the_pool_of_a_segment_that_is_gone_is_told_by_its_events() -> None:
    program = Program()
    program.free(program.alloc(5 * MIB, user(3), pool=(1, 0)))
    program.simulator.release_pool((1, 0))
    program.simulator.empty_cache()
    program.alloc(3 * MIB, user(4))
    one = read(program)
    assert [one.pools[pool] for pool in one.lives.pool.tolist()] == [(1, 0), (0, 0)]


def test_the_pool_of_an_allocation_is_that_of_its_segment_where_events_have_none() -> None:
    program = Program()
    program.alloc(5 * MIB, user(3), pool=(1, 0))
    raw = snapshot_of(program)
    for entry in raw["device_traces"][0]:
        del entry["pool_id"]
    (one,) = recording_of(raw).devices
    assert one.events.pool == {int(one.lives.born[0]): (1, 0)}


def loop_without_optimizer(*backward: Frames) -> Program:
    program = Program()
    program.alloc(50 * MIB, placement(10))
    for _ in range(25):
        step = [program.alloc(4 * MIB, forward(30 + layer)) for layer in range(6)]
        program.alloc(MIB, user(50, "collect"))
        program.free([*step, *(program.alloc(4 * MIB, frames) for frames in backward)])
    return program


def test_a_recurrence_without_backward_is_no_step() -> None:
    one = read(loop_without_optimizer())
    assert (one.steps.count, one.steps.repeats, one.verdict) == (0, 25, "not_judged")
    assert any("repeats 25 times" in note for note in one.notes)
    assert not one.findings


def test_frames_in_the_history_of_blocks_are_read() -> None:
    """torch 2.0 had no frames beside the block's own figures."""
    program = Program()
    program.alloc(3 * MIB, user(7))
    raw = snapshot_of(program)
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            block["history"] = [{"addr": block["address"], "frames": block.pop("frames")}]
    raw["device_traces"] = [[]]
    one = recording_of(raw).devices[0]
    assert [(row.site, row.bytes) for row in one.owners] == [("train.py:7 in train", 3 * MIB)]
    assert one.verdict == "not_judged" and not any("call stacks" in note for note in one.notes)


def test_a_file_that_contradicts_itself_says_so_first() -> None:
    program = Program()
    program.alloc(3 * MIB, user(7))
    raw = snapshot_of(program)
    raw["device_traces"][0] += [
        {"action": action, "addr": place << 40, "size": 1 << 30, "stream": 0, "time_us": 2_000_000}
        for action in ("alloc", "free_requested", "free_completed")
        for place in range(1, 9)
    ]
    one = recording_of(raw).devices[0]
    assert one.notes[0].startswith("the file contradicts itself") and one.verdict == "not_judged"
    assert one.peak.stranded >= 0


def test_a_loop_without_optimizer_is_recognized_by_its_period() -> None:
    one = read(loop_without_optimizer(AUTOGRAD))
    assert (one.steps.source, one.steps.count) == ("period", 25)
    (finding,) = one.findings
    assert (finding.kind, finding.bytes_per_step, finding.allocated_at) == (
        "leak",
        MIB,
        "train.py:50 in collect",
    )


def test_a_recording_that_begins_late_says_from_when_it_is_exact() -> None:
    program = Program()
    train(program, 12, lambda step: program.alloc(3 * MIB, forward(77)) and None)
    whole = read(program)
    raw = snapshot_of(program)
    cut = len(program.trace) // 3
    raw["device_traces"][0] = program.trace[cut:]
    (late,) = recording_of(raw).devices
    assert late.exact_from_us is not None
    assert late.exact_from_us >= program.trace[cut]["time_us"]
    assert np.array_equal(late.timeline.allocated, whole.timeline.allocated[cut:])
    assert (late.findings[0].kind, late.findings[0].bytes_per_step) == ("leak", 3 * MIB)
    assert any("before the first event" in note for note in late.notes)


def test_every_device_is_looked_at() -> None:
    healthy, leaking = Program(device=0), Program(device=1)
    train(healthy, 10)
    train(leaking, 10, lambda step: leaking.alloc(3 * MIB, forward(77)) and None)
    first, second = recording_of(snapshot_of(healthy, leaking)).devices
    assert (first.device, first.findings) == ("cuda:0", ())
    assert [(finding.device, finding.kind) for finding in second.findings] == [("cuda:1", "leak")]


def test_missing_and_unknown_keys_are_no_obstacle() -> None:
    program = Program()
    train(program, 8)
    raw = snapshot_of(program)
    raw |= {"host_traces": [], "a_newer_key": {"x": 1}}
    del raw["allocator_settings"], raw["external_annotations"]
    for entry in raw["device_traces"][0]:
        entry["user_metadata"] = "x"
        del entry["time_us"], entry["pool_id"]
    for segment in raw["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"]
        for block in segment["blocks"]:
            del block["address"]
    raw["device_traces"][0].insert(5, {"action": "of_a_newer_kind", "size": 0, "frames": []})
    (one,) = recording_of(raw).devices
    assert one.end.allocated == one.timeline.allocated[-1] == 288 * MIB
    assert one.steps.source == "optimizer frames"
    assert "left out: 1 event of a kind that this version does not know" in one.notes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw["device_traces"].__setitem__(0, [3]),
        lambda raw: raw["device_traces"].__setitem__(0, 3),
        lambda raw: raw["device_traces"][0][0].update(size="big"),
        lambda raw: raw["device_traces"][0][0].update(size=1 << 90),
        lambda raw: raw["device_traces"][0][0].update(frames=[7]),
        lambda raw: raw["segments"].append({"address": "x"}),
        lambda raw: raw["segments"].append(5),
        lambda raw: raw["segments"][0].update(blocks=[{}]),
    ],
)
def test_nonsense_inside_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    program = Program()
    program.alloc(MIB, user(3))
    raw = snapshot_of(program)
    spoil(raw)
    with pytest.raises(SnapshotError, match="not a memory snapshot"):
        recording_of(raw)


JUNK = st.sampled_from(
    [
        None,
        -1,
        0,
        3,
        "x",
        [],
        {},
        1 << 63,
        1 << 80,
        1.5,
        True,
        [1],
        {"a": 1},
        512,
        "alloc",
        "segment_free",
        "oom",
    ]
)


@settings(deadline=None, max_examples=60)
@example(places=[(420, None), (311908, 9_223_372_036_854_775_808)])  # a size beyond 64 bits
@example(places=[(948, "segment_free")])  # a segment goes, and a block is made where it was
@given(places=st.lists(st.tuples(st.integers(0, 1 << 30), JUNK), min_size=1, max_size=4))
def test_no_content_crashes_the_reader(places: list[tuple[int, object]]) -> None:
    program = Program(capacity=900 * MIB)
    train(program, 2)
    program.fails(800 * MIB, forward(3))
    raw = json.loads(json.dumps(snapshot_of(program)))
    leaves: list[tuple[Any, Any]] = []
    collect(raw, leaves)
    for number, value in places:
        container, key = leaves[number % len(leaves)]
        container[key] = value
    try:
        recording_of(raw)
    except SnapshotError:
        pass


def collect(node: Any, leaves: list[tuple[Any, Any]]) -> None:
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        leaves.append((node, key))
        collect(value, leaves)


def test_segments_alone_are_enough_and_without_a_device_they_are_the_first_ones() -> None:
    program = Program()
    program.alloc(5 * MIB, user(3))
    raw = program.segments()
    for segment in raw:
        del segment["device"]
    (device,) = recording_of(raw).devices
    assert (device.device, device.findings) == ("cuda:0", ())
    assert device.notes[0].startswith("no events")
    assert [(owned.site, owned.bytes) for owned in device.owners] == [("train.py:3 in train", 5 * MIB)]


def test_a_device_is_there_by_its_segments_or_by_its_events() -> None:
    program = Program()
    program.free(program.alloc(5 * MIB, user(3)))
    raw = snapshot_of(program)
    raw["segments"] = []
    raw["device_traces"].append([])
    assert [device.device for device in recording_of(raw).devices] == ["cuda:0"]


# What newer releases of torch record


def test_pinned_host_memory_is_a_note() -> None:
    raw = snapshot_of(Program())
    raw["host_segments"] = [
        {"address": 4096, "size": 64 * MIB, "allocated": True, "active": True, "frames": user(12, "load")},
        {"address": 1 << 30, "size": 32 * MIB, "allocated": False, "active": False, "frames": []},
    ]
    recording = recording_of(raw)
    assert recording.devices == ()
    assert recording.notes == (
        "pinned host memory: 96.0 MiB in 2 blocks, 64.0 MiB of it in use, most of it from "
        "train.py:12 in load 64.0 MiB",
    )


@pytest.mark.parametrize(("flag", "lost"), [(True, True), ([False, True], True), (False, False), ([], False)])
def test_a_ring_that_overflowed_is_a_note(flag: object, lost: bool) -> None:
    program = Program()
    program.alloc(MIB, user(3))
    raw = snapshot_of(program)
    raw["allocator_settings"]["trace_alloc_overflowed"] = flag
    notes = recording_of(raw).notes
    assert any("ring buffer" in note and "max_entries" in note for note in notes) == lost


def test_a_device_of_intel_is_named_by_its_frames() -> None:
    program = Program()
    program.alloc(MIB, [frame("", 0, "c10::xpu::XPUCachingAllocator::malloc(unsigned long)"), *user(3)])
    device = read(program)
    assert device.device == "xpu:0"
