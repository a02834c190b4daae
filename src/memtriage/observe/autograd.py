"""Edges of the autograd graph, read without running anything.

Reading `node._saved_x` runs unpack hooks and, under non-reentrant checkpointing, the checkpointed function.
`node._raw_saved_x` is a `SavedTensor` whose `.data` is the tensor, or what the pack hook returned. Before
torch 2.10 it has no `.data`, and no other way to its tensor without running hooks: nothing is read there. For
what backward has freed, a C++ node returns `None`, a Python node raises RuntimeError (measured, torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from memtriage.observe.classes import declares
from memtriage.observe.objects import Listing
from memtriage.process.stdlib import gc

SavedValue = tuple[str, int | None, Any]
"""Name of the saved attribute, empty for a custom Function's saved tensors; position in it if it is a tuple;
what is saved: a tensor, or what a pack hook returned."""

_LEAFS_NUMBER: Final = 2**64 - 1
"""Sequence number of a leaf's gradient accumulator, with which it runs first (autograd/function.h)."""


def is_node_type(kind: type) -> bool:
    """Whether instances of a type are autograd nodes (C++ nodes and custom Functions' contexts)."""
    return declares(kind, "next_functions") and declares(kind, "_register_hook_dict")


def profiler_is_on() -> bool:
    """Whether torch's profiler records this thread's operations."""
    autograd = getattr(sys.modules.get("torch"), "autograd", None)
    enabled = getattr(autograd, "_profiler_enabled", None)
    return enabled is not None and bool(enabled())


def unread_saved_tensors() -> str | None:
    """Return why the loaded torch does not show what graphs save for backward; None if it does."""
    kind = getattr(sys.modules.get("torch._C._autograd"), "SavedTensor", None)
    if kind is None or hasattr(kind, "data"):
        return None
    return (
        f"torch {sys.modules['torch'].__version__} does not show the tensors that graphs save for backward "
        "(torch 2.10 and newer do): what nothing but a graph keeps alive has no holder here"
    )


class NodeReader:
    """Reads what nodes keep. Make one per walk: it remembers node types, and so keeps them alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[type, tuple[str, ...]]] = {}
        self.saved: set[int] = set()
        self._checkpoints: dict[int, Any] = {}
        self._arguments: dict[int, Any] = {}  # saved tensors of checkpoints, by id

    def saved_attributes(self, kind: type) -> tuple[str, ...]:
        """Names of the raw saved-tensor attributes of a node type."""
        known = self._names.get(id(kind))
        if known is None:
            names = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
            known = self._names[id(kind)] = kind, names
        return known[1]

    def saved_values(self, node: Any) -> Iterator[SavedValue]:
        """Everything the node keeps for its backward.

        Freed and unset values are left out. A tensor that was modified in place since it was saved is
        returned as it is now (only unpacking it would raise).
        """
        for attribute in self.saved_attributes(type(node)):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:  # freed by backward (Python nodes)
                continue
            if raw is None:
                continue
            name = attribute.removeprefix("_raw_saved_")
            if isinstance(raw, tuple):
                for position, item in enumerate(raw):
                    value = _packed(item)
                    if value is not None:
                        yield ("" if name == "tensors" else name), position, value
            else:
                value = _packed(raw)
                if value is not None:
                    yield name, None, value

    def referents(self, node: Any) -> list[Any]:
        """What a node keeps alive: the next nodes, saved values, context attributes, hooks, its leaf."""
        referents = next_nodes(node)
        saved = [value for _, _, value in self.saved_values(node)]
        self.saved.update(map(id, saved))
        referents += saved
        referents += gc.get_referents(node)
        variable = getattr(node, "variable", None)  # AccumulateGrad's leaf
        if variable is not None:
            referents.append(variable)
        return referents

    def find_checkpoints(self, listing: Listing) -> None:
        """Map each placeholder for a saved tensor to its non-reentrant checkpoint.

        The inputs to recompute from are in the closure of a hook that only C++ holds. The checkpoint has weak
        references to its placeholders, which are followed backward here. In newer torch (2.13) the inputs are
        saved tensors of the checkpoint itself.
        """
        kind = getattr(sys.modules.get("torch.utils.checkpoint"), "_CheckpointFrame", None)
        if kind is None:
            return
        for checkpoint in listing.of_types({id(kind)}):
            for reference in checkpoint.weak_holders:
                self._checkpoints[id(reference())] = checkpoint
            for argument in getattr(checkpoint, "saved_args", ()):
                self._arguments[id(argument)] = argument

    def placeholder_referents(self, placeholder: Any) -> list[Any]:
        """What a placeholder of a non-reentrant checkpoint keeps alive: the checkpoint."""
        checkpoint = self._checkpoints.get(id(placeholder))
        return gc.get_referents(placeholder) + ([] if checkpoint is None else [checkpoint])

    def saved_tensor_referents(self, raw: Any) -> list[Any]:
        """What a `SavedTensor` object keeps alive: its tensor, if it is a checkpoint's.

        Others refer to a slot of a node. They keep nothing alive, and reading one whose node is gone crashes
        the process.
        """
        value = _packed(raw) if id(raw) in self._arguments else None
        if value is None:
            return []
        self.saved.add(id(value))
        return [value]


def _packed(raw: Any) -> Any:
    try:
        return raw.data
    except (RuntimeError, AttributeError):
        return None


def next_nodes(node: Any) -> list[Any]:
    """The nodes that the gradient flows to next (towards the inputs of the forward)."""
    try:
        return [edge[0] for edge in node.next_functions if edge[0] is not None]
    except (RuntimeError, AttributeError):
        return []


def created(node: Any) -> int | None:
    """The sequence number that autograd gave a node in its thread; None for a leaf's node."""
    try:
        number = int(node._sequence_nr())
    except (RuntimeError, AttributeError):
        return None
    return number if number < _LEAFS_NUMBER else None


def creation_site(node: Any) -> list[str] | None:
    """Formatted stack of the forward call that made the node; None unless anomaly mode recorded one."""
    try:
        stack = node.metadata.get("traceback_")
    except (RuntimeError, AttributeError):
        return None
    return stack if isinstance(stack, list) else None
