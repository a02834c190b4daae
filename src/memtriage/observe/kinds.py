"""How objects of each type are walked, decided by the type alone without touching an object."""

from __future__ import annotations

import sys
import types
from types import FrameType, ModuleType
from typing import Any

from memtriage.observe import autograd
from memtriage.observe.classes import declares, module_of, name_of
from memtriage.observe.frames import frame_locals

(ATOM, PLAIN, TENSOR, ARRAY, LOCALS, MODULE, FUTURE, SAVED, PLACEHOLDER, BOUNDARY, KLASS, NODE,
 OPTIMIZER) = range(13)  # fmt: skip
"""How an object is walked: not at all, by `gc.get_referents`, as a tensor, a numpy array, a frame's locals,
an `nn.Module`, a future whose value C++ holds, a saved tensor outside a node, a checkpoint's placeholder for
one, only as a root (modules and frames), a class, an autograd node, an optimizer. Graphs wait until all plain
objects of the program are reached, optimizers until the graphs are: a parameter is named by its place in the
model, not as what a loss's graph accumulates into, nor as a key of `optimizer.state`."""

_ATOMS: frozenset[type] = frozenset(
    [
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...),
        type(NotImplemented), types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType,
        types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
        types.MethodWrapperType, types.GenericAlias, types.UnionType,
    ]
)  # fmt: skip


class FrameLocals:
    """The variables of one running function, as a node of the graph."""

    __slots__ = ("code", "names", "thread", "values")

    def __init__(self, frame: FrameType, thread: str | None) -> None:
        pairs = frame_locals(frame)
        self.names = [name for name, _ in pairs]
        self.values = [value for _, value in pairs]
        self.code = frame.f_code
        self.thread = thread


class KindTable:
    """How objects of each type are walked; a type is classified once, when first met.

    It keeps the types it knows alive, so it lives no longer than its graph. They are identified by their
    addresses: a metaclass may hash and compare its classes with its own code, or not at all.

    Attributes:
        known: by the address of a type. A hot loop looks here first.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self._types: list[type] = []
        for kind in _ATOMS:
            self._add(kind, ATOM)
        self._add(types.FrameType, PLAIN)
        self._add(FrameLocals, LOCALS)
        torch = sys.modules.get("torch")
        numpy = sys.modules.get("numpy")
        self._tensor: type | tuple[()] = getattr(torch, "Tensor", ())
        self._array: type | tuple[()] = getattr(numpy, "ndarray", ())
        nn = sys.modules.get("torch.nn")
        optim = sys.modules.get("torch.optim")
        self._future: type | tuple[()] = getattr(getattr(torch, "_C", None), "Future", ())
        self._saved = _type_in("torch._C._autograd", "SavedTensor")
        self._placeholder = _type_in("torch.utils.checkpoint", "_Holder")
        self._module: type | tuple[()] = getattr(nn, "Module", ())
        self._optimizer: type | tuple[()] = getattr(optim, "Optimizer", ())

    def __getitem__(self, kind: type) -> int:
        known = self.known.get(id(kind))
        return self._add(kind, self._classify(kind)) if known is None else known

    def classify(self, obj: Any) -> int:
        """Return how an object is walked; from then on its type is in `known`."""
        return self[type(obj)]

    def clear(self) -> None:
        """Release every type."""
        self.known.clear()
        self._types.clear()

    def _add(self, type_: type, kind: int) -> int:
        self._types.append(type_)
        self.known[id(type_)] = kind
        return kind

    def _classify(self, kind: type) -> int:
        # By type, not by isinstance: a weak proxy whose referent is gone raises ReferenceError there.
        if self._tensor and issubclass(kind, self._tensor):
            return TENSOR
        if issubclass(kind, type):
            return KLASS
        if issubclass(kind, ModuleType) or _is_own(module_of(kind)):
            return BOUNDARY
        if autograd.is_node_type(kind):
            return NODE
        if self._future and issubclass(kind, self._future):
            return FUTURE
        if kind is self._saved:
            return SAVED
        if kind is self._placeholder:
            return PLACEHOLDER
        if self._module and issubclass(kind, self._module):
            return MODULE
        if (self._optimizer and issubclass(kind, self._optimizer)) or (
            "Optim" in name_of(kind) and declares(kind, "step") and declares(kind, "zero_grad")
        ):  # DeepSpeed's and Apex's wrappers are not subclasses
            return OPTIMIZER
        if self._array and issubclass(kind, self._array):
            return ARRAY
        return PLAIN


def _is_own(module: str) -> bool:
    """Whether a class belongs to the watch. What `treat` makes, such as an optimizer, is the program's."""
    first, second, *_ = [*module.split("."), "", ""]
    return first == "memtriage" and second != "treat"


def _type_in(module: str, name: str) -> type | None:
    """A class of a module; None if the module is not loaded, or does not have it in this version."""
    value = getattr(sys.modules.get(module), name, None)
    return value if isinstance(value, type) else None
