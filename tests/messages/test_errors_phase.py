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
NO_GRAD = (f"{TORCH}/utils/_contextlib.py", "decorate_context")
FORWARD = ("train.py", "forward")
MAIN = ("train.py", "<module>")
BEGUN = FrameState(training_begun=True)
NOT_BEGUN = FrameState(training_begun=False)


@pytest.mark.parametrize(
    ("frames", "state", "phase"),
    [
        pytest.param([FORWARD, *MODULE_CALL, MAIN], NOT_BEGUN, "forward", id="first-forward"),
        pytest.param(
            [(f"{TORCH}/nn/functional.py", "linear"), ("train.py", "compute"), MAIN],
            NOT_BEGUN,
            "forward",
            id="forward-without-modules",
        ),
        pytest.param([("train.py", "build"), MAIN], NOT_BEGUN, "setup", id="building"),
        pytest.param(
            [("train.py", "build"), ("train.py", "train")], NOT_BEGUN, "setup", id="building-in-train"
        ),
        pytest.param([("train.py", "build"), MAIN], BEGUN, "forward", id="between-steps"),
        pytest.param([(f"{TORCH}/autograd/__init__.py", "grad"), MAIN], NOT_BEGUN, "backward", id="grad"),
        pytest.param(
            [(f"{TORCH}/autograd/graph.py", "save_on_cpu"), MAIN], NOT_BEGUN, "setup", id="graph-no-backward"
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), (NO_GRAD[0], "clone"), MAIN],
            BEGUN,
            "forward",
            id="no-decorator",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), ("own.py", NO_GRAD[1]), MAIN],
            BEGUN,
            "forward",
            id="named-like-a-decorator",
        ),
        pytest.param([*BACKWARD, MAIN], BEGUN, "backward", id="backward"),
        pytest.param(
            [FORWARD, *MODULE_CALL, (f"{TORCH}/utils/checkpoint.py", "recompute_fn"), *BACKWARD, MAIN],
            FrameState(training_begun=True, grad_enabled=True),
            "backward",
            id="recomputation-in-backward",
        ),
        pytest.param(
            [(f"{TORCH}/_tensor.py", "__deepcopy__"), MAIN], NOT_BEGUN, "setup", id="copy-of-a-tensor"
        ),
        pytest.param([*STEP, MAIN], BEGUN, "optimizer", id="optimizer"),
        pytest.param(
            [*STEP, ("train.py", "hook"), *BACKWARD, MAIN], BEGUN, "optimizer", id="step-in-backward"
        ),
        pytest.param(
            [
                FORWARD,
                *MODULE_CALL,
                ("train.py", "closure"),
                NO_GRAD,
                (f"{TORCH}/optim/lbfgs.py", "step"),
                MAIN,
            ],
            BEGUN,
            "forward",
            id="closure-of-lbfgs",
        ),
        pytest.param(
            [*BACKWARD, ("train.py", "closure"), *STEP, MAIN], BEGUN, "backward", id="backward-in-step"
        ),
        pytest.param(
            [(f"{TORCH}/optim/optimizer.py", "load_state_dict"), MAIN], NOT_BEGUN, "setup", id="resume"
        ),
        pytest.param(
            [("/own/lion.py", "step"), NO_GRAD, MAIN], BEGUN, "optimizer", id="optimizer-of-ones-own"
        ),
        pytest.param([("/own/optimizer.py", "step"), MAIN], BEGUN, "optimizer", id="file-named-optimizer"),
        pytest.param([("/own/ema.py", "update"), NO_GRAD, MAIN], BEGUN, "forward", id="averaged-weights"),
        pytest.param([("train.py", "step"), MAIN], BEGUN, "forward", id="a-step-of-the-loop"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), NO_GRAD, MAIN], BEGUN, "evaluation", id="no-grad"
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), NO_GRAD, MAIN],
            FrameState(training_begun=True, grad_enabled=True),
            "forward",
            id="decorated-with-enable-grad",
        ),
        pytest.param(
            [("rope.py", "forward"), NO_GRAD, *MODULE_CALL, *MODULE_CALL, MAIN],
            BEGUN,
            "forward",
            id="decorated-part-of-a-model",
        ),
        pytest.param([("model.py", "init_weights"), NO_GRAD, MAIN], NOT_BEGUN, "setup", id="initialization"),
        pytest.param([("train.py", "evaluate"), MAIN], BEGUN, "evaluation", id="evaluate"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "prediction_step"), ("t.py", "_maybe_log_save_evaluate")],
            BEGUN,
            "evaluation",
            id="trainer",
        ),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "test")], NOT_BEGUN, "evaluation", id="test"),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "Model.generate")], BEGUN, "evaluation", id="generate"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "validation_step"), ("t.py", "train_one_epoch"), MAIN],
            BEGUN,
            "evaluation",
            id="validation-inside-training",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "training_step"), ("t.py", "evaluate"), MAIN],
            BEGUN,
            "forward",
            id="training-inside-an-evaluation",
        ),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "train_and_evaluate")], BEGUN, "forward", id="both"),
        pytest.param(
            [("t.py", "predict_noise"), *MODULE_CALL, MAIN], BEGUN, "forward", id="part-of-the-model"
        ),
        pytest.param([("t.py", "_validate_args"), MAIN], BEGUN, "forward", id="checks-arguments"),
        pytest.param(
            [(f"{TORCH}/_inductor/codegen/wrapper.py", "generate"), MAIN], BEGUN, "forward", id="code"
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, MAIN],
            FrameState(training_begun=True, grad_enabled=False),
            "evaluation",
            id="no-grad-block",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, (f"{TORCH}/utils/checkpoint.py", "forward"), *MODULE_CALL, MAIN],
            FrameState(training_begun=True, grad_enabled=False),
            "forward",
            id="reentrant-checkpoint",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, MAIN],
            FrameState(training_begun=True, eval_mode=True),
            "evaluation",
            id="eval-mode",
        ),
        pytest.param([], NOT_BEGUN, "setup", id="no-frames"),
        pytest.param(
            [(r"C:\venv\Lib\site-packages\torch\optim\adam.py", "step"), MAIN],
            BEGUN,
            "optimizer",
            id="windows",
        ),
    ],
)
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
