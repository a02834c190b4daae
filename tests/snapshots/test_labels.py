"""What the program itself says of its blocks: metadata of the moment, and annotations afterwards."""

from __future__ import annotations

from collections.abc import Callable

from memtriage.allocator.blocks import SimBlock
from memtriage.model.recording import DeviceRecording, LabelRow
from support.raw_snapshot import MIB, Program, placement, user


def annotate(program: Program, block: SimBlock, label: str) -> None:
    """As `torch.cuda.memory._annotate_tensor` records it."""
    program.clock += 7
    program.trace.append(
        {
            "action": "annotate",
            "addr": block.address,
            "size": block.size,
            "stream": 0,
            "time_us": program.clock,
            "user_metadata": label,
        }
    )


def test_labels_have_the_bytes_of_their_blocks(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    weights = program.alloc(64 * MIB, placement(3))
    for _ in range(2):  # the same address twice: each annotation names the block of its moment
        first = len(program.trace)
        cache = program.alloc(32 * MIB, user(7))
        for event in program.trace[first:]:
            event["user_metadata"] = "prefill"
        annotate(program, cache, "KV cache")
        program.free(cache)
    annotate(program, weights, "weights")
    annotate(program, cache, "nothing is there")
    device = read(program)
    assert device.labels == (
        LabelRow("weights", 64 * MIB, 64 * MIB, 1),
        LabelRow("KV cache", 32 * MIB, 0, 2),
        LabelRow("prefill", 32 * MIB, 0, 2),
    )
    assert not any("left out" in note for note in device.notes)


def test_a_recording_without_labels_has_none(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    program.alloc(64 * MIB, placement(3))
    assert read(program).labels == ()
