"""Private pools that are kept apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.model.recording import DeviceRecording
from support.raw_snapshot import Program, forward, user

MIB = 1 << 20


def test_each_pool_is_told_with_what_it_has_free(read: Callable[[Program], DeviceRecording]) -> None:
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


def test_of_many_pools_the_largest_are_listed(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for number in range(8):
        program.alloc((40 + 2 * number) * MIB, user(20), pool=(0, number + 1))
    (finding,) = read(program).findings
    (line,) = [line for line in finding.evidence if line.startswith("by pool: ")]
    assert line.startswith("by pool: pool (0, 8) 54.0 MiB (0 B free), pool (0, 7) 52.0 MiB")
    assert line.endswith(f", and {8 - line.count('MiB')} more")
    assert not any("without `pool=`" in line for line in finding.evidence)


@pytest.mark.parametrize(("second", "found"), [(62, []), (64, [164 * MIB])])
def test_all_but_the_largest_must_be_worth_it(
    read: Callable[[Program], DeviceRecording], second: int, found: list[int]
) -> None:
    program = Program()
    program.alloc(100 * MIB, user(1), pool=(0, 1))
    program.alloc(second * MIB, user(2), pool=(0, 2))
    assert [finding.bytes for finding in read(program).findings] == found


def test_without_events_no_site_is_named(read: Callable[[Program], DeviceRecording]) -> None:
    program = Program()
    for number in range(2):
        program.free(program.alloc(100 * MIB, user(1), pool=(0, number + 1)))
    program.trace.clear()
    (finding,) = read(program).findings
    assert (finding.bytes, finding.allocated_at) == (200 * MIB, None)
