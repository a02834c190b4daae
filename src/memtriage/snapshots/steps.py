"""Training steps in a recording, and the phase and the part of training that each call stack is of.

Steps are told by the optimizer's own spans, by its frames, or by what repeats with a backward or an optimizer
in it. Of stacks only names of torch and of the libraries that wrap it are used, none of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memtriage.model.code_origin import code_owner
from memtriage.model.recording import ALLOC, Events, Steps
from memtriage.observe.cuda import Frame

STEP_SPAN: Final = "Optimizer.step#"
"""How `torch.optim.Optimizer` names the span of its `step` (`profile_hook_step`)."""
PROFILER_SPAN: Final = "ProfilerStep#"
MIN_REPEATS: Final = 4
"""Times that something must recur to count as a step."""
REGULAR: Final = 0.75
"""Share of the allocations that must be in like intervals for a recurrence to be a step."""
TOLERANCE: Final = 0.02
"""How much the number of allocations may differ between like intervals."""


def find_steps(trace: Events, facts: Sequence[StackFacts], spans: Mapping[str, Sequence[int]]) -> Steps:
    """The ends of the training steps of one device.

    Several optimizers, or one that steps its parameters within backward, make one step: what has no forward
    between it (no backward, where no forward is recognized) is one. `spans` has the ends of spans by name.
    """
    allocs = np.flatnonzero(trace.kind == ALLOC)
    phases = phase_codes(facts)[trace.stack]
    for name in (STEP_SPAN, PROFILER_SPAN):
        times = sorted(time for span, ends in spans.items() if span.startswith(name) for time in ends)
        ends = np.searchsorted(trace.time_us, np.array(times, np.int64), side="right")
        if step_ends := _coalesced(ends[ends > 0], phases, allocs):
            return Steps(step_ends, "annotations")
    if step_ends := _coalesced(np.flatnonzero(phases == OPTIMIZER) + 1, phases, allocs):
        return Steps(step_ends, "optimizer frames")
    period = _period(trace.stack[allocs], allocs)
    if _train(period, phases, allocs):
        return Steps(period, "period")
    return Steps(repeats=len(period))


def _train(ends: Sequence[int], phases: NDArray[np.uint8], allocs: NDArray[np.int64]) -> bool:
    """Whether what lies between recurrences trains: the layers of a forward recur as regularly as steps."""
    kinds = phases[allocs]
    trains = (kinds == BACKWARD) | (kinds == OPTIMIZER)
    bounds = np.searchsorted(allocs, ends)
    backward, work = (np.diff(np.append(0, np.cumsum(which))[bounds]) > 0 for which in (trains, ~trains))
    return len(ends) > 1 and bool((backward & work).mean() >= REGULAR)


def settled(trace: Events, ends: Sequence[int]) -> tuple[int, ...]:
    """The ends of the steps, each moved behind the frees that follow it: gradients go with `zero_grad`.

    A step settles until something is allocated again. The last one has no successor, and what follows it may
    be the end of everything: it gets as many events as the others take.
    """
    allocs = np.flatnonzero(trace.kind == ALLOC)
    at = np.asarray(ends, np.int64)
    following = np.append(allocs, len(trace))[np.searchsorted(allocs, at)]
    if len(at) > 1:
        usual = int(np.median(following[:-1] - at[:-1]))
        following[-1] = min(following[-1], at[-1] + usual)
    return tuple(following.tolist())


def _coalesced(
    ends: NDArray[np.int64], phases: NDArray[np.uint8], allocs: NDArray[np.int64]
) -> tuple[int, ...]:
    """The last of the ends in each run without work between, when there are any."""
    for phase in (FORWARD, BACKWARD, NONE):
        work = allocs[phases[allocs] == phase]
        if len(work):
            break
    before = np.searchsorted(work, ends)
    last = np.append(before[1:] != before[:-1], True)[: len(ends)]
    return tuple(ends[last].tolist())


def _period(stacks: NDArray[np.int32], allocs: NDArray[np.int64]) -> tuple[int, ...]:
    """Where the rarest regular stack recurs.

    An allocation that comes back after a like number of others, nearly always, stands once in a loop. Inner
    loops are regular too, but interrupted by the rest of the step; of loops within loops the outermost wins.
    """
    order = np.argsort(stacks, kind="stable")
    bounds = np.flatnonzero(np.diff(stacks[order])) + 1
    best: NDArray[np.int64] | None = None
    for positions in np.split(order, bounds):
        if len(positions) < MIN_REPEATS or (best is not None and len(positions) >= len(best)):
            continue
        intervals = np.diff(positions)
        middle = np.median(intervals)
        regular = np.abs(intervals - middle) <= np.maximum(middle * TOLERANCE, 1)
        if middle > 1 and intervals[regular].sum() >= REGULAR * len(stacks):
            best = positions
    return () if best is None else tuple(allocs[best].tolist())


# Call stacks

StackPhase = Literal["none", "forward", "backward", "optimizer", "placement", "communication"]
"""Phase of a stack. `placement` creates, moves or loads a module's parameters; `none` is user code outside
the other phases."""

PHASES: Final[tuple[StackPhase, ...]] = get_args(StackPhase)
"""The order of phases in columns of numbers."""
NONE, FORWARD, BACKWARD, OPTIMIZER, PLACEMENT, COMMUNICATION = range(len(PHASES))

_OPTIMIZER_FILE: Final = re.compile(
    r"(^|/)(optim|optimi[sz]ers?)/([^/]+/)*[^/]*$|(^|/)[^/]*optimi[sz]er[^/]*\.py$|/ops/adam/"
)
_OPTIMIZER_CALL: Final = re.compile(
    r"^_?(step|.*_step|.*_init_group|init_state|_multi_tensor_.*|_single_tensor_.*|.*update.*)$"
)
_STATE_CALL: Final = re.compile(r"_init_group|init(ialize)?_(optimizer_)?states?|_init_state")
_MODULE_FILE: Final = re.compile(r"(^|/)torch/nn/modules/[^/]*\.py$")
_MODULE_CALL: Final = frozenset({"_call_impl", "_wrapped_call_impl", "_slow_forward"})
_PLACEMENT_CALL: Final = frozenset(
    {"_apply", "convert", "load_state_dict", "_load_from_state_dict", "to_empty"}
)
_MAKING_CALL: Final = frozenset({"__init__", "reset_parameters"})
_LOADING_CALL: Final = frozenset({"from_pretrained", "load_state_dict", "_load_state_dict_into_meta_model"})


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
        applies = name == "apply" and file.endswith("torch/autograd/function.py")
        if applies and ("backward" in inner or "vjp" in inner):
            return StackFacts("backward", custom=True)
        if not (forward or own) and _OPTIMIZER_FILE.search(file) and _OPTIMIZER_CALL.match(name):
            state = any(_STATE_CALL.search(str(other_frame.get("name", ""))) for other_frame in frames)
            return StackFacts("optimizer", state=state)
        if _MODULE_FILE.search(file):
            placement = placement or name in _PLACEMENT_CALL or (name in _MAKING_CALL and not forward)
        if not (forward or own):
            communication = communication or "torch/distributed/" in file
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
    if file.endswith(("torch/autograd/__init__.py", "torch/autograd/graph.py")):
        return name in ("_engine_run_backward", "_make_grads", "backward")
    if file.endswith("torch/utils/checkpoint.py"):
        return name in ("unpack_hook", "recompute_fn")
    return "torch::autograd::Engine" in name or "torch::autograd::Node::operator()" in name
