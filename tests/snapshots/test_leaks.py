"""Growth of a recording over its steps, joined into causes, and what stays without parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.model.findings import Finding
from memtriage.model.recording import DeviceRecording
from memtriage.snapshots.leaks import MANY_STEPS, growing_sites
from memtriage.snapshots.owners import SiteSeries
from support.raw_snapshot import Program, forward, optimizer, placement, read, train, user

MIB = 1 << 20


def grows(values: Sequence[int], blocks: Sequence[int] | None = None, every: int = 1) -> list[float]:
    steps = np.arange(1, len(values) + 1) * every
    counts = values if blocks is None else blocks
    return [*growing_sites(SiteSeries(steps, np.array([values]), np.array([counts]))).values()]


@given(
    start=st.integers(0, 1 << 40),
    rate=st.integers(1, 1 << 30),
    steps=st.integers(4, 200),
    every=st.integers(1, 9),
)
def test_a_steady_rise_is_found_with_its_very_rate(start: int, rate: int, steps: int, every: int) -> None:
    (found,) = grows([start + rate * step for step in range(steps)], every=every)
    assert found == pytest.approx(rate / every)


@given(
    before=st.integers(0, 100), after=st.integers(0, 100), rise=st.integers(0, 9), steps=st.integers(9, 60)
)
def test_one_rise_is_no_growth(before: int, after: int, rise: int, steps: int) -> None:
    at = min(rise, steps)
    assert grows([before] * at + [after] * (steps - at)) == []


@given(st.integers(9, 100), st.integers(2, 40))
def test_what_fills_to_a_bound_and_stays_there_is_no_growth(steps: int, bound: int) -> None:
    bound = min(bound, steps * 2 // 3 - 1)
    assert grows([min(step, bound) for step in range(steps)]) == []


def test_a_sawtooth_whose_floor_rises_is_growth() -> None:
    (found,) = grows([10 * step + (7 if step % 3 else 0) * 10 for step in range(30)])
    assert found == pytest.approx(10, rel=0.2)


RISING = [1, 2, 3, 4, 5]
SAWTOOTH = [10 * step + (70 if step % 3 else 0) for step in range(30)]


@pytest.mark.parametrize(
    ("values", "blocks", "grown"),
    [
        ([1, 2, 3], None, False),  # too few steps
        ([100, 1, 2, 3, 4], None, False),  # it ends below where it began
        ([1, 2, 3, 3, 4], None, False),  # in a short recording each step must rise
        (RISING, [1, 2, 3, 3, 4], False),
        (RISING, [1, 1, 1, 1, 1], False),
        (RISING, RISING, True),
        (SAWTOOTH, [4] * 30, False),  # as many blocks, now larger, now smaller
        (SAWTOOTH, [4 + step // 10 for step in range(30)], True),
    ],
)
def test_bytes_and_blocks_must_rise(values: list[int], blocks: list[int] | None, grown: bool) -> None:
    assert bool(grows(values, blocks)) == grown


def test_the_fastest_comes_first() -> None:
    steps = np.arange(1, 13)
    table = np.stack([steps * 3, steps * 0 + 5, steps * 8])
    assert list(growing_sites(SiteSeries(steps, table, table))) == [2, 0]


def test_the_first_step_need_not_rise() -> None:
    (growth,) = grows([5, 4, 6, 8, 10])
    assert growth == pytest.approx(2)


def test_many_steps_may_pause_where_nothing_falls_back() -> None:
    values = [step // 2 for step in range(2 * MANY_STEPS)]
    (growth,) = grows(values)
    assert growth == (values[-1] - values[WARM_UP]) / (len(values) - 1 - WARM_UP)
    assert grows(values[: MANY_STEPS - 1]) == []


def test_the_rate_of_what_never_falls_back_is_over_the_whole_recording() -> None:
    values = [min(step, 20) * 100 + step for step in range(60)]
    (growth,) = grows([value + (100 * step if step > 40 else 0) for step, value in enumerate(values)])
    assert growth == pytest.approx((values[-1] + 5900 - values[WARM_UP]) / (59 - WARM_UP))


@pytest.mark.parametrize(("last", "grown"), [(1, False), (5, True)])
def test_growth_must_go_on_in_the_last_third(last: int, grown: bool) -> None:
    values = [10 * step for step in range(20)]
    for _ in range(10):
        values.append(values[-1] + last)
    assert bool(grows(values)) == grown


def leaking(*made: tuple[int, list[dict[str, object]]]) -> Program:
    program = Program()

    def each(step: int) -> None:
        for size, frames in made:
            program.alloc(size, frames)

    train(program, 20, each)
    return program


def test_what_a_graph_keeps_alive_grows_with_it() -> None:
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


def test_what_grows_as_fast_as_a_graph_is_another_cause() -> None:
    program = leaking((4 * MIB, forward(71)), (4 * MIB, user(55, "batch")))
    found = {finding.allocated_at: finding.bytes_per_step for finding in read(program).findings}
    assert found == {"train.py:71 in forward": 4 * MIB, "train.py:55 in batch": 4 * MIB}


def test_of_many_sites_the_fastest_are_listed() -> None:
    program = leaking(*(((10 - line) * MIB, forward(70 + line)) for line in range(8)))
    (finding,) = read(program).findings
    line = finding.evidence[1]
    assert line.startswith(
        "by site, per step: train.py:70 in forward 10.0 MiB, train.py:71 in forward 9.0 MiB"
    )
    assert line.endswith("train.py:75 in forward 5.0 MiB, and 2 more")


def test_growth_of_an_optimizer_s_states_has_their_bytes() -> None:
    """Those that it made in its first step come from the same line, and are no part of it."""
    (finding,) = read(leaking((4 * MIB, optimizer(41)))).findings
    assert (finding.kind, finding.bytes_per_step, finding.bytes) == ("leak", 4 * MIB, 80 * MIB)
    assert finding.evidence[-2] == "alive at the snapshot: train.py:41 in train (80.0 MiB in 20 blocks)"


# What stays on a device while the parameters are away


def residue(device: DeviceRecording) -> list[Finding]:
    return [finding for finding in device.findings if finding.kind == "residue"]


def test_what_left_and_what_stays_is_told() -> None:
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


def test_what_is_made_after_they_left_is_none() -> None:
    program = Program()
    program.free(train(program, 6))
    program.alloc(200 * MIB, user(9, "generate"))
    assert residue(read(program)) == []


def test_of_phases_without_parameters_the_emptiest_event_of_the_last_counts() -> None:
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
def test_a_twentieth_of_the_parameters_is_residue(stays: int, found: list[int]) -> None:
    program = Program()
    program.alloc(stays * MIB, user(5))
    program.free(program.alloc(300 * MIB, placement(10)))
    assert [finding.bytes for finding in residue(read(program))] == found


@pytest.mark.parametrize(("left", "found"), [(30, True), (32, False)])
def test_a_tenth_of_the_parameters_may_stay(left: int, found: bool) -> None:
    program = Program()
    program.alloc(100 * MIB, user(5))
    program.alloc(left * MIB, placement(10))
    program.free(program.alloc((300 - left) * MIB, placement(11)))
    assert bool(residue(read(program))) == found


def test_growth_that_makes_up_most_of_it_is_a_leak() -> None:
    program = Program()
    program.alloc(10 * MIB, user(5))
    held = train(program, 20, lambda step: program.alloc(6 * MIB, forward(77)) and None)
    program.free(held)
    kinds = {finding.kind: finding.bytes for finding in read(program).findings}
    assert kinds["leak"] == 120 * MIB
    assert kinds.get("residue") == 10 * MIB
