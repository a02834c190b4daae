"""One line for the workers of reinforcement-learning frameworks: phases where they give memory to generation.

    memtriage.integrations.rl.attach(Worker)    # the class, after its definition; or a worker itself

NeMo-RL's policy workers (`offload_before_refit`, `offload_after_refit`), verl's engines (`to("cpu")`) and
slime's train actors (`sleep`) are known by the names of their methods: nothing of the frameworks is imported.
Their own functions still run. Around them known caches are cleared, what strands segments is moved, and the
line that people search logs for is printed, with what is then left:

    GPU Memory after refit complete: 0.55GB allocated, 0.62GB reserved

NeMo-RL's workers move weights and optimizer state by methods of their own; `park` puts parking in their
place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from memtriage.treat.phase import Phase, PhasePolicy, bring_back, phase_begin, phase_end

Method = Callable[..., Any]

_ATTACHED: Final = "_memtriage_attached"
_MODEL: Final = ("parameters", "buffers")


def _always(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _to_the_cpu(device: Any = None, *_args: Any, **_kwargs: Any) -> bool:
    return str(device).partition(":")[0] == "cpu"


@dataclass(frozen=True, slots=True)
class Boundary:
    """A method of a worker at which memory goes to somebody else.

    Attributes:
        method: its name.
        phase: what the log line says.
        before: the phase ends before the method runs, else after it.
        applies: asked, with the call's arguments, whether this call is such a boundary.
        begins: methods before which the phase begins, the first that is called; where none is known it only
            ends.
    """

    method: str
    phase: str
    before: bool = False
    applies: Callable[..., bool] = _always
    begins: tuple[str, ...] = ()


BOUNDARIES: Final = (
    # NeMo-RL: before the weights are streamed, and when they have been. Scoring and training come before it.
    Boundary(
        "offload_before_refit",
        "optimizer offload",
        begins=("prepare_for_lp_inference", "prepare_for_training"),
    ),
    Boundary("offload_after_refit", "refit complete"),
    # slime: torch_memory_saver then backs up and unmaps whole segments, holes and garbage with them.
    Boundary("sleep", "training", before=True),
    # verl: an engine's weights, gradients and optimizer state go, one or all of them.
    Boundary("to", "offload", applies=_to_the_cpu),
)


Around = Callable[..., Any]
"""What runs instead of a method: it is given the worker, its bound method, and the call's arguments."""


