"""The allocator from step to step: the same outcomes whether each step is simulated or known already."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.prediction.many_steps.course import (
    MOST_BLOCKS,
    RunCourse,
    StepFailed,
    StepOutcome,
)
from memtriage.prediction.many_steps.step_trace import Other, StepTrace

MIB = 1 << 20
LOSS = ("forward", "sum", 0)
KEEPS = StepTrace([30 * MIB, 20 * MIB, -1], left={LOSS: 1}, names=["mul", "sum"])
"""Makes 30 and 20 MiB, and leaves the 20."""
FREES = StepTrace([30 * MIB, Other("free", block=(1, LOSS)), 20 * MIB, -1], {LOSS: 1}, ["mul", "sum"])
"""The same, and frees what the step before has left as soon as it has its 30 MiB."""
EMPTIES = replace(FREES, operations=[*FREES.operations, Other("empty")])


def course(capacity: int | None = None, most_blocks: int = MOST_BLOCKS) -> RunCourse:
    return RunCourse(lambda: Simulator(parse_conf("", "2.11"), capacity=capacity), 1, most_blocks)


def outcomes(*steps: StepTrace, most_blocks: int = MOST_BLOCKS) -> list[StepOutcome]:
    return list(course(most_blocks=most_blocks).run(steps))


def test_each_step_has_its_peaks_and_what_is_left() -> None:
    first, second, third = outcomes(KEEPS, FREES, FREES)
    assert first == StepOutcome(50 * MIB, 50 * MIB, 20 * MIB, 0, 0)
    # The 30 MiB of the step before are there again; 20 are freed before the next 20 are made.
    assert second == third == first
    *_, emptied, small = outcomes(KEEPS, EMPTIES, StepTrace([5 * MIB], names=["mul"]))
    assert (emptied.peak_reserved, small.peak_reserved) == (50 * MIB, 40 * MIB)


def test_a_step_that_came_before_in_the_same_state_is_not_simulated_again() -> None:
    run = course()
    list(run.run([KEEPS, *[FREES] * 50]))
    assert run.simulated < 20


def test_blocks_that_no_step_has_left_are_passed_over() -> None:
    assert outcomes(FREES) == outcomes(KEEPS)
    used = StepTrace([5, Other("use", stream=7, block=(1, LOSS))], names=["mul"])
    assert outcomes(used)[0].end_allocated == 512


def test_another_streams_blocks_wait_until_it_has_passed() -> None:
    waits = StepTrace(
        [
            30 * MIB,
            Other("use", stream=7, block=0),
            -1,
            30 * MIB,
            Other("passed", stream=7),
            30 * MIB,
        ],
        names=["mul", "add", "sub"],
    )
    (outcome,) = outcomes(waits)
    assert outcome.peak_reserved == 60 * MIB, "the third takes what the first had"
    elsewhere = StepTrace([Other("malloc", 20 * MIB, 7), 20 * MIB], names=["copy", "mul"])
    assert outcomes(elsewhere)[0].peak_reserved == 40 * MIB


def test_where_memory_runs_out_the_operator_is_named() -> None:
    run = course(capacity=70 * MIB).run([KEEPS, KEEPS, KEEPS])
    assert next(run).flushes == 0
    with pytest.raises(StepFailed) as failed:
        list(run)
    assert failed.value.operator == "sum"
    assert failed.value.error.requested == 20 * MIB


def test_a_flush_is_counted_in_its_step() -> None:
    small, large = (StepTrace([mib * MIB, -1], names=["mul"]) for mib in (30, 60))
    run = course(capacity=70 * MIB).run([small, large, large])
    assert [outcome.flushes for outcome in run] == [0, 1, 0]


STEPS = st.lists(st.sampled_from([KEEPS, FREES, EMPTIES]), max_size=30)


@given(STEPS, st.integers(-1, 20))
def test_forgetting_states_changes_no_outcome(steps: list[StepTrace], most_blocks: int) -> None:
    assert outcomes(*steps, most_blocks=most_blocks) == outcomes(*steps)


@given(STEPS)
def test_known_outcomes_are_those_of_simulating_every_step(steps: list[StepTrace]) -> None:
    alone = [replace(step) for step in steps]  # other objects, so that none is known
    assert outcomes(*steps) == outcomes(*alone)
