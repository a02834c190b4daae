"""Growth of a recording, joined into causes."""

from __future__ import annotations

from collections.abc import Callable

from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, custom_backward, forward, optimizer, train, user

MIB = 1 << 20


def leaking(*made: tuple[int, list[dict[str, object]]]) -> Program:
    program = Program()

    def each(step: int) -> None:
        for size, frames in made:
            program.alloc(size, frames)

    train(program, 20, each)
    return program


def test_what_a_graph_keeps_alive_grows_with_it(read: Callable[[Program], DeviceRecording]) -> None:
    program = leaking((4 * MIB, forward(71)), (2 * MIB, forward(72)), (MIB, user(55, "batch")))
    (finding,) = read(program).findings
    assert (finding.kind, finding.bytes_per_step, finding.bytes) == ("leak", 7 * MIB, 140 * MIB)
    assert (finding.allocated_at, finding.phase) == ("train.py:71 in forward", "forward")
    assert finding.evidence[:3] == [
        "7.0 MiB more at the end of each step, over 20 steps (found by annotations)",
        "by site, per step: train.py:71 in forward 4.0 MiB, train.py:72 in forward 2.0 MiB, "
        "train.py:55 in batch 1.0 MiB",
        "most of it is allocated by way of train.py:71 in forward < train.py:90 in train",
    ]


def test_what_grows_as_fast_as_a_graph_is_another_cause(read: Callable[[Program], DeviceRecording]) -> None:
    program = leaking((4 * MIB, forward(71)), (4 * MIB, user(55, "batch")))
    found = {finding.allocated_at: finding.bytes_per_step for finding in read(program).findings}
    assert found == {"train.py:71 in forward": 4 * MIB, "train.py:55 in batch": 4 * MIB}


def test_what_no_graph_made_has_no_phase(read: Callable[[Program], DeviceRecording]) -> None:
    (finding,) = read(leaking((4 * MIB, user(55, "log")))).findings
    assert (finding.phase, finding.bytes_per_step) == (None, 4 * MIB)
    (finding,) = read(leaking((4 * MIB, custom_backward(61)))).findings
    assert (finding.phase, finding.bytes_per_step) == ("backward", 4 * MIB)


def test_of_many_sites_the_fastest_are_listed(read: Callable[[Program], DeviceRecording]) -> None:
    program = leaking(*(((10 - line) * MIB, forward(70 + line)) for line in range(8)))
    (finding,) = read(program).findings
    line = finding.evidence[1]
    assert line.startswith(
        "by site, per step: train.py:70 in forward 10.0 MiB, train.py:71 in forward 9.0 MiB"
    )
    assert line.endswith("train.py:75 in forward 5.0 MiB, and 2 more")


def test_growth_of_an_optimizer_s_states_has_their_bytes(read: Callable[[Program], DeviceRecording]) -> None:
    """Those that it made in its first step come from the same line, and are no part of it."""
    (finding,) = read(leaking((4 * MIB, optimizer(41)))).findings
    assert (finding.kind, finding.bytes_per_step, finding.bytes) == ("leak", 4 * MIB, 80 * MIB)
    assert finding.evidence[-2] == "alive at the snapshot: train.py:41 in train (80.0 MiB in 20 blocks)"


def test_states_that_were_made_once_are_no_part_of_what_grows_at_their_line(
    read: Callable[[Program], DeviceRecording],
) -> None:
    (finding,) = read(leaking((4 * MIB, user(41)))).findings
    assert (finding.bytes_per_step, finding.bytes) == (4 * MIB, 80 * MIB)
