"""Steps found in traces, and what call stacks say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memtriage.model.recording import ALLOC, FREE_REQUESTED, Steps
from memtriage.snapshots.steps import settled, stack_facts
from support.raw_snapshot import (
    AUTOGRAD,
    MODULE,
    Frames,
    Program,
    custom_backward,
    forward,
    frame,
    optimizer,
    placement,
    read,
    user,
)


def steps(program: Program) -> Steps:
    return read(program).steps


def work(program: Program, frames: Frames) -> None:
    program.free(program.alloc(4096, frames))


def test_several_optimizers_make_one_step() -> None:
    program = Program()
    for _ in range(5):
        work(program, forward(1))
        work(program, AUTOGRAD)
        program.step_span()
        work(program, optimizer(2))
        program.step_span()
    assert steps(program).count == 5


def test_an_optimizer_inside_backward_makes_one_step_a_forward() -> None:
    program = Program()
    for _ in range(5):
        work(program, forward(1))
        for _ in range(7):
            work(program, AUTOGRAD)
            work(program, optimizer(2))
            program.step_span()
    assert steps(program).count == 5


def test_accumulation_is_one_step() -> None:
    program = Program()
    for _ in range(5):
        for _ in range(4):
            work(program, forward(1))
            work(program, AUTOGRAD)
        work(program, optimizer(2))
    numbers = steps(program)
    assert (numbers.count, numbers.source) == (5, "optimizer frames")


def test_spans_of_a_profiler_serve_where_no_optimizer_is_seen() -> None:
    program = Program()
    for number in range(5):
        work(program, forward(1))
        program.span(f"ProfilerStep#{number}")
    numbers = steps(program)
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
def test_the_outer_loop_is_the_step_not_the_layers(layers: int) -> None:
    program = Program()
    work(program, user(1))
    for _ in range(9):
        work(program, user(2, "batch"))
        for _ in range(layers):
            work(program, user(3, "attention"))
            work(program, user(4, "mlp"))
        work(program, user(5, "loss"))
        work(program, AUTOGRAD)
    numbers = steps(program)
    assert (numbers.count, numbers.source) == (9, "period")


def test_what_does_not_recur_has_no_steps() -> None:
    program = Program()
    for line in range(40):
        work(program, user(line))
    assert steps(program) == Steps()


def test_one_stack_again_and_again_is_no_step() -> None:
    program = Program()
    for _ in range(9):
        work(program, user(1))
    assert steps(program) == Steps()


# What call stacks say


CHECKPOINT = "site-packages/torch/utils/checkpoint.py"
ENGINE = [
    frame("site-packages/torch/autograd/graph.py", 869, "_engine_run_backward"),
    frame("site-packages/torch/autograd/__init__.py", 381, "backward"),
    frame("site-packages/torch/_tensor.py", 631, "backward"),
]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (user(3), "none"),
        (forward(3), "forward"),
        ([frame("train.py", 4, "forward"), frame("train.py", 9, "main")], "forward"),
        (placement(3), "placement"),
        (optimizer(3), "optimizer"),
        (optimizer(3, "_init_group"), "optimizer"),
        ([frame("site-packages/torch/optim/optimizer.py", 1066, "zero_grad"), *user(3)], "none"),
        ([frame("site-packages/bitsandbytes/optim/optimizer.py", 9, "init_state"), *user(3)], "optimizer"),
        (
            [frame("site-packages/deepspeed/runtime/zero/stage3_optimizer.py", 9, "step"), *user(3)],
            "optimizer",
        ),
        ([*ENGINE, *user(3)], "backward"),
        (custom_backward(3), "backward"),
        ([*forward(3), *ENGINE], "backward"),
        ([*forward(3), frame(CHECKPOINT, 300, "backward"), *custom_backward(4)[1:]], "backward"),
        ([*user(3, "forward"), frame("site-packages/torch/autograd/function.py", 596, "apply")], "forward"),
        ([frame("site-packages/torch/nn/modules/linear.py", 105, "__init__"), *user(3)], "placement"),
        (
            [frame("site-packages/transformers/modeling_utils.py", 1, "from_pretrained"), *user(3)],
            "placement",
        ),
        (
            [frame("site-packages/torch/distributed/distributed_c10d.py", 1, "all_gather"), *forward(3)],
            "communication",
        ),
        # Lightning runs the training step as a closure of the optimizer
        ([*forward(3), frame("site-packages/lightning/closure.py", 9, "__call__"), *optimizer(4)], "forward"),
        ([*user(3, "training_step"), *optimizer(4)], "none"),
        ([*forward(3), frame("site-packages/torch/distributed/fsdp/api.py", 9, "forward")], "forward"),
        ([*user(3), frame("site-packages/torch/distributed/elastic/errors.py", 9, "wrapper")], "none"),
        ([frame(CHECKPOINT, 1, "recompute_fn"), frame(CHECKPOINT, 2, "unpack_hook")], "backward"),
        ([*forward(3), frame(CHECKPOINT, 1, "recompute_fn")], "backward"),
        ([frame("site-packages/optimum/trainer.py", 1, "training_step"), *user(3)], "none"),
        ([frame("/home/me/optimizers/muon.py", 7, "step"), *user(3)], "optimizer"),
        ([frame("/pytorch/Engine.cpp", 1, "torch::autograd::Engine::evaluate_function")], "backward"),
        ([frame(MODULE, 1790, "_call_impl")], "forward"),
        # with stacks="all", C++ frames come first: they are nobody's Python
        ([frame("??", 0, "at::empty_cuda(...)"), frame("??", 0, "??"), *optimizer(3)], "optimizer"),
        ([frame("/pytorch/aten/src/ATen/EmptyTensor.cpp", 1, "at::empty"), *optimizer(3)], "optimizer"),
    ],
)
def test_the_phase_of_a_stack(frames: list[dict[str, object]], phase: str) -> None:
    assert stack_facts(frames).phase == phase


def test_a_thread_without_python_is_autograds() -> None:
    facts = stack_facts([])
    assert (facts.phase, facts.frames) == ("backward", False)


def test_optimizer_state_and_custom_backward_stacks() -> None:
    assert stack_facts(optimizer(3, "_init_group")).state
    assert not stack_facts(optimizer(3)).state
    assert stack_facts(custom_backward(3)).custom
    assert not stack_facts(ENGINE).custom


def test_frames_that_lack_fields_are_no_obstacle() -> None:
    assert stack_facts([{}, {"name": None}]).phase == "none"
