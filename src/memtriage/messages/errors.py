"""What an error tells: whether memory ran out, the figures, and the phase of training by its frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtriage.messages.grammar.message import Message, OomFields, figures
from memtriage.model.code_origin import is_torch
from memtriage.model.position import TrainingPhase

_MEMORY_CLASSES: Final = frozenset({"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"})

_ORDINARY: Final = re.compile(
    "ValueError|TypeError|LookupError|AttributeError|AssertionError|ImportError|NameError|SyntaxError|"
    "Warning|KeyboardInterrupt|SystemExit"
)
"""Classes whose text is the program's own talk: no runtime reports a failed allocation with them. (An
ImportError can say "cannot allocate memory in static TLS block", which is not about memory running out.)"""


def is_out_of_memory(kind_names: Sequence[str], text: str) -> bool:
    """Whether an exception means that memory ran out, on a device or on the host.

    SIGKILL of a DataLoader worker is not called that: it alone proves nothing. Nor is a kernel that asks for
    more of a GPU's on-chip shared memory than there is (Triton's `OutOfResources`).

    Args:
        kind_names: names of the exception's class and of its bases, with or without their modules.
        text: its message.
    """
    names = {name.rpartition(".")[2] for name in kind_names}
    if names & _MEMORY_CLASSES:
        return True
    return not any(map(_ORDINARY.fullmatch, names)) and bool(_failures(text))


def read_message(text: str) -> OomFields:
    """Read the figures of an error's message; what it does not have is None.

    Args:
        text: the message, with the name of its class in front where that is known (`MemoryError` has no
            text of its own).
    """
    failures = _failures(text)
    return figures(failures[0]) if failures else OomFields()


def _failures(text: str) -> list[Message]:
    # Imported late: the grammar is compiled in some 40 ms, which a program that lives need not pay.
    from memtriage.messages.grammar.find import find

    return [hit.message for hit in find(text) if hit.message.ran_out]


# The phase of training


@dataclass(frozen=True, slots=True)
class FrameState:
    """What is known beside the frames of a traceback.

    Attributes:
        training_begun: a forward or backward was seen before.
        grad_enabled: see `TrainingPosition`; by the time an exception is caught its `no_grad` blocks have
            ended.
        eval_mode: the model that was running is in eval mode now and was in train mode before.
    """

    training_begun: bool
    grad_enabled: bool | None = None
    eval_mode: bool | None = None


_EVALUATES: Final = re.compile(r"eval(uat(e|ion|ing))?|val(id(at(e|ion|ing))?)?|predict(ions?)?|infer(ence)?")
_NEUTRAL: Final = re.compile(
    r"run|do|maybe|log|save|get|compute|perform|start|on|the|all|and|one|once|full|model|policy|loop|steps?|"
    r"epochs?|batch(es)?|set|split|data(set|loader)?|loader|phase|pass|loss(es)?|metrics?|accuracy|perplexity|"
    r"fn|func|hook|inner|impl"
)
_TESTS: Final = re.compile(r"_*(run_)?test(_step|_loop|(_one)?_epoch)?|_*generate(_text)?")
_TRAINS: Final = re.compile(r"train(ing)?")
_UPDATES: Final = re.compile(r"update|average|(^|_)ema(_|$)")
_NOT_STEPPING: Final = frozenset({"__init__", "load_state_dict", "state_dict", "add_param_group"})
_OPTIMIZER_FILE: Final = re.compile(r"(^|/|_)optim(izers?)?(/|\.py$)")


def phase_from_frames(frames: Sequence[tuple[str, str, int]], state: FrameState) -> TrainingPhase:
    """Tell the phase by the functions that were running, for errors that no observer saw.

    The innermost frame that tells wins, so that an optimizer inside a backward, or a backward inside an
    optimizer's closure, is named rightly. Not told: an evaluation loop in a function with another name and
    with `no_grad()` as a block, unless `state` knows.

    Args:
        frames: (file name, function name, line) of the traceback, innermost first.
        state: what is known beside them.
    """
    forward = False
    candidate: TrainingPhase | None = None
    for position, (filename, function, _) in enumerate(frames):
        path, name = filename.replace("\\", "/"), function.rpartition(".")[2]
        runs = name == "_engine_run_backward" or (name == "backward" and path.endswith("torch/_tensor.py"))
        if runs or path.endswith("torch/autograd/__init__.py"):
            return "backward"
        if _is_optimizer(path, name):
            return "forward" if forward else "optimizer"  # a closure, as LBFGS takes one, runs the model
        if path.endswith("torch/nn/modules/module.py") and name.endswith("_call_impl"):
            # What was decorated or named so inside of a model is a part of the model.
            forward, candidate = True, None
        elif path.endswith("torch/nn/functional.py"):
            forward = True
        elif candidate is None:
            inner = frames[position - 1][1].rpartition(".")[2] if position else ""
            candidate = _candidate(path, name, inner, forward, state)
    if candidate is not None and candidate != "forward":
        return candidate
    if not forward and not state.training_begun:
        return "setup"
    return "evaluation" if candidate is None and _evaluating(frames, state) else "forward"


def _is_optimizer(path: str, name: str) -> bool:
    if "torch/optim/" in path:
        # swa_utils calls the averaged model; a constructor or a checkpoint being loaded is no step.
        return not path.endswith("swa_utils.py") and name not in _NOT_STEPPING
    return name == "step" and _OPTIMIZER_FILE.search(path) is not None


def _candidate(path: str, name: str, inner: str, forward: bool, state: FrameState) -> TrainingPhase | None:
    """The phase that a frame of the program or of a library over torch speaks for; None for most."""
    if path.endswith("torch/utils/_contextlib.py") and name in ("decorate_context", "generator_context"):
        if inner == "step" and not forward:
            return "optimizer"  # one that is not torch's: its step is decorated with no_grad()
        if _UPDATES.search(inner) and not forward:
            return None  # an averaged copy of the weights
        ran = forward or state.training_begun  # before that, it is a decorated initialization of weights
        return "evaluation" if ran and state.grad_enabled is not True else None
    if is_torch(path):
        return None  # a `generate` there makes code
    if _TESTS.fullmatch(name):
        return "evaluation"
    words = {word.lower() for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if word}
    evaluates = {word for word in words if _EVALUATES.fullmatch(word)}
    if evaluates:
        return "evaluation" if all(_NEUTRAL.fullmatch(word) for word in words - evaluates) else None
    return "forward" if any(_TRAINS.fullmatch(word) for word in words) else None


def _evaluating(frames: Sequence[tuple[str, str, int]], state: FrameState) -> bool:
    """Whether a forward without a name is an evaluation, by the model's mode or the missing graph."""
    if state.eval_mode is not None:
        return state.eval_mode
    # Reentrant checkpointing and Function.forward switch gradients off inside of a training forward.
    files = [filename.replace("\\", "/") for filename, _, _ in frames]
    hidden = any(file.endswith(("torch/utils/checkpoint.py", "torch/autograd/function.py")) for file in files)
    return state.grad_enabled is False and not hidden
