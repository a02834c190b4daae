"""Infer from a recorded call stack in which phase of training an allocation was made, and by which part.

Only file and function names of torch and of the libraries that wrap it are used, none of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from memtriage.model.code_origin import code_owner
from memtriage.observe.cuda import Frame

StackPhase = Literal["none", "forward", "backward", "optimizer", "placement", "communication"]
"""Phase of a stack. `placement` creates, moves or loads a module's parameters; `none` is user code outside
the other phases."""

PHASES: Final[tuple[StackPhase, ...]] = (
    "none",
    "forward",
    "backward",
    "optimizer",
    "placement",
    "communication",
)
"""The order of phases in columns of numbers."""
NONE, FORWARD, BACKWARD, OPTIMIZER, PLACEMENT, COMMUNICATION = range(len(PHASES))

_OPTIMIZER_FILE: Final = re.compile(
    r"(^|/)(optim|optimi[sz]ers?)/([^/]+/)*[^/]*$|(^|/)[^/]*optimi[sz]er[^/]*\.py$|/ops/adam/"
)
_OPTIMIZER_CALL: Final = re.compile(
    r"^_?(step|.*_step|.*_init_group|init_state|_multi_tensor_.*|_single_tensor_.*|.*update.*)$"
)
_STATE_CALL: Final = re.compile(r"_init_group|init(ialize)?_(optimizer_)?states?|_init_state")
_ENGINE_CALL: Final = frozenset({"_engine_run_backward", "_make_grads"})
_MODULE_FILE: Final = re.compile(r"(^|/)torch/nn/modules/[^/]*\.py$")
_MODULE_CALL: Final = frozenset({"_call_impl", "_wrapped_call_impl", "_slow_forward"})
_PLACEMENT_CALL: Final = frozenset(
    {"_apply", "convert", "load_state_dict", "_load_from_state_dict", "to_empty"}
)
_MAKING_CALL: Final = frozenset({"__init__", "reset_parameters"})
_LOADING_CALL: Final = frozenset({"from_pretrained", "load_state_dict", "_load_state_dict_into_meta_model"})
_DISTRIBUTED_FILE: Final = re.compile(r"(^|/)torch/distributed/")
_FUNCTION_FILE: Final = re.compile(r"(^|/)torch/autograd/function\.py$")
_CHECKPOINT_FILE: Final = re.compile(r"(^|/)torch/utils/checkpoint\.py$")
_RECOMPUTING_CALL: Final = frozenset({"unpack_hook", "recompute_fn"})
_AUTOGRAD_FILE: Final = re.compile(r"(^|/)torch/autograd/(__init__|graph)\.py$")


@dataclass(frozen=True, slots=True)
class StackFacts:
    """What a stack says.

    Attributes:
        phase: the phase; a backward that recomputes a forward is backward.
        state: it is where an optimizer makes its state.
        custom: a custom `autograd.Function` runs its backward.
        frames: it has any.
    """

    phase: StackPhase
    state: bool = False
    custom: bool = False
    frames: bool = True


def phase_codes(facts: Sequence[StackFacts]) -> NDArray[np.uint8]:
    """The phases of stacks, as indices into `PHASES`."""
    return np.array([PHASES.index(fact.phase) for fact in facts], np.uint8)


def stack_facts(frames: Sequence[Frame]) -> StackFacts:
    """Judge one stack, innermost frame first: what is further in decides.

    A forward that an optimizer runs (as a closure, the way Lightning does it) is a forward, and what a module
    does inside a wrapper for distributed training is no communication. A stack without frames is that of a
    thread that runs no Python: autograd's, so `backward`.
    """
    if not frames:
        return StackFacts("backward", frames=False)
    placement = forward = communication = own = False
    inner = ""
    for frame in frames:
        file, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if _runs_backward(file, name):
            return StackFacts("backward")
        if _FUNCTION_FILE.search(file) and name == "apply" and ("backward" in inner or "vjp" in inner):
            return StackFacts("backward", custom=True)
        if not (forward or own) and _OPTIMIZER_FILE.search(file) and _OPTIMIZER_CALL.match(name):
            state = any(_STATE_CALL.search(str(other_frame.get("name", ""))) for other_frame in frames)
            return StackFacts("optimizer", state=state)
        if _MODULE_FILE.search(file):
            placement = placement or name in _PLACEMENT_CALL or (name in _MAKING_CALL and not forward)
        if not (forward or own):
            communication = communication or bool(_DISTRIBUTED_FILE.search(file))
        forward = forward or name == "forward" or (name in _MODULE_CALL and bool(_MODULE_FILE.search(file)))
        placement = placement or name in _LOADING_CALL
        own = own or code_owner(file) == "user"
        inner = name
    if placement:
        return StackFacts("placement")
    if communication:
        return StackFacts("communication")
    return StackFacts("forward" if forward else "none")


def _runs_backward(file: str, name: str) -> bool:
    if _AUTOGRAD_FILE.search(file):
        return name in _ENGINE_CALL or name == "backward"
    if _CHECKPOINT_FILE.search(file):
        return name in _RECOMPUTING_CALL
    return "torch::autograd::Engine" in name or "torch::autograd::Node::operator()" in name
