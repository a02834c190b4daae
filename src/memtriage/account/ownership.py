"""The rules that decide whether a tensor is a parameter, a gradient, optimizer state, ... in any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

from memtriage.account.naming import ObjectNamer, WalkedGraph
from memtriage.account.path_rules import Path
from memtriage.model.census import Owner
from memtriage.model.paths import SegmentKind, has

PRIORITY: tuple[Owner, ...] = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "saved for backward",
    "autograd context",
    "communication buffer",
    "known cache",
    "garbage",
    "variable",
    "c++ only",
)
"""If several tensors share a storage, or one tensor has several owners, the first of these wins."""

RANK: dict[Owner, int] = {owner: rank for rank, owner in enumerate(PRIORITY)}
_MODULE_PARTS: Final[tuple[tuple[str, Owner], ...]] = (("_parameters", "parameter"), ("_buffers", "buffer"))


_STATE_LEVELS: Final = 4
"""Below an optimizer's groups and states: `state[p]["shampoo"]["blocks"][0]` has four."""
_ATTRIBUTE_LEVELS: Final = 2
"""Below each other attribute of an optimizer: lists of gradients by group."""
_HOPS_TO_WRAPPER: Final = 4
"""From an inner tensor up to the tensor subclass that it is part of."""
_HOPS_TO_BUCKET: Final = 8
"""From a tensor up to the reducer or bucket of `torch.distributed` that owns it."""


class TensorFacts(ABC):
    """What the rules need from a walked heap. Tensors are identified by numbers: their ids or addresses."""

    def __init__(self, walked: WalkedGraph, namer: ObjectNamer) -> None:
        self.walked = walked
        self._namer = namer

    def path(self, position: int) -> Path:
        """Return the holder path of an object."""
        return self._namer.path(position)

    @abstractmethod
    def attributes(self, position: int) -> Mapping[str, Any]:
        """Return what an object itself has in its `__dict__`."""

    @abstractmethod
    def tensors_in(self, value: Any, depth: int) -> Iterable[int]:
        """Return the tensors inside containers, at most `depth` levels down; none for None."""

    @abstractmethod
    def saved(self) -> Iterable[int]:
        """Return the tensors that nodes save."""

    @abstractmethod
    def gradients(self) -> Iterable[int]:
        """Return the tensors that are the `.grad` of another."""

    @abstractmethod
    def tensor_at(self, position: int) -> int | None:
        """Return the tensor at a position; None for any other object."""

    @abstractmethod
    def is_wrapper(self, position: int) -> bool:
        """Whether the tensor at a position is of a subclass with inner tensors."""

    @abstractmethod
    def module_at(self, position: int) -> str:
        """Return the `__module__` of an object's class; "" for a tensor, and if it has none."""


class Owners:
    """The owner of each tensor of a walked heap: as declared, else its wrapper's, else by its path."""

    def __init__(self, facts: TensorFacts) -> None:
        self._facts = facts
        self._declared = _declared(facts)

    def of(self, position: int) -> Owner:
        """Return the owner of the tensor at a position."""
        facts = self._facts
        at, steps = position, 0
        # Inner tensors of a subclass have the owner of the subclass instance.
        while at >= 0 and steps < _HOPS_TO_WRAPPER:
            tensor = facts.tensor_at(at)
            if tensor is not None:
                owner = self._declared.get(tensor)
                if owner is not None and (at == position or facts.is_wrapper(at)):
                    return owner
            at = facts.walked.parents[at]
            steps += 1
        if position >= facts.walked.first_garbage:
            return "garbage"
        return _by_path(facts, position)


def _declared(facts: TensorFacts) -> dict[int, Owner]:
    """Owner by tensor, from the structures that declare it: modules, optimizers, `.grad`, saved values."""
    owners: dict[int, Owner] = {}

    def claim(tensors: Iterable[int], owner: Owner) -> None:
        for tensor in tensors:
            if tensor not in owners or RANK[owner] < RANK[owners[tensor]]:
                owners[tensor] = owner

    for position in facts.walked.modules:
        own = facts.attributes(position)
        for name, owner in _MODULE_PARTS:
            claim(facts.tensors_in(own.get(name), 1), owner)
    # Only read what optimizers store: `param_groups` and `state` of wrappers are properties of the optimizer
    # inside, which is in the graph itself. Wrappers come first: the flat master weights of a sharded or
    # mixed-precision one are parameters for the optimizer inside, but not the model's.
    attributes = [facts.attributes(position) for position in facts.walked.optimizers]
    for own in sorted(attributes, key=lambda own: "param_groups" in own):
        for parameter in facts.tensors_in(own.get("param_groups"), _STATE_LEVELS):
            owners.setdefault(parameter, "parameter")
        claim(facts.tensors_in(own.get("state"), _STATE_LEVELS), "optimizer state")
        for value in own.values():
            claim(facts.tensors_in(value, _ATTRIBUTE_LEVELS), "optimizer state")
    claim(facts.saved(), "saved for backward")  # the path shows what a pack hook returned
    claim(facts.gradients(), "gradient")
    return owners


def _by_path(facts: TensorFacts, position: int) -> Owner:
    path = facts.path(position)
    tail = path.whole[len(path.anchor) :]
    if any(segment.kind is SegmentKind.CONTEXT and segment.name for segment in tail):
        return "autograd context"
    if has(tail, SegmentKind.SAVED):
        return "saved for backward"
    if has(path.whole, SegmentKind.LRU_CACHE):
        return "known cache"
    at, steps = position, 0
    while at >= 0 and steps < _HOPS_TO_BUCKET:
        if facts.module_at(at).startswith("torch.distributed"):
            return "communication buffer"
        at = facts.walked.parents[at]
        steps += 1
    return "variable"