class Attachment:
    """What `attach` put on a worker or its class. As a context manager it takes it off at the end.

    Attributes:
        methods: names of the methods that it replaces.
    """

    def __init__(self, target: Any, replaced: dict[str, Around]) -> None:
        self.methods = tuple(replaced)
        self._target = target
        own = vars(target)
        self._before = {name: own[name] for name in (*replaced, _ATTACHED) if name in own}
        for name, around in replaced.items():
            setattr(target, name, _instead(target, name, around))
        setattr(target, _ATTACHED, True)

    def detach(self) -> None:
        """Take it off: the own methods are there again. Repeatable."""
        for name in (*self.methods, _ATTACHED):
            if name in self._before:
                setattr(self._target, name, self._before[name])
            elif name in vars(self._target):
                delattr(self._target, name)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(worker: Any, *, policy: PhasePolicy | None = None, park: bool = True) -> Attachment:
    """End a phase at each of a worker's boundaries (see the module). NeMo-RL's training also begins one, so
    that it is primed for what it needed before.

    Args:
        worker: the object whose methods the framework calls, in its own process; or its class. With Ray it
            has to
            be the class, in the module that defines it: Ray takes an actor's functions from there before
            there is an actor.
        policy: what a phase's end does; by default caches are cleared, garbage is collected and memory
            compacted.
        park: let NeMo-RL's `move_model` and `move_optimizer` (`move_to_cpu`, `move_to_cuda` and
            `move_optimizer_to_device` of its DTensor workers) park and bring back: page-locked copies that
            are kept for the next step, and addresses that views keep. While weights are parked, code that
            would read them on the CPU raises `ParkedError`.

    Returns:
        What takes it off again.

    Raises:
        ValueError: it has none of the methods, or is attached already.

    Limits: Megatron's gradient buffers stay with its own code, which drops them instead of copying them.
    """
    name = worker.__name__ if isinstance(worker, type) else type(worker).__name__
    if getattr(worker, _ATTACHED, False):
        raise ValueError(f"{name} is attached already: detach() first")
    boundaries = [boundary for boundary in BOUNDARIES if callable(getattr(worker, boundary.method, None))]
    if not boundaries:
        known = ", ".join(boundary.method for boundary in BOUNDARIES)
        raise ValueError(f"{name} has none of the methods {known}: use memtriage.phase()")
    chosen = PhasePolicy() if policy is None else policy
    phases = _Phases(chosen)
    replaced: dict[str, Around] = {
        boundary.method: functools.partial(phases.end, boundary) for boundary in boundaries
    }
    replaced |= {
        name: functools.partial(phases.begin, boundary.phase)
        for boundary in boundaries
        for name in boundary.begins
        if callable(getattr(worker, name, None))
    }
    if park:
        moves: dict[str, Around] = {
            "move_model": _move_model,
            "move_optimizer": _move_optimizer,
            "move_optimizer_to_device": _move_optimizer,
            "move_to_cpu": functools.partial(_move_whole, "cpu"),
            "move_to_cuda": functools.partial(_move_whole, "cuda"),
        }
        replaced |= {
            name: functools.partial(move, chosen)
            for name, move in moves.items()
            if callable(getattr(worker, name, None))
        }
    return Attachment(worker, replaced)


def _instead(target: Any, name: str, around: Around) -> Method:
    function = getattr(target, name)
    if not isinstance(target, type):
        return functools.wraps(function)(functools.partial(around, target, function))

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(function, self), *args, **kwargs)

    return method


class _Phases:
    """The phases that a worker's methods begin and end, with a policy."""

    def __init__(self, policy: PhasePolicy) -> None:
        self._policy = policy
        self._begun: dict[str, Phase] = {}

    def begin(self, phase: str, _worker: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
        if phase not in self._begun:
            self._begun[phase] = phase_begin(phase, self._policy)
        return method(*args, **kwargs)

    def end(self, boundary: Boundary, _worker: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
        here = boundary.applies(*args, **kwargs)
        if here and boundary.before:
            self._end(boundary.phase)
        result = method(*args, **kwargs)
        if here and not boundary.before:
            self._end(boundary.phase)
        return result

    def _end(self, phase: str) -> None:
        phase_end(phase, self._policy, self._begun.pop(phase, None))


def _move_model(
    policy: PhasePolicy,
    _worker: Any,
    method: Method,
    model: Any,
    device: Any,
    move_params: bool = True,
    move_grads: bool = True,
) -> Any:
    moved = move_params and _move((*_MODEL, model), device, policy)
    return method(model, device, move_params=move_params and not moved, move_grads=move_grads)


def _move_optimizer(policy: PhasePolicy, worker: Any, method: Method, device: Any) -> None:
    if worker.optimizer is not None and not _move((worker.optimizer,), device, policy):
        method(device)


def _move_whole(device: str, policy: PhasePolicy, _worker: Any, method: Method, model: Any) -> Any:
    return model if _move((model,), device, policy) else method(model)


def _move(what: tuple[Any, ...], device: Any, policy: PhasePolicy) -> bool:
    """Park or bring back; False where there was nothing to, which is left to the worker's own method then.

    What began on the CPU was never parked: only that method brings it to the device.
    """
    from memtriage.treat.parking.api import is_parked, park_rest

    if not _to_the_cpu(device):
        return bring_back(what) is not None
    parked = park_rest(*what, despite_graphs=policy.despite_graphs)
    return is_parked(*what) if parked is None else parked.storages > 0
