"""What stays on a device while the parameters are away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.model.findings import Finding
from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, forward, placement, train, user

MIB = 1 << 20


def residue(device: DeviceRecording) -> list[Finding]:
    return [finding for finding in device.findings if finding.kind == "residue"]


def test_what_left_and_what_stays_is_told(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    cache = program.alloc(40 * MIB, user(5, "lookup"))
    held = train(program, 6)
    table = program.alloc(24 * MIB, user(6, "lookup"))
    program.free(held)
    (finding,) = residue(read(program))
    assert (finding.bytes, finding.bytes_per_step, finding.step) == (64 * MIB, None, 6)
    assert (finding.allocated_at, finding.phase) == ("train.py:5 in lookup", "after the parameters left")
    assert finding.evidence[:2] == [
        "96.0 MiB of parameters left the device; 64.0 MiB made before stay at the snapshot",
        "by site: train.py:5 in lookup (40.0 MiB in 1 block), train.py:6 in lookup (24.0 MiB in 1 block)",
    ]
    program.free([cache, table])
    assert residue(read(program)) == []


def test_what_is_made_after_they_left_is_none(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    program.free(train(program, 6))
    program.alloc(200 * MIB, user(9, "generate"))
    assert residue(read(program)) == []


def test_of_phases_without_parameters_the_emptiest_event_of_the_last_counts(
    read: Callable[[Program], DeviceRecording],
) -> None:
    program = Program()
    for site in (5, 6):
        weights = program.alloc(300 * MIB, placement(10))
        program.alloc(site * 10 * MIB, user(site, "cached"))
        left = len(program.trace)
        program.free(weights)
    program.free(program.alloc(90 * MIB, user(8, "generate")))
    program.alloc(300 * MIB, placement(10))
    (finding,) = residue(read(program))
    assert finding.bytes == 110 * MIB
    assert any(f"stay at event {left}" in line for line in finding.evidence)


@pytest.mark.parametrize(("stays", "found"), [(14, []), (16, [16 * MIB])])
def test_a_twentieth_of_the_parameters_is_residue(
    read: Callable[[Program], DeviceRecording], stays: int, found: list[int]
) -> None:
    program = Program()
    program.alloc(stays * MIB, user(5))
    program.free(program.alloc(300 * MIB, placement(10)))
    assert [finding.bytes for finding in residue(read(program))] == found


@pytest.mark.parametrize(("left", "found"), [(30, True), (32, False)])
def test_a_tenth_of_the_parameters_may_stay(
    read: Callable[[Program], DeviceRecording], left: int, found: bool
) -> None:
    program = Program()
    program.alloc(100 * MIB, user(5))
    program.alloc(left * MIB, placement(10))
    program.free(program.alloc((300 - left) * MIB, placement(11)))
    assert bool(residue(read(program))) == found


def test_growth_that_makes_up_most_of_it_is_a_leak(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    program.alloc(10 * MIB, user(5))
    held = train(program, 20, lambda step: program.alloc(6 * MIB, forward(77)) and None)
    program.free(held)
    kinds = {finding.kind: finding.bytes for finding in read(program).findings}
    assert kinds["leak"] == 120 * MIB
    assert kinds.get("residue") == 10 * MIB
