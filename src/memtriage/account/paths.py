"""Holder paths of this process's objects, by the rules of `memtriage.account.path_rules`."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from memtriage.account.path_rules import (
    CONTAINERS,
    CYCLE_SEARCHED,
    GENERATORS,
    FoldedPaths,
    Hop,
    Path,
    attribute_segment,
    item_segment,
    key_labels,
    root_path,
    telling_name,
)
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from memtriage.observe.classes import (
    addresses,
    attributes_of,
    bases_of,
    instance_dict,
    module_of,
    name_of,
    qualified_name_of,
    read_member,
    stored,
)
from memtriage.observe.edges import is_sparse
from memtriage.observe.frames import frame_locals
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import FUTURE, KLASS, MODULE, NODE, PLACEHOLDER, SAVED, TENSOR, FrameLocals
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain
from memtriage.process.stdlib import gc

_PLAIN_CONTAINERS = addresses(*CONTAINERS, OrderedDict)
"""Containers whose attributes, if any, are in a dict."""
_LRU = type(functools.lru_cache(lambda: None))
_TRACEBACK = vars(BaseException)["__traceback__"]
_CONTEXT_TABLES = frozenset(("hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"))
"""Tables of a `contextvars.Context`. No object of the program leads to the current context."""
_NAMED = addresses(types.FunctionType, types.BuiltinFunctionType, _LRU)


def _context_variable(table: Any, value: Any) -> str | None:
    """Return the name of the context variable that has a value; None if the value is a nested table."""
    held = gc.get_referents(table)  # for each variable its value, then the variable
    names = (key.name for before, key in pairwise(held) if before is value and type(key) is ContextVar)
    return next(names, None)


class PathNamer(FoldedPaths):
    """Names objects of one heap graph. Use it while the graph is alive."""

    def __init__(self, graph: HeapGraph) -> None:
        super().__init__(graph.parents)
        self._graph = graph
        self._saved: dict[int, dict[int, Hop]] = {}
        self._keys: dict[int, dict[int, PathSegment]] = {}

    def _kind(self, kind: type) -> int:
        return self._graph.kinds[kind]

    def edge(self, parent: int, child: int) -> Path:
        """The path of `child` if it were reached through `parent`."""
        self.path(parent)
        return self._from(parent, child)

    def _root(self, position: int) -> Path:
        graph = self._graph
        name = graph.root_names[position]
        obj = graph.objects[position]
        if name:
            if type(obj) is dict:
                return root_path(PathSegment(SegmentKind.MODULE, name), namespace=True)
            return root_path(PathSegment(SegmentKind.CLASS, name))
        if position in graph.not_searched:
            return root_path(PathSegment(SegmentKind.NOT_SEARCHED))
        if type(obj) is FrameLocals:
            frame = PathSegment(SegmentKind.FRAME, obj.code.co_name)
            return root_path(
                *((PathSegment(SegmentKind.THREAD, obj.thread), frame) if obj.thread else (frame,))
            )
        if position >= graph.first_garbage:
            return root_path(PathSegment(SegmentKind.GARBAGE_CYCLE, self._garbage_name(position)))
        return self._unrooted(obj)

    def _unrooted(self, obj: Any) -> Path:
        kind = type(obj)
        if issubclass(kind, GENERATORS):
            return root_path(PathSegment(SegmentKind.GENERATOR, obj.__name__))
        if self._kind(kind) == NODE:
            return self._graph_root(name_of(kind))
        if self._kind(kind) == TENSOR:
            return root_path(PathSegment(SegmentKind.NATIVE, name_of(kind)))
        return root_path(PathSegment(SegmentKind.UNSEEN, name_of(kind)))

    def _from(self, parent: int, position: int) -> Path:
        graph = self._graph
        holder, obj = graph.objects[parent], graph.objects[position]
        before = self._known[parent]
        kind = self._kind(type(holder))
        if name_of(type(holder)) in _CONTEXT_TABLES:
            variable = _context_variable(holder, obj)
            if variable is not None:
                return root_path(PathSegment(SegmentKind.CONTEXT_VARIABLE, variable))
        if kind == TENSOR:
            return self._from_tensor(before, parent, holder, obj)
        if kind == NODE:
            return self._from_node(before, parent, holder, obj)
        if kind == KLASS:
            return self._add(before, namespace=type(obj) is dict)
        if type(holder) is FrameLocals:
            name = _variable_of(obj, zip(holder.names, holder.values, strict=True))
            return root_path(*before.hops[0], PathSegment(SegmentKind.VARIABLE, name))
        return self._from_python(before, parent, holder, obj)

    def _from_tensor(self, before: Path, parent: int, tensor: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            return self._into_graph(before, name_of(type(obj)))
        own = plain(tensor)
        if (own.grad_fn is None or own.retains_grad) and own.grad is obj:
            return self._add(before, PathSegment(SegmentKind.GRADIENT, "grad"))
        if own._is_view() and own._base is obj:
            return self._add(before, attribute_segment("_base"))
        attribute = self._from_attributes(before, parent, tensor, obj)
        if attribute is not None:
            return attribute
        if self._kind(type(obj)) == TENSOR and is_sparse(tensor):
            return self._add(before)  # its indices or values
        if issubclass(type(obj), dict):
            return self._add(before, PathSegment(SegmentKind.HOOKS, "_hooks"))
        return self._add(before, attribute_segment(_slot_name(tensor, obj)))

    def _from_node(self, before: Path, parent: int, node: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            return self._along_graph(before, name_of(type(obj)))
        label = self._node_labels(parent, node).get(id(obj))
        if label is not None:
            return self._add(before, *label)
        own = instance_dict(node)
        if own is not None:
            if obj is own:
                return self._context_dict(before)
            for name, value in list(own.items()):
                if value is obj and type(name) is str:
                    return self._context(before, PathSegment(SegmentKind.CONTEXT, name))
        if getattr(node, "variable", None) is obj:
            return self._add(before, PathSegment(SegmentKind.LEAF, "variable"))
        return self._add(before, PathSegment(SegmentKind.NODE_HOOKS, "hooks"))

    def _node_labels(self, parent: int, node: Any) -> dict[int, Hop]:
        labels = self._saved.get(parent)
        if labels is None:
            labels = {}
            for name, place, value in self._graph.reader.saved_values(node):
                saved = PathSegment(SegmentKind.SAVED, name)
                labels[id(value)] = (saved,) if place is None else (saved, item_segment(place))
            self._saved[parent] = labels
        return labels

    def _from_python(self, before: Path, parent: int, holder: Any, obj: Any) -> Path:
        kind = type(holder)
        if issubclass(kind, CONTAINERS) and (type(obj) is dict or id(kind) not in _PLAIN_CONTAINERS):
            attribute = self._from_attributes(before, parent, holder, obj)
            if attribute is not None:
                return attribute
        if issubclass(kind, threading.local) and type(obj) is dict:
            return self._add(before)  # a `threading.local`: each thread has a separate dict
        if issubclass(kind, dict):
            return self._from_dict(before, parent, holder, obj)
        if issubclass(kind, (list, deque, set, frozenset)):
            if kind is list and self._is_of_context(before):
                return self._place(before, _place_of(obj, holder), len(holder))
            return self._add(before, ANY_ITEM)
        if issubclass(kind, tuple):
            return self._from_tuple(before, parent, holder, obj)
        if self._kind(kind) == FUTURE:
            if type(obj) is dict:
                return self._add(before, namespace=True)
            return self._add(before, PathSegment(SegmentKind.FUTURE, "value"))
        if self._kind(kind) == SAVED:
            return self._add(before)
        if self._kind(kind) == PLACEHOLDER and type(obj) is not dict:
            return self._add(before, PathSegment(SegmentKind.CHECKPOINT, "checkpoint"))
        if kind is types.FunctionType:
            return self._from_function(before, holder, obj)
        if kind is types.CellType:
            return self._add(before)
        if kind is _LRU:
            is_own_dict = type(obj) is dict and obj is not instance_dict(holder)
            return self._cached(_short(holder), is_own_dict=is_own_dict)
        if name_of(kind) == "_lru_list_elem":
            return self._cache_element(before)
        if kind is types.MethodType:
            return self._add(before, *((attribute_segment("__self__"),) if obj is holder.__self__ else ()))
        if kind is functools.partial:
            return self._add(before, PathSegment(SegmentKind.PARTIAL, _short(holder.func)))
        if issubclass(kind, GENERATORS):
            return self._from_generator(before, holder, obj)
        if kind is types.TracebackType:
            return self._add(before)
        if kind is types.FrameType:
            name = _variable_of(obj, frame_locals(holder))
            return self._running(before, SegmentKind.FRAME, holder.f_code.co_name, name)
        return self._from_instance(before, parent, holder, obj)

    def _from_dict(self, before: Path, parent: int, holder: dict[Any, Any], obj: Any) -> Path:
        above = self._graph.parents[parent]
        if type(obj) is dict and above >= 0 and issubclass(type(self._graph.objects[above]), threading.local):
            return self._add(before, namespace=True)
        labels = self._keys.get(parent)
        if labels is None:
            labels = dict_labels(holder, before.namespace)
            self._keys[parent] = labels
        label = labels.get(id(obj), ANY_ITEM)  # a key, or a value added meanwhile
        return self._entry(before, parent, label)

    def _from_tuple(self, before: Path, parent: int, holder: tuple[Any, ...], obj: Any) -> Path:
        above = self._graph.parents[parent]
        if above >= 0 and self._is_of_function(before):
            names = _tuple_names(self._graph.objects[above], holder)
            for name, value in zip(names, holder, strict=False):
                if value is obj:
                    return self._variable_of_function(before, name)
        fields = stored(holder, "_fields")
        values = tuple_items(holder)
        if len(values) < tuple.__len__(holder):
            return self._add(before, ANY_ITEM)
        at = _place_of(obj, values)
        if at is not None and type(fields) is tuple and at < len(fields) and type(fields[at]) is str:
            return self._add(before, attribute_segment(fields[at]))
        return self._place(before, at, len(values))

    def _from_function(self, before: Path, function: types.FunctionType, obj: Any) -> Path:
        if obj is function.__closure__:
            return self._closure(before, _short(function))
        if obj is function.__defaults__ or obj is function.__kwdefaults__:
            return self._defaults(before, _short(function), by_keyword=obj is function.__kwdefaults__)
        return self._add(before, namespace=type(obj) is dict)

    def _from_generator(self, before: Path, generator: Any, obj: Any) -> Path:
        frames = (getattr(generator, attribute, None) for attribute in ("gi_frame", "cr_frame", "ag_frame"))
        pairs = [pair for frame in frames if frame is not None for pair in frame_locals(frame)]
        return self._running(before, SegmentKind.GENERATOR, generator.__name__, _variable_of(obj, pairs))

    def _from_instance(self, before: Path, parent: int, holder: Any, obj: Any) -> Path:
        if issubclass(type(holder), BaseException) and obj is read_member(_TRACEBACK, holder):
            return self._add(before, PathSegment(SegmentKind.TRACEBACK, "__traceback__"))
        attribute = self._from_attributes(before, parent, holder, obj)
        return attribute or self._add(before, attribute_segment(_slot_name(holder, obj)))

    def _from_attributes(self, before: Path, parent: int, holder: Any, obj: Any) -> Path | None:
        """The path to an object's attributes, or to one of them; None if `obj` is neither.

        CPython keeps the attributes of most objects in the object itself until their dict is requested (from
        3.14 on also those of tensors, autograd contexts and subclasses of containers). Until then the object
        refers to the values, afterwards to the dict.
        """
        own = instance_dict(holder)
        if own is None:
            return None
        if obj is own:
            return self._add(before, namespace=True)
        for name, value in list(own.items()):
            if value is obj and type(name) is str:
                return self._attribute(before, parent, name)
        return None

    def _garbage_name(self, position: int) -> str:
        """The most telling type of a cycle: the first class instance met from its entry."""
        graph = self._graph
        kinds = [type(obj) for obj in graph.objects[position : position + CYCLE_SEARCHED]]
        met = (
            (module_of(kind), name_of(kind), self._kind(kind) == TENSOR)
            for kind in kinds
            if not issubclass(kind, type)
        )
        return telling_name(met, name_of(kinds[0]))

    def _is_module(self, position: int) -> bool:
        return self._kind(type(self._graph.objects[position])) == MODULE


def _place_of(obj: Any, values: Iterable[Any]) -> int | None:
    return next((at for at, value in enumerate(values) if value is obj), None)


def _variable_of(obj: Any, pairs: Iterable[tuple[str, Any]]) -> str:
    """Return the name of the variable whose value or cell an object is."""
    if type(obj) is types.CellType:  # a function inside uses it, too
        obj = next(iter(gc.get_referents(obj)), obj)
    return next((name for name, value in pairs if value is obj), "?")


def dict_labels(holder: dict[Any, Any], namespace: bool) -> dict[int, PathSegment]:
    """The segment of every value's key, by the value's id. See `key_labels`."""
    items = list(dict.items(holder))  # a subclass's own methods could do anything
    return key_labels([(key if type(key) is str else None, id(value)) for key, value in items], namespace)


def _tuple_names(function: Any, values: tuple[Any, ...]) -> tuple[str, ...]:
    """Variable names of a function's closure or positional defaults."""
    if type(function) is not types.FunctionType:
        return ()
    code = function.__code__
    if values is function.__closure__:
        return code.co_freevars
    if values is function.__defaults__:
        return code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return ()


def _slot_name(holder: Any, obj: Any) -> str:
    """Name of the slot that holds an object; the object's type if no slot does."""
    for klass in bases_of(type(holder)):
        for name, member in list(attributes_of(klass).items()):
            if type(member) is types.MemberDescriptorType and read_member(member, holder) is obj:
                return name
    return f"<{name_of(type(obj))}>"


def _short(function: Any) -> str:
    """Name of a function or class; of any other callable its type's name."""
    kind = type(function)
    if kind is types.MethodType:
        return _short(function.__func__)
    if issubclass(kind, type):
        name = qualified_name_of(function)
    elif id(kind) in _NAMED:
        given = getattr(function, "__qualname__", None)
        name = given if type(given) is str else name_of(kind)
    else:
        name = name_of(kind)
    return name.rsplit("<locals>.", 1)[-1]
