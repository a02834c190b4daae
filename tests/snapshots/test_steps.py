"""Steps found in traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtriage.model.recording import ALLOC, FREE_REQUESTED, Steps
from memtriage.snapshots.read import load_snapshot
from memtriage.snapshots.steps import settled
from support.raw_snapshot import AUTOGRAD, Frames, Program, forward, optimizer, save, snapshot_of, user


def steps(tmp_path: Path, program: Program) -> Steps:
    return load_snapshot(save(snapshot_of(program), tmp_path / "one.pickle")).devices[0].steps


def work(program: Program, frames: Frames) -> None:
    program.free(program.alloc(4096, frames))


def test_several_optimizers_make_one_step(tmp_path: Path) -> None:
    program = Program()
    for _ in range(5):
        work(program, forward(1))
        work(program, AUTOGRAD)
        program.step_span()
        work(program, optimizer(2))
        program.step_span()
    assert steps(tmp_path, program).count == 5


def test_an_optimizer_inside_backward_makes_one_step_a_forward(tmp_path: Path) -> None:
    program = Program()
    for _ in range(5):
        work(program, forward(1))
        for _ in range(7):
            work(program, AUTOGRAD)
            work(program, optimizer(2))
            program.step_span()
    assert steps(tmp_path, program).count == 5


def test_accumulation_is_one_step(tmp_path: Path) -> None:
    program = Program()
    for _ in range(5):
        for _ in range(4):
            work(program, forward(1))
            work(program, AUTOGRAD)
        work(program, optimizer(2))
    numbers = steps(tmp_path, program)
    assert (numbers.count, numbers.source) == (5, "optimizer frames")


def test_spans_of_a_profiler_serve_where_no_optimizer_is_seen(tmp_path: Path) -> None:
    program = Program()
    for number in range(5):
        work(program, forward(1))
        program.span(f"ProfilerStep#{number}")
    numbers = steps(tmp_path, program)
    assert (numbers.count, numbers.source) == (5, "annotations")


class Kinds:
    """A trace of which only the kinds of its events matter."""

    def __init__(self, *kinds: int) -> None:
        self.kind = np.array(kinds)

    def __len__(self) -> int:
        return len(self.kind)


def test_a_step_is_settled_once_something_is_allocated_again() -> None:
    """Gradients are freed after a step has ended; after the last one everything may be."""
    trace: Any = Kinds(*[ALLOC] * 2, *[FREE_REQUESTED] * 2, *[ALLOC] * 2, *[FREE_REQUESTED] * 4)
    assert settled(trace, [2, 6]) == (4, 8)
    assert settled(trace, [6]) == (10,)
    assert settled(trace, [1, 2]) == (1, 2)


@pytest.mark.parametrize("layers", [0, 1, 6, 40])
def test_the_outer_loop_is_the_step_not_the_layers(tmp_path: Path, layers: int) -> None:
    program = Program()
    work(program, user(1))
    for _ in range(9):
        work(program, user(2, "batch"))
        for _ in range(layers):
            work(program, user(3, "attention"))
            work(program, user(4, "mlp"))
        work(program, user(5, "loss"))
        work(program, AUTOGRAD)
    numbers = steps(tmp_path, program)
    assert (numbers.count, numbers.source) == (9, "period")


def test_what_does_not_recur_has_no_steps(tmp_path: Path) -> None:
    program = Program()
    for line in range(40):
        work(program, user(line))
    assert steps(tmp_path, program) == Steps()


def test_one_stack_again_and_again_is_no_step(tmp_path: Path) -> None:
    program = Program()
    for _ in range(9):
        work(program, user(1))
    assert steps(tmp_path, program) == Steps()
