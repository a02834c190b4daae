"""What call stacks say."""

from __future__ import annotations

import pytest

from memtriage.snapshots.stacks import stack_facts
from support.raw_snapshot import MODULE, custom_backward, forward, frame, optimizer, placement, user

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
