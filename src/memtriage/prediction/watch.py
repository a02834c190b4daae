"""Follows a traced program: the phases of training, what each storage becomes, and in which module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from memtriage.prediction.build import Built, parameters_in, parameters_of
from memtriage.prediction.drawn import Draws
from memtriage.prediction.fake_cuda.tensors import is_gpu, parts
from memtriage.prediction.host.memory import HostMemory
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.places import Places, module_names
from memtriage.prediction.routing import Routing

OPTIMIZER_STATE: Final = "optimizer state"
_KINDS: Final = (("parameter", "_parameters"), ("buffer", "_buffers"))
_SHARE: Final = "ds_tensor"
"""Attribute of a parameter in which DeepSpeed's ZeRO-3 keeps this rank's share, instead of in its data."""


class TraceWatch:
    """Follows the phases of training and what each storage becomes.

    Attributes:
        lifetimes: of the storages.
        owners: of blocks, where known.
        homes: module paths of blocks with an owner that belongs to a parameter or buffer.
        built: the model and its optimizers, once they are known.
        places: which module makes what; None unless asked for.
        host: memory of the host; None unless it is followed.
        step: the step, counted from 0; -1 while building.
        progress: called with the number of each step that begins, from 1, and how many are wanted.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self.owners: dict[int, str] = {}
        self.homes: dict[int, str] = {}
        self.built: Built | None = None
        self.draws: Draws | None = None
        self.places: Places | None = None
        self.host: HostMemory | None = None
        self.step = -1
        self.progress: Callable[[int, int], None] = lambda step, steps: None
        self._home_of: dict[int, str] = {}
        self._steps_taken: set[int] = set()
        self._backward_in: int | None = None
        self._steps_compiled = False

    def models(self) -> tuple[nn.Module, ...]:
        """The modules that are trained."""
        return () if self.built is None else (self.built.model,)

    def optimizers(self) -> tuple[Any, ...]:
        """Their optimizers."""
        return () if self.built is None else self.built.optimizers

    def parameters(self) -> Iterable[torch.Tensor]:
        """Of the models and of the optimizers, each once."""
        return parameters_in(self.models(), self.optimizers())

    def backward_begins(self) -> None:
        self.lifetimes.enter("backward", self.step)

    def backward_ends(self, failed: bool) -> None:
        self.note_gradients()
        self._backward_in = self.step
        self.lifetimes.enter("forward", self.step)

    def optimizer_begins(self, optimizer: Any) -> None:
        self.note_gradients()
        self.lifetimes.enter("optimizer", self.step)

    def optimizer_ends(self, optimizer: Any, inside_backward: bool) -> None:
        self._steps_taken.add(self.step)
        self.note_states()
        if inside_backward:
            self.lifetimes.enter("backward", self.step)

    def states_made(self, optimizer: Any) -> None:
        """Its states were made while its step was compiled. Compiled steps run none of its hooks."""
        self._steps_compiled = True
        self.note_states()

    def remarks(self) -> list[str]:
        """What a training step does and the last traced one did not, in words."""
        optimizers = self.optimizers()
        if self.built is None or self._steps_compiled or self.step in self._steps_taken:
            return []
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            return []
        if self._backward_in == self.step:
            return ["no optimizer stepped in the step: its states are not part of the figures"]
        return ["the step ran neither backward nor an optimizer: this is the memory of forward alone"]

    def note_model(self) -> None:
        """Names the blocks of parameters and buffers."""
        names = module_names(self.models())
        self._home_of = {}
        if self.places is not None:
            self.places.names.update(names)
        for owner, held in _KINDS:
            for module, path in names.items():
                for tensor in getattr(module, held).values():
                    self._home_of.setdefault(id(tensor), path)  # tied ones belong to the first
                    self._own(getattr(tensor, _SHARE, tensor), owner, path)

    def note_gradients(self) -> None:
        """Names the blocks of gradients."""
        for parameter in self.parameters():
            self._own(parameter.grad, "gradient", self._home_of.get(id(parameter)))

    def note_states(self) -> None:
        """Names the blocks of the optimizers' states, and of what they update instead of the models."""
        self._note_updated()
        for optimizer in self.optimizers():
            # ZeroRedundancyOptimizer keeps its part in an optimizer of its own.
            for parameter, state in getattr(optimizer, "optim", optimizer).state.items():
                home = self._home_of.get(id(parameter))
                for value in state.values() if isinstance(state, dict) else ():
                    self._own(value, OPTIMIZER_STATE, home)

    def _note_updated(self) -> None:
        """Names what optimizers update and no model has: where models have parameters that no optimizer
        has, these are master weights, kept for the optimizer's sake."""
        given = {id(parameter): parameter for parameter in parameters_of(*self.optimizers())}
        own = given.keys() - self._home_of.keys()
        if not own:
            return
        trained = (each for model in self.models() for each in model.parameters() if each.requires_grad)
        owner = "parameter" if all(id(parameter) in given for parameter in trained) else OPTIMIZER_STATE
        for number in own:
            self._own(given[number], owner, None)

    def _own(self, tensor: Any, owner: str, home: str | None) -> None:
        for part in parts(tensor) if isinstance(tensor, torch.Tensor) else ():
            if self.host is not None and not is_gpu(part):
                self.host.name(part.untyped_storage(), owner)
            block = self.lifetimes.block_of(part.untyped_storage()) if is_gpu(part) else None
            if block is not None:
                self.owners.setdefault(block, owner)
                if home is not None:
                    self.homes.setdefault(block, home)


class TracedProgram(ABC):
    """What is traced.

    Attributes:
        varies: whether its steps may differ, so that the highest after the first counts and not the last.
        draws_again: whether what its steps draw at random is kept, to be drawn again.
        routing: how its routers choose among experts, where that was recorded.
    """

    varies = False
    draws_again = False
    routing: Routing | None = None

    @abstractmethod
    def watch(self, lifetimes: Lifetimes) -> TraceWatch:
        """What follows it."""

    @abstractmethod
    def run(self, watch: Any, steps: int) -> int:
        """Run it to the end of a number of optimizer steps; `watch` is what `watch` returned.

        Returns the number of steps that were traced: fewer than asked for where it has only one.

        Raises:
            BuildError: it is not what is expected.
            Exception: whatever the program raises.
        """
