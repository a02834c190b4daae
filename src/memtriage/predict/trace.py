"""Runs a build function and its steps without a GPU, and records what they would allocate there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from memtriage.observe.hooks import TrainingHooks
from memtriage.predict.autocast import Autocast
from memtriage.predict.build import Built, check_built
from memtriage.predict.composites import Composites
from memtriage.predict.interpreter import Interpreter
from memtriage.predict.lifetimes import Lifetimes, Recording
from memtriage.predict.machines import Machine
from memtriage.predict.notes import Notes
from memtriage.predict.overrides import Overrides
from memtriage.predict.personality import cuda_played
from memtriage.predict.scratch.table import Scratch
from memtriage.predict.tensors import CUDA, devices_played, is_gpu
from memtriage.predict.values import Values

Build = Callable[[Any], Any]


@dataclass(slots=True)
class Trace:
    """What a trace found.

    Attributes:
        recording: allocations and frees.
        owners: of blocks, where known: `parameter`, `gradient`, `optimizer state`, `buffer`.
        notes: what was assumed.
    """

    recording: Recording
    owners: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Watch:
    """Follows the phases of training and what each storage becomes."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self.owners: dict[int, str] = {}
        self.built: Built | None = None
        self.step = -1

    def backward_begins(self) -> None:
        self._lifetimes.enter("backward", self.step)

    def backward_ends(self, failed: bool) -> None:
        self.note_gradients()
        self._lifetimes.enter("forward", self.step)

    def optimizer_begins(self) -> None:
        self.note_gradients()
        self._lifetimes.enter("optimizer", self.step)

    def optimizer_ends(self, inside_backward: bool) -> None:
        self.note_states()
        if inside_backward:
            self._lifetimes.enter("backward", self.step)

    def note_model(self) -> None:
        if self.built is not None:
            self._own(self.built.model.parameters(), "parameter")
            self._own(self.built.model.buffers(), "buffer")

    def note_gradients(self) -> None:
        if self.built is not None:
            self._own((each.grad for each in self.built.parameters()), "gradient")

    def note_states(self) -> None:
        if self.built is not None:
            for optimizer in self.built.optimizers:
                states = (value for state in optimizer.state.values() for value in _values(state))
                self._own(states, "optimizer state")

    def _own(self, tensors: Iterable[Any], owner: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and is_gpu(tensor):
                block = self._lifetimes.block_of(tensor.untyped_storage())
                if block is not None:
                    self.owners.setdefault(block, owner)


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def trace(build: Build, machine: Machine, version: tuple[int, int], steps: int) -> Trace:
    """Runs `build` and `steps` steps.

    Raises:
        BuildError: what `build` returns is none of what is expected.
        Exception: whatever the program raises.
    """
    notes = Notes()
    lifetimes = Lifetimes(torch.is_grad_enabled)
    scratch = Scratch(machine, version, lifetimes)
    composites = Composites(machine, version, notes)
    interpreter = Interpreter(lifetimes, Values(), notes, scratch, composites)
    overrides = Overrides()
    autocast = Autocast(version)
    watch = _Watch(lifetimes)
    hooks = TrainingHooks(watch)
    with ExitStack() as stack:
        stack.callback(overrides.remove)
        autocast.register(overrides)
        composites.register(overrides)
        stack.enter_context(devices_played())
        stack.enter_context(cuda_played(machine, lifetimes, notes))
        stack.enter_context(autocast.cache_kept())
        stack.callback(hooks.remove)
        hooks.install()
        stack.enter_context(interpreter)
        built = watch.built = check_built(build(CUDA))
        watch.note_model()
        for step in range(steps):
            watch.step = step
            lifetimes.enter("forward", step)
            built.step()
            watch.note_states()
        watch.note_model()
        lifetimes.close()
    return Trace(lifetimes.recording, watch.owners, notes.all())
