"""Holder paths of the objects of a walked heap, in this process or in another one."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from memtriage.account.path_rules import (
    CONTAINERS,
    CYCLE_SEARCHED,
    GENERATORS,
    Hop,
    Path,
    attribute_segment,
    extend,
    item_segment,
    key_labels,
    root_path,
    telling_name,
)
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from memtriage.observe.kinds import FUTURE, KLASS, LOCALS, MODULE, NODE, PLACEHOLDER, SAVED, TENSOR

_MODULE_DICTS: Final = ("_modules", "_parameters", "_buffers")
_MOST_IN_RECORD: Final = 8
"""A tuple, or a list of an autograd context, of at most this many items is a record: places have meaning."""
_OF_FUNCTION: Final = (SegmentKind.CLOSURE, SegmentKind.HOOK_CLOSURE, SegmentKind.DEFAULT_ARGUMENT)
"""Kinds of segments for a function's own tuple or dict of values: the variable follows."""
LRU: Final = type(functools.lru_cache(lambda: None))


class WalkedGraph(Protocol):
    """What both kinds of walked heaps have.

    Attributes:
        modules, optimizers: positions of these.
        parents: position of the holder of each object; -1 for a root.
        root_names: names of roots that are modules or classes, by position.
        not_searched: roots of a partial walk: what leads to them was not walked.
        first_garbage: objects from this position on only hold each other.
    """

    modules: list[int]
    optimizers: list[int]
    parents: list[int]
    root_names: dict[int, str]
    not_searched: set[int]
    first_garbage: int

    def kind(self, position: int) -> int:
        """Return how the object at a position was walked (see `observe.kinds`)."""


class FunctionParts(NamedTuple):
    """What a function of Python keeps: tuples and a dict of values, and the names of these."""

    closure: int
    defaults: int
    keyword_defaults: int
    free: Sequence[str]
    arguments: Sequence[str]


class HeapObjects(Protocol):
    """The objects of a walked heap, by position. They have numbers: ids, or addresses of another process.

    | method | answer |
    |---|---|
    | `_identity`, `_native` | the number of an object; that of its C++ part, if it is a tensor or a node |
    | `_content` | the number of what a cell has; of any other object its own |
    | `_class_name` | module and name of its class; None of a C++ object without a Python one |
    | `_is_a`, `_is_exactly` | whether it is of one of some built-in classes, with and without subclasses |
    | `_own_dict`, `_attributes` | the dict of its attributes, 0 without one; these, wherever it has them |
    | `_slot` | the name of its slot that has another object |
    | `_keys_of` | keys of a dict as text, None for those that are no strings, with the values |
    | `_items`, `_fields` | of a list or tuple, nothing if not all can be read; the names in a named tuple |
    | `_function`, `_bound_to` | what a function of Python keeps; the `__self__` of a method |
    | `_callable`, `_called` | the name of a function, or of a callable's class; of what a `partial` calls |
    | `_call`, `_thread` | name and variables of a call, generator or frame; its thread if not the main one |
    | `_traceback` | of an exception |
    | `_gradient`, `_base`, `_has_parts` | `.grad` of a tensor; what it is a view of; whether it is sparse |
    | `_node_name`, `_leaf`, `_saved_labels` | the type of a node; its leaf; the hop to each saved value |
    | `_context_variable` | the variable with a value that a table of `contextvars` leads to |
    """

    def _identity(self, position: int) -> int: ...
    def _native(self, position: int) -> int: ...
    def _content(self, position: int) -> int: ...
    def _class_name(self, position: int) -> tuple[str, str] | None: ...
    def _is_a(self, position: int, *classes: type) -> bool: ...
    def _is_exactly(self, position: int, *classes: type) -> bool: ...
    def _own_dict(self, position: int) -> int: ...
    def _attributes(self, position: int) -> Iterable[tuple[str, int]]: ...
    def _slot(self, parent: int, position: int) -> str | None: ...
    def _keys_of(self, position: int) -> Iterable[tuple[str | None, int]]: ...
    def _items(self, position: int) -> list[int]: ...
    def _fields(self, position: int) -> Sequence[object]: ...
    def _function(self, position: int) -> FunctionParts: ...
    def _bound_to(self, position: int) -> int: ...
    def _callable(self, position: int) -> str: ...
    def _called(self, position: int) -> str: ...
    def _call(self, position: int) -> tuple[str, Iterable[tuple[str, int]]]: ...
    def _thread(self, position: int) -> str | None: ...
    def _traceback(self, position: int) -> int: ...
    def _gradient(self, position: int) -> int: ...
    def _base(self, position: int) -> int: ...
    def _has_parts(self, position: int) -> bool: ...
    def _node_name(self, position: int) -> str: ...
    def _leaf(self, position: int) -> int: ...
    def _saved_labels(self, position: int) -> dict[int, Hop]: ...
    def _context_variable(self, parent: int, position: int) -> str | None: ...


