"""Which part of training a failure hit, by the functions that were running."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.messages.errors import FrameState, phase_from_frames
from memtriage.model.position import TrainingPhase

TORCH = "/venv/lib/python3.11/site-packages/torch"
MODULE_CALL = [
    (f"{TORCH}/nn/modules/module.py", "_call_impl"),
    (f"{TORCH}/nn/modules/module.py", "_wrapped_call_impl"),
]
BACKWARD = [
    (f"{TORCH}/autograd/graph.py", "_engine_run_backward"),
    (f"{TORCH}/autograd/__init__.py", "backward"),
    (f"{TORCH}/_tensor.py", "backward"),
]
STEP = [
    (f"{TORCH}/optim/adam.py", "_init_group"),
    (f"{TORCH}/optim/adam.py", "step"),
    (f"{TORCH}/optim/optimizer.py", "wrapper"),
]
DECORATOR = (f"{TORCH}/utils/_contextlib.py", "decorate_context")
CALLED = [("train.py", "forward"), *MODULE_CALL]
MAIN = ("train.py", "<module>")
BEGUN = FrameState(training_begun=True)
GRAD, NO_GRAD = (FrameState(training_begun=True, grad_enabled=enabled) for enabled in (True, False))
EVAL = FrameState(training_begun=True, eval_mode=True)
NOT_BEGUN = FrameState(training_begun=False)


CASES: dict[str, tuple[list[tuple[str, str]], FrameState, TrainingPhase]] = {
    "first forward": ([*CALLED, MAIN], NOT_BEGUN, "forward"),
    "forward without modules": (
        [(f"{TORCH}/nn/functional.py", "linear"), ("train.py", "compute"), MAIN],
        NOT_BEGUN,
        "forward",
    ),
    "building": ([("train.py", "build"), MAIN], NOT_BEGUN, "setup"),
    "building in train": ([("train.py", "build"), ("train.py", "train")], NOT_BEGUN, "setup"),
    "between steps": ([("train.py", "build"), MAIN], BEGUN, "forward"),
    "grad": ([(f"{TORCH}/autograd/__init__.py", "grad"), MAIN], NOT_BEGUN, "backward"),
    "graph no backward": ([(f"{TORCH}/autograd/graph.py", "save_on_cpu"), MAIN], NOT_BEGUN, "setup"),
    "no decorator": ([*CALLED, ("x.py", "score"), (DECORATOR[0], "clone"), MAIN], BEGUN, "forward"),
    "named like a decorator": (
        [*CALLED, ("x.py", "score"), ("own.py", DECORATOR[1]), MAIN],
        BEGUN,
        "forward",
    ),
    "backward": ([*BACKWARD, MAIN], BEGUN, "backward"),
    "recomputation in backward": (
        [*CALLED, (f"{TORCH}/utils/checkpoint.py", "recompute_fn"), *BACKWARD, MAIN],
        GRAD,
        "backward",
    ),
    "copy of a tensor": ([(f"{TORCH}/_tensor.py", "__deepcopy__"), MAIN], NOT_BEGUN, "setup"),
    "optimizer": ([*STEP, MAIN], BEGUN, "optimizer"),
    "step in backward": ([*STEP, ("train.py", "hook"), *BACKWARD, MAIN], BEGUN, "optimizer"),
    "closure of lbfgs": (
        [*CALLED, ("train.py", "closure"), DECORATOR, (f"{TORCH}/optim/lbfgs.py", "step"), MAIN],
        BEGUN,
        "forward",
    ),
    "backward in step": ([*BACKWARD, ("train.py", "closure"), *STEP, MAIN], BEGUN, "backward"),
    "resume": ([(f"{TORCH}/optim/optimizer.py", "load_state_dict"), MAIN], NOT_BEGUN, "setup"),
    "optimizer of ones own": ([("/own/lion.py", "step"), DECORATOR, MAIN], BEGUN, "optimizer"),
    "file named optimizer": ([("/own/optimizer.py", "step"), MAIN], BEGUN, "optimizer"),
    "averaged weights": ([("/own/ema.py", "update"), DECORATOR, MAIN], BEGUN, "forward"),
    "a step of the loop": ([("train.py", "step"), MAIN], BEGUN, "forward"),
    "no grad": ([*CALLED, ("x.py", "score"), DECORATOR, MAIN], BEGUN, "evaluation"),
    "decorated with enable grad": ([*CALLED, ("x.py", "score"), DECORATOR, MAIN], GRAD, "forward"),
    "decorated part of a model": (
        [("rope.py", "forward"), DECORATOR, *MODULE_CALL, *MODULE_CALL, MAIN],
        BEGUN,
        "forward",
    ),
    "initialization": ([("model.py", "init_weights"), DECORATOR, MAIN], NOT_BEGUN, "setup"),
    "evaluate": ([("train.py", "evaluate"), MAIN], BEGUN, "evaluation"),
    "trainer": (
        [*CALLED, ("t.py", "prediction_step"), ("t.py", "_maybe_log_save_evaluate")],
        BEGUN,
        "evaluation",
    ),
    "test": ([*CALLED, ("t.py", "test")], NOT_BEGUN, "evaluation"),
    "generate": ([*CALLED, ("t.py", "Model.generate")], BEGUN, "evaluation"),
    "validation inside training": (
        [*CALLED, ("t.py", "validation_step"), ("t.py", "train_one_epoch"), MAIN],
        BEGUN,
        "evaluation",
    ),
    "training inside an evaluation": (
        [*CALLED, ("t.py", "training_step"), ("t.py", "evaluate"), MAIN],
        BEGUN,
        "forward",
    ),
    "both": ([*CALLED, ("t.py", "train_and_evaluate")], BEGUN, "forward"),
    "part of the model": ([("t.py", "predict_noise"), *MODULE_CALL, MAIN], BEGUN, "forward"),
    "checks arguments": ([("t.py", "_validate_args"), MAIN], BEGUN, "forward"),
    "code": ([(f"{TORCH}/_inductor/codegen/wrapper.py", "generate"), MAIN], BEGUN, "forward"),
    "no grad block": ([*CALLED, MAIN], NO_GRAD, "evaluation"),
    "reentrant checkpoint": (
        [*CALLED, (f"{TORCH}/utils/checkpoint.py", "forward"), *MODULE_CALL, MAIN],
        NO_GRAD,
        "forward",
    ),
    "eval mode": ([*CALLED, MAIN], EVAL, "evaluation"),
    "no frames": ([], NOT_BEGUN, "setup"),
    "windows": ([(r"C:\venv\Lib\site-packages\torch\optim\adam.py", "step"), MAIN], BEGUN, "optimizer"),
}


@pytest.mark.parametrize(("frames", "state", "phase"), CASES.values(), ids=CASES)
def test_the_phase_by_the_frames(
    frames: list[tuple[str, str]], state: FrameState, phase: TrainingPhase
) -> None:
    assert phase_from_frames([(file, name, 1) for file, name in frames], state) == phase


def frames_of(fail: Callable[[], Any]) -> list[tuple[str, str, int]]:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        fail()
    trace = traceback.extract_tb(caught.value.__traceback__)
    return [(frame.filename, frame.name, frame.lineno or 0) for frame in reversed(trace)]


def test_the_phase_by_frames_of_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    huge = 1 << 50

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return torch.empty(huge)

    class Greedy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.empty(huge)

    class Optimizer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            torch.empty(huge)

    weight = torch.ones(2, requires_grad=True)
    model = Greedy()
    scored = torch.no_grad()(lambda: model(weight))

    assert phase_from_frames(frames_of(lambda: Fails.apply(weight).sum().backward()), BEGUN) == "backward"
    assert phase_from_frames(frames_of(lambda: model(weight)), NOT_BEGUN) == "forward"
    assert phase_from_frames(frames_of(Optimizer([weight], {}).step), BEGUN) == "optimizer"
    assert phase_from_frames(frames_of(scored), BEGUN) == "evaluation"
    assert phase_from_frames(frames_of(lambda: torch.empty(huge)), NOT_BEGUN) == "setup"
