"""What the blocks of a recording are."""

from __future__ import annotations

from pathlib import Path

from memtriage.model.recording import OWNERS, DeviceRecording
from memtriage.snapshots.read import load_snapshot
from support.raw_snapshot import (
    AUTOGRAD,
    Program,
    custom_backward,
    forward,
    frame,
    optimizer,
    placement,
    save,
    snapshot_of,
    user,
)

MIB = 1 << 20
COLLECTIVE = [frame("site-packages/torch/distributed/distributed_c10d.py", 1, "all_gather"), *user(9)]


def owners(tmp_path: Path, program: Program) -> dict[int, str]:
    """Owner by requested size, which each block of these programs has for itself."""
    one: DeviceRecording = load_snapshot(save(snapshot_of(program), tmp_path / "one.pickle")).devices[0]
    sizes, codes = one.lives.requested.tolist(), one.lives.owner.tolist()
    return {size: OWNERS[code] for size, code in zip(sizes, codes, strict=True)}


def test_only_what_was_there_already_comes_from_before_the_recording(tmp_path: Path) -> None:
    program = Program()
    program.alloc(5001, [])
    program.alloc(5002, user(1))
    for _ in range(3):
        program.alloc(2, forward(6))
        program.step_span()
    assert owners(tmp_path, program)[5001] != "before the recording"


def test_a_block_is_what_its_stack_and_its_life_make_it(tmp_path: Path) -> None:
    program = Program()
    program.alloc(1001, placement(1))
    program.alloc(1002, COLLECTIVE)
    batch = program.alloc(1003, user(2))
    scratch = program.alloc(1004, forward(3))
    saved = program.alloc(1005, forward(3))
    program.free(scratch)
    program.alloc(1, forward(3))
    temporary = program.alloc(1006, AUTOGRAD)
    gradient = program.alloc(1007, AUTOGRAD)
    program.free([temporary, saved])
    program.alloc(1008, optimizer(4, "_init_group"))
    program.free(program.alloc(1009, optimizer(4)))
    program.step_span()
    program.free([gradient, batch])
    kept = program.alloc(1010, custom_backward(5))
    for _ in range(3):
        program.alloc(2, forward(6))
        program.step_span()
    told = owners(tmp_path, program)
    assert kept.requested == 1010
    expected = {
        1001: "parameter",
        1002: "communication buffer",
        1003: "variable",
        1004: "forward temporary",
        1005: "saved for backward",
        1006: "backward temporary",
        1007: "gradient",
        1008: "optimizer state",
        1009: "optimizer temporary",
        1010: "autograd context",
    }
    assert told.items() >= expected.items()


def test_a_workspace_is_known_by_its_size_and_its_loneliness(tmp_path: Path) -> None:
    program = Program()
    program.alloc(32 * MIB, forward(1))
    program.alloc(MIB, forward(1))
    program.alloc(MIB, placement(2))
    program.alloc(MIB, forward(3))  # of that size too, but no cuBLAS workspace comes from there
    program.alloc(5, forward(1))
    program.step_span()
    one = load_snapshot(save(snapshot_of(program), tmp_path / "one.pickle")).devices[0]
    totals = {(row.owner, row.site): row.bytes for row in one.owners}
    assert totals["cuBLAS workspace", "train.py:1 in forward"] == 33 * MIB
    assert totals["parameter", "train.py:2 in <module>"] == MIB
    assert totals["saved for backward", "train.py:3 in forward"] == MIB


def test_many_blocks_of_a_workspaces_size_are_no_workspaces(tmp_path: Path) -> None:
    program = Program()
    for _ in range(5):
        program.alloc(32 * MIB, forward(1))
    program.step_span()
    assert set(owners(tmp_path, program).values()) == {"saved for backward"}


def test_without_any_stacks_nothing_is_called_a_gradient(tmp_path: Path) -> None:
    program = Program()
    for _ in range(6):
        program.alloc(700, AUTOGRAD)
        program.step_span()
    assert set(owners(tmp_path, program).values()) == {"c++ only"}


def test_what_is_older_than_the_recording_is_called_so(tmp_path: Path) -> None:
    program = Program()
    program.alloc(5 * MIB, AUTOGRAD)
    program.trace.clear()
    program.alloc(6 * MIB, forward(1))
    program.step_span()
    assert owners(tmp_path, program)[5 * MIB] == "before the recording"