class ObjectNamer(HeapObjects):
    """Names the objects of one walked heap, which a subclass reads. Use it while the heap is at hand.

    Each shared prefix of paths is computed once, and equal paths are one object: a graph has 100,000 nodes.
    """

    def __init__(self, walked: WalkedGraph) -> None:
        self._walked = walked
        self._parents = walked.parents
        self._known: dict[int, Path] = {}
        self._alike: dict[tuple[object, ...], Path] = {}
        self._saved: dict[int, dict[int, Hop]] = {}
        self._keys: dict[int, dict[int, PathSegment]] = {}

    def path(self, position: int) -> Path:
        """The folded path of the object at a position of the heap."""
        known, parents = self._known, self._parents
        if (found := known.get(position)) is not None:
            return found
        chain = []
        at = position
        while at not in known:
            chain.append(at)
            at = parents[at]
            if at < 0:
                break
        for at in reversed(chain):
            path = self._root(at) if parents[at] < 0 else self._from(parents[at], at)
            key = path.hops, path.outside, path.namespace, path.in_graph
            known[at] = self._alike.setdefault(key, path)
        return known[position]

    def edge(self, parent: int, child: int) -> Path:
        """The path of `child` if it were reached through `parent`."""
        self.path(parent)
        return self._from(parent, child)

    # --- roots ----------------------------------------------------------------------------------------------

    def _root(self, position: int) -> Path:
        walked, kind = self._walked, self._walked.kind(position)
        if name := walked.root_names.get(position):
            if kind == KLASS:
                return root_path(PathSegment(SegmentKind.CLASS, name))
            return root_path(PathSegment(SegmentKind.MODULE, name), namespace=True)
        if position in walked.not_searched:
            return root_path(PathSegment(SegmentKind.NOT_SEARCHED))
        if kind == LOCALS:
            frame, thread = PathSegment(SegmentKind.FRAME, self._call(position)[0]), self._thread(position)
            return root_path(*((PathSegment(SegmentKind.THREAD, thread), frame) if thread else (frame,)))
        if position >= walked.first_garbage:
            return root_path(PathSegment(SegmentKind.GARBAGE_CYCLE, self._garbage_name(position)))
        if self._is_a(position, *GENERATORS):
            return root_path(PathSegment(SegmentKind.GENERATOR, self._call(position)[0]))
        if kind == NODE:
            node = PathSegment(SegmentKind.GRAD_FN, self._node_name(position))
            return Path(((PathSegment(SegmentKind.NATIVE),), (node,)), 1, in_graph=True)
        unrooted = SegmentKind.NATIVE if kind == TENSOR else SegmentKind.UNSEEN
        name = self._type_name(position, "Tensor")
        if self._is_exactly(position, types.MethodType):
            name = f"{name} {self._callable(position)}"
        return root_path(PathSegment(unrooted, name))

    def _garbage_name(self, position: int) -> str:
        """The most telling type of a cycle: the first class instance met from its entry."""
        kind_of = self._walked.kind
        within = range(position, min(position + CYCLE_SEARCHED, len(self._parents)))
        instances = ((self._class_name(at), kind_of(at) == TENSOR) for at in within if kind_of(at) != KLASS)
        met = ((*named, is_tensor) for named, is_tensor in instances if named is not None)
        return telling_name(met, self._type_name(position, "Tensor"))

    def _type_name(self, position: int, unknown: str = "?") -> str:
        named = self._class_name(position)
        return unknown if named is None else named[1]

    # --- hops -----------------------------------------------------------------------------------------------

    def _add(self, before: Path, *hop: PathSegment, namespace: bool = False) -> Path:
        """Extend a path inside Python; after a hop out of the graph the anchor stays the same."""
        hops = extend(before.hops, hop) if hop else before.hops
        inside = before.attached or before.in_graph
        return Path(hops, min(before.outside, len(hops)) if inside else len(hops), namespace)

    def _from(self, parent: int, position: int) -> Path:
        before, kind = self._known[parent], self._walked.kind(parent)
        if kind == TENSOR:
            return self._from_tensor(before, parent, position)
        if kind == NODE:
            return self._from_node(before, parent, position)
        if kind == KLASS:
            return self._add(before, namespace=self._is_exactly(position, dict))
        if kind == LOCALS:
            return root_path(*before.hops[0], self._variable(parent, position))
        return self._from_python(before, parent, position)

    def _variable(self, parent: int, position: int) -> PathSegment:
        """The variable whose value or cell an object is."""
        content = self._content(position)
        names = (name for name, value in self._call(parent)[1] if value == content)
        return PathSegment(SegmentKind.VARIABLE, next(names, "?"))

    def _from_tensor(self, before: Path, parent: int, position: int) -> Path:
        kind, native = self._walked.kind(position), self._native(position)
        if kind == NODE:
            hops = extend(before.hops, (PathSegment(SegmentKind.GRAD_FN, self._node_name(position)),))
            return Path(hops, min(before.outside, len(hops)), in_graph=True)
        if self._gradient(parent) == native:
            return self._add(before, PathSegment(SegmentKind.GRADIENT, "grad"))
        if self._base(parent) == native:
            return self._add(before, attribute_segment("_base"))
        attribute = self._from_attributes(before, parent, position)
        if attribute is not None:
            return attribute
        if kind == TENSOR and self._has_parts(parent):
            return self._add(before)
        if self._is_a(position, dict):
            return self._add(before, PathSegment(SegmentKind.HOOKS, "_hooks"))
        return self._from_slot(before, parent, position)

    def _from_node(self, before: Path, parent: int, position: int) -> Path:
        if self._walked.kind(position) == NODE:  # only the first and the last node are named
            kept = before.hops[:-1] if before.last.kind is SegmentKind.LATER_NODE else before.hops
            hop = (PathSegment(SegmentKind.LATER_NODE, self._node_name(position)),)
            return Path((*kept, hop), min(before.outside, len(kept)), in_graph=True)
        labels = self._saved.get(parent)
        if labels is None:
            labels = self._saved[parent] = self._saved_labels(parent)
        native, identity = self._native(position), self._identity(position)
        if native in labels:
            return self._add(before, *labels[native])
        if self._own_dict(parent) == identity:
            return Path(before.hops, before.outside, namespace=True, in_graph=True)
        for name, value in self._attributes(parent):  # since Python 3.14 it may have them without a dict
            if value == identity:
                return _context(before, PathSegment(SegmentKind.CONTEXT, name))
        if self._leaf(parent) == native:
            return self._add(before, PathSegment(SegmentKind.LEAF, "variable"))
        return self._add(before, PathSegment(SegmentKind.NODE_HOOKS, "hooks"))

    def _from_python(self, before: Path, parent: int, position: int) -> Path:
        variable = self._context_variable(parent, position)
        if variable is not None:
            return root_path(PathSegment(SegmentKind.CONTEXT_VARIABLE, variable))
        is_dict, kind = self._is_exactly(position, dict), self._walked.kind(parent)
        # Attributes of plain containers, if any, are in a dict.
        if self._is_a(parent, *CONTAINERS) and (
            is_dict or not self._is_exactly(parent, *CONTAINERS, OrderedDict)
        ):
            attribute = self._from_attributes(before, parent, position)
            if attribute is not None:
                return attribute
        if is_dict and self._is_a(parent, threading.local):
            return self._add(before)  # each thread has a separate dict
        if self._is_a(parent, dict):
            return self._from_dict(before, parent, position)
        if self._is_a(parent, list, deque, set, frozenset):
            of_context = before.last.kind is SegmentKind.CONTEXT and bool(before.last.name)
            if of_context and self._is_exactly(parent, list):
                return self._item(before, self._items(parent), position)
            return self._add(before, ANY_ITEM)
        if self._is_a(parent, tuple):
            return self._from_tuple(before, parent, position)
        if kind == FUTURE:
            value = () if is_dict else (PathSegment(SegmentKind.FUTURE, "value"),)
            return self._add(before, *value, namespace=is_dict)
        if kind == PLACEHOLDER and not is_dict:
            return self._add(before, PathSegment(SegmentKind.CHECKPOINT, "checkpoint"))
        if self._is_exactly(parent, types.FunctionType):
            return self._from_function(before, parent, position)
        if kind == SAVED or self._is_exactly(parent, types.CellType, types.TracebackType):
            return self._add(before)
        if self._is_exactly(parent, LRU):  # an unbounded cache has its results in a dict
            cache = (PathSegment(SegmentKind.LRU_CACHE, self._callable(parent)),)
            is_cache = is_dict and self._own_dict(parent) != self._identity(position)
            return Path((cache,), 1) if is_cache else Path((cache, (ANY_ITEM,)), 2)
        if self._type_name(parent) == "_lru_list_elem":  # of a bounded one: to its result, or the next one
            return before if before.last == ANY_ITEM else self._add(before, ANY_ITEM)
        if self._is_exactly(parent, types.MethodType):
            is_self = self._bound_to(parent) == self._identity(position)
            return self._add(before, *((attribute_segment("__self__"),) if is_self else ()))
        if self._is_exactly(parent, functools.partial):
            return self._add(before, PathSegment(SegmentKind.PARTIAL, self._called(parent)))
        for segment, classes in (
            (SegmentKind.GENERATOR, GENERATORS),
            (SegmentKind.FRAME, (types.FrameType,)),
        ):
            if self._is_a(parent, *classes):
                function = PathSegment(segment, self._call(parent)[0])
                return self._add(before, function, self._variable(parent, position))
        return self._from_instance(before, parent, position)

    def _from_dict(self, before: Path, parent: int, position: int) -> Path:
        above = self._parents[parent]
        if above >= 0 and self._is_exactly(position, dict) and self._is_a(above, threading.local):
            return self._add(before, namespace=True)
        labels = self._keys.get(parent)
        if labels is None:
            labels = self._keys[parent] = key_labels(list(self._keys_of(parent)), before.namespace)
        label = labels.get(self._identity(position), ANY_ITEM)  # a key, or a value added meanwhile
        if before.in_graph:
            if label.kind is SegmentKind.ITEM:
                return _context(before, PathSegment(SegmentKind.CONTEXT), label)
            return _context(before, PathSegment(SegmentKind.CONTEXT, label.name))
        if before.last.kind in _OF_FUNCTION:  # keyword-only defaults
            return self._variable_of_function(before, label.name)
        if before.namespace and self._is_part_of_module(above, label.name):
            return self._add(before, namespace=True)
        if before.last.kind is SegmentKind.MODULE and label.kind is SegmentKind.ATTRIBUTE:
            return self._add(before, PathSegment(SegmentKind.VARIABLE, label.name))
        return self._add(before, label)

    def _is_part_of_module(self, position: int, attribute: str) -> bool:
        """Whether an attribute is a table of an `nn.Module`'s parts, which are named like attributes."""
        return attribute in _MODULE_DICTS and position >= 0 and self._walked.kind(position) == MODULE

    def _variable_of_function(self, before: Path, name: str) -> Path:
        """From a function's closure or defaults to a variable, in the hop that names the function."""
        kept = Path(before.hops[:-1], min(before.outside, len(before.hops) - 1), in_graph=before.in_graph)
        return self._add(kept, *before.hops[-1], PathSegment(SegmentKind.VARIABLE, name))

    def _item(self, before: Path, items: list[int], position: int) -> Path:
        """From a tuple or list to an item, by its position if that is known and the container is a record."""
        identity = self._identity(position)
        is_record = len(items) <= _MOST_IN_RECORD and identity in items
        return self._add(before, item_segment(items.index(identity)) if is_record else ANY_ITEM)

    def _from_tuple(self, before: Path, parent: int, position: int) -> Path:
        above, items, names = self._parents[parent], self._items(parent), self._fields(parent)
        of_function = above >= 0 and before.last.kind in _OF_FUNCTION
        if of_function:
            names = self._names_of(above, parent, len(items)) or names
        for name, item in zip(names, items, strict=False):
            if item == self._identity(position) and type(name) is str:
                if of_function:
                    return self._variable_of_function(before, name)
                return self._add(before, attribute_segment(name))
        return self._item(before, items, position)

    def _names_of(self, function: int, values: int, count: int) -> Sequence[str]:
        """The names of the variables in a function's closure or positional defaults."""
        if not self._is_exactly(function, types.FunctionType):
            return ()
        parts, identity = self._function(function), self._identity(values)
        if parts.closure == identity:
            return parts.free
        if parts.defaults == identity:
            return parts.arguments[max(0, len(parts.arguments) - count) :]
        return ()

    def _from_function(self, before: Path, parent: int, position: int) -> Path:
        parts, identity = self._function(parent), self._identity(position)
        if parts.closure == identity:  # a hook's, if the path says so
            hooked = any(
                segment.kind in (SegmentKind.HOOKS, SegmentKind.HOOK_CLOSURE) or "hook" in segment.name
                for segment in before.whole
            )
            kind = SegmentKind.HOOK_CLOSURE if hooked else SegmentKind.CLOSURE
            return self._add(before, PathSegment(kind, self._callable(parent)))
        if identity in (parts.defaults, parts.keyword_defaults):
            default = PathSegment(SegmentKind.DEFAULT_ARGUMENT, self._callable(parent))
            return self._add(before, default, namespace=identity == parts.keyword_defaults)
        return self._add(before, namespace=self._is_exactly(position, dict))

    def _from_instance(self, before: Path, parent: int, position: int) -> Path:
        if self._is_a(parent, BaseException):
            if self._traceback(parent) == self._identity(position):
                return self._add(before, PathSegment(SegmentKind.TRACEBACK, "__traceback__"))
            if self._is_a(position, BaseException):  # raised from it, or while it was handled
                return before
        attribute = self._from_attributes(before, parent, position)
        return attribute or self._from_slot(before, parent, position)

    def _from_attributes(self, before: Path, parent: int, position: int) -> Path | None:
        """The path to an object's attributes, or to one of them; None if the object at `position` is neither.

        CPython keeps the attributes of most objects in the object itself until their dict is requested (from
        3.14 on also those of tensors, autograd contexts and subclasses of containers). Until then the object
        refers to the values, afterwards to the dict.
        """
        identity = self._identity(position)
        if self._own_dict(parent) == identity:
            return self._add(before, namespace=True)
        name = next((name for name, value in self._attributes(parent) if value == identity), None)
        if name is None:
            return None
        if self._is_part_of_module(parent, name):
            return self._add(before, namespace=True)
        return self._next_of(before, attribute_segment(name), parent, position)

    def _from_slot(self, before: Path, parent: int, position: int) -> Path:
        """The path by the slot that has an object, or by the object's type."""
        slot = self._slot(parent, position) or f"<{self._type_name(position)}>"
        return self._next_of(before, attribute_segment(slot), parent, position)

    def _next_of(self, before: Path, segment: PathSegment, parent: int, position: int) -> Path:
        """The path by an attribute; in a linked list, all that follow its first object have one path."""
        linked = before.last == segment and self._class_name(parent) == self._class_name(position)
        return before if linked else self._add(before, segment)


def _context(before: Path, *segments: PathSegment) -> Path:
    """From a node to one of its attributes."""
    return Path((*before.hops, segments), before.outside)
