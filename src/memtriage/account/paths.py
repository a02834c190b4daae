"""Holder paths: the chain from a root to an object, as segments that name what the program wrote.

`memtriage.model.paths` says what segments are. A hop from one object to the next adds one to three of them:
a function's closure and the variable in it are one hop.

Folding keeps the number of different paths small: positions in lists and varying keys become `*`, a walk
along the graph keeps only its first and its last node, and a run of hops that repeats (linked lists, chains
of contexts) is cut to two rounds.
"""

from __future__ import annotations

import functools
import re
import types
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from memtriage.observe.classes import (
    addresses,
    attributes_of,
    bases_of,
    instance_dict,
    module_of,
    name_of,
    qualified_name_of,
    read_member,
)
from memtriage.observe.edges import is_sparse
from memtriage.observe.frames import frame_locals
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import FUTURE, KLASS, MODULE, NODE, PLACEHOLDER, SAVED, TENSOR, FrameLocals
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain
from memtriage.process.stdlib import gc

_MODULE_DICTS = ("_modules", "_parameters", "_buffers")
_MAX_DICT_KEYS = 32
"""Entries up to which a dict is a record with names; with more its keys are data, and fold."""
_MAX_TUPLE = 8
"""Items up to which a tuple is a record, whose places have meaning."""
_ENOUGH = 3
"""Keys that differ only in digits from which on they fold; two may be a pair, such as `w1` and `w2`."""
_ENOUGH_VARIABLES = 8
"""The same for variables and attributes, which are written one by one: `layer1` to `layer4` are names."""
_DIGITS = re.compile(r"\d+")
_COMMON_MODULES = ("builtins", "collections", "types", "functools")
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_PLAIN_CONTAINERS = addresses(*_CONTAINERS, OrderedDict)
"""Those whose attributes, if any, are in a dict."""
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_LRU = type(functools.lru_cache(lambda: None))
_TRACEBACK = vars(BaseException)["__traceback__"]
_CONTEXT_TABLES = frozenset(("hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"))
"""What a `contextvars.Context` keeps its variables in. No object of the program leads to the one in use."""
_NAMED = (types.FunctionType, types.BuiltinFunctionType, _LRU)


Hop = HolderPath
"""The segments that one hop adds."""

_OPEN = (SegmentKind.CLOSURE, SegmentKind.HOOK_CLOSURE, SegmentKind.DEFAULT_ARGUMENT)
"""Kinds of segments that a function's own tuple or dict of values adds: the variable follows."""


@dataclass(frozen=True)
class Path:
    """A folded path.

    Attributes:
        hops: the segments, by the hop that added them.
        outside: how many hops lead up to the first one into the autograd graph (all, if there is none).
        namespace: the object is a dict whose keys are attribute names.
        in_graph: the object is an autograd node.
    """

    hops: tuple[Hop, ...]
    outside: int
    namespace: bool = False
    in_graph: bool = False

    @functools.cached_property
    def whole(self) -> HolderPath:
        return tuple(chain.from_iterable(self.hops))

    @functools.cached_property
    def anchor(self) -> HolderPath:
        """What the program itself holds: the path before the autograd graph."""
        if not self.attached:
            return self.whole
        return tuple(chain.from_iterable(self.hops[: self.outside]))

    @property
    def attached(self) -> bool:
        """It leads through the autograd graph."""
        return self.outside < len(self.hops)

    @property
    def last(self) -> PathSegment:
        return self.hops[-1][-1]


def extend(hops: tuple[Hop, ...], hop: Hop) -> tuple[Hop, ...]:
    """Append a hop, and fold a third occurrence back to the second: a chain that repeats.

    Items of one container after another are no such chain. They fold only if the hops since the last item are
    those between the two last ones.
    """
    places = [at for at, before in enumerate(hops) if before == hop]
    if len(hops) <= 3 or len(places) < 2:
        return (*hops, hop)
    if hop != (ANY_ITEM,):
        return hops[: places[1] + 1]
    second, third = places[-2:]
    return hops[: third + 1] if hops[second + 1 : third] == hops[third + 1 :] else (*hops, hop)


def _root_path(*segments: PathSegment, namespace: bool = False, in_graph: bool = False) -> Path:
    return Path((segments,), 1, namespace, in_graph)


def _without_last(path: Path) -> Path:
    """The path before its last hop, which is about to be replaced by a longer one."""
    return Path(path.hops[:-1], min(path.outside, len(path.hops) - 1), in_graph=path.in_graph)


def item_segment(place: object) -> PathSegment:
    """An entry of a container, by its index or key as text."""
    return PathSegment(SegmentKind.ITEM, str(place))


def attribute_segment(name: str) -> PathSegment:
    """An attribute, or a module's variable; those that keep hooks are named like `_forward_hooks`."""
    return PathSegment(SegmentKind.HOOKS if "_hooks" in name else SegmentKind.ATTRIBUTE, name)


def _context_variable(table: Any, value: Any) -> str | None:
    """Return the name of the context variable that has a value; None where the value is a table below."""
    held = gc.get_referents(table)  # of each variable its value, then the variable
    names = (key.name for before, key in pairwise(held) if before is value and type(key) is ContextVar)
    return next(names, None)


class FoldedPaths(ABC):
    """Paths of the objects of one graph, each shared prefix computed once.

    Args:
        parents: position of what each object was reached through; -1 for a root.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self._parents = parents
        self._known: dict[int, Path] = {}

    def path(self, position: int) -> Path:
        """The folded path of the object at a position of the graph."""
        known, parents = self._known, self._parents
        chain = []
        at = position
        while at not in known:
            chain.append(at)
            at = parents[at]
            if at < 0:
                break
        for at in reversed(chain):
            known[at] = self._root(at) if parents[at] < 0 else self._from(parents[at], at)
        return known[position]

    @abstractmethod
    def _root(self, position: int) -> Path:
        """The path of a root."""

    @abstractmethod
    def _from(self, parent: int, position: int) -> Path:
        """The path of an object through one whose path is known."""


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
                return _root_path(PathSegment(SegmentKind.MODULE, name), namespace=True)
            return _root_path(PathSegment(SegmentKind.CLASS, name))
        if position in graph.not_searched:
            return _root_path(PathSegment(SegmentKind.NOT_SEARCHED))
        if type(obj) is FrameLocals:
            frame = PathSegment(SegmentKind.FRAME, obj.code.co_name)
            return _root_path(
                *((PathSegment(SegmentKind.THREAD, obj.thread), frame) if obj.thread else (frame,))
            )
        if position >= graph.first_garbage:
            return _root_path(PathSegment(SegmentKind.GARBAGE_CYCLE, self._garbage_name(position)))
        return self._unrooted(obj)

    def _unrooted(self, obj: Any) -> Path:
        kind = type(obj)
        if issubclass(kind, _GENERATORS):
            return _root_path(PathSegment(SegmentKind.GENERATOR, obj.__name__))
        if self._kind(kind) == NODE:
            node = PathSegment(SegmentKind.GRAD_FN, name_of(kind))
            return Path(((PathSegment(SegmentKind.NATIVE),), (node,)), 1, in_graph=True)
        if self._kind(kind) == TENSOR:
            return _root_path(PathSegment(SegmentKind.NATIVE, name_of(kind)))
        return _root_path(PathSegment(SegmentKind.UNSEEN, name_of(kind)))

    def _from(self, parent: int, position: int) -> Path:
        graph = self._graph
        holder, obj = graph.objects[parent], graph.objects[position]
        before = self._known[parent]
        kind = self._kind(type(holder))
        if name_of(type(holder)) in _CONTEXT_TABLES:
            variable = _context_variable(holder, obj)
            if variable is not None:
                return _root_path(PathSegment(SegmentKind.CONTEXT_VARIABLE, variable))
        if kind == TENSOR:
            return self._from_tensor(before, holder, obj)
        if kind == NODE:
            return self._from_node(before, parent, holder, obj)
        if kind == KLASS:
            return self._add(before, namespace=type(obj) is dict)
        if type(holder) is FrameLocals:
            name = next((n for n, v in zip(holder.names, holder.values, strict=True) if v is obj), "?")
            return _root_path(*before.hops[0], PathSegment(SegmentKind.VARIABLE, name))
        return self._from_python(before, parent, holder, obj)

    def _add(self, before: Path, *hop: PathSegment, namespace: bool = False) -> Path:
        """Extends a path inside Python; a hop out of the graph keeps the anchor where it was."""
        hops = extend(before.hops, hop) if hop else before.hops
        inside = before.attached or before.in_graph
        return Path(hops, min(before.outside, len(hops)) if inside else len(hops), namespace)

    def _from_tensor(self, before: Path, tensor: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            hops = extend(before.hops, (PathSegment(SegmentKind.GRAD_FN, name_of(type(obj))),))
            return Path(hops, min(before.outside, len(hops)), in_graph=True)
        own = plain(tensor)
        if (own.grad_fn is None or own.retains_grad) and own.grad is obj:
            return self._add(before, PathSegment(SegmentKind.GRADIENT, "grad"))
        if own._is_view() and own._base is obj:
            return self._add(before, attribute_segment("_base"))
        attribute = self._from_attributes(before, tensor, obj)
        if attribute is not None:
            return attribute
        if self._kind(type(obj)) == TENSOR and is_sparse(tensor):
            return self._add(before)  # its indices or values
        if issubclass(type(obj), dict):
            return self._add(before, PathSegment(SegmentKind.HOOKS, "_hooks"))
        return self._add(before, attribute_segment(_slot_name(tensor, obj)))

    def _from_node(self, before: Path, parent: int, node: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            hop = (PathSegment(SegmentKind.LATER_NODE, name_of(type(obj))),)
            kept = before.hops[:-1] if before.last.kind is SegmentKind.LATER_NODE else before.hops
            return Path((*kept, hop), min(before.outside, len(kept)), in_graph=True)
        label = self._node_labels(parent, node).get(id(obj))
        if label is not None:
            return self._add(before, *label)
        own = instance_dict(node)
        if own is not None:
            if obj is own:
                return Path(before.hops, before.outside, namespace=True, in_graph=True)
            for name, value in list(own.items()):
                if value is obj:
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
        if issubclass(kind, _CONTAINERS) and (type(obj) is dict or id(kind) not in _PLAIN_CONTAINERS):
            attribute = self._from_attributes(before, holder, obj)
            if attribute is not None:
                return attribute
        if issubclass(kind, dict):
            return self._from_dict(before, parent, holder, obj)
        if issubclass(kind, (list, deque, set, frozenset)):
            last = before.last
            if last.kind is SegmentKind.CONTEXT and last.name and kind is list and len(holder) <= _MAX_TUPLE:
                at = next((at for at, value in enumerate(holder) if value is obj), "*")
                # A context's list is a record: its places have meaning.
                return self._add(before, item_segment(at))
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
            cache = (PathSegment(SegmentKind.LRU_CACHE, _short(holder)),)
            if type(obj) is dict and obj is not getattr(holder, "__dict__", None):
                return Path((cache,), 1)  # the unbounded cache's own dict
            return Path((cache, (ANY_ITEM,)), 2)
        if name_of(kind) == "_lru_list_elem":
            return before if before.last == ANY_ITEM else self._add(before, ANY_ITEM)
        if kind is types.MethodType:
            return self._add(before, *((attribute_segment("__self__"),) if obj is holder.__self__ else ()))
        if kind is functools.partial:
            return self._add(before, PathSegment(SegmentKind.PARTIAL, _short(holder.func)))
        if issubclass(kind, _GENERATORS):
            return self._from_generator(before, holder, obj)
        if kind is types.TracebackType:
            return self._add(before)
        if kind is types.FrameType:
            name = next((name for name, value in frame_locals(holder) if value is obj), "?")
            frame = PathSegment(SegmentKind.FRAME, holder.f_code.co_name)
            return self._add(before, frame, PathSegment(SegmentKind.VARIABLE, name))
        return self._from_instance(before, holder, obj)

    def _from_dict(self, before: Path, parent: int, holder: dict[Any, Any], obj: Any) -> Path:
        labels = self._keys.get(parent)
        if labels is None:
            labels = dict_labels(holder, before.namespace)
            self._keys[parent] = labels
        label = labels.get(id(obj), ANY_ITEM)  # a key, or a value that came meanwhile
        if before.in_graph:
            if label.kind is SegmentKind.ITEM:
                return self._context(before, PathSegment(SegmentKind.CONTEXT), label)
            return self._context(before, PathSegment(SegmentKind.CONTEXT, label.name))
        if before.last.kind in _OPEN:  # keyword-only defaults
            variable = PathSegment(SegmentKind.VARIABLE, label.name)
            return self._add(_without_last(before), *before.hops[-1], variable)
        if before.namespace and label.name in _MODULE_DICTS and self._belongs_to_module(parent):
            return self._add(before, namespace=True)
        if before.last.kind is SegmentKind.MODULE and label.kind is SegmentKind.ATTRIBUTE:
            return self._add(before, PathSegment(SegmentKind.VARIABLE, label.name))
        return self._add(before, label)

    def _context(self, before: Path, *segments: PathSegment) -> Path:
        return Path((*before.hops, segments), before.outside)

    def _belongs_to_module(self, position: int) -> bool:
        above = self._graph.parents[position]
        return above >= 0 and self._kind(type(self._graph.objects[above])) == MODULE

    def _from_tuple(self, before: Path, parent: int, holder: tuple[Any, ...], obj: Any) -> Path:
        above = self._graph.parents[parent]
        if above >= 0 and before.last.kind in _OPEN:
            names = _tuple_names(self._graph.objects[above], holder)
            for name, value in zip(names, holder, strict=False):
                if value is obj:
                    variable = PathSegment(SegmentKind.VARIABLE, name)
                    return self._add(_without_last(before), *before.hops[-1], variable)
        fields = getattr(type(holder), "_fields", ())
        values = tuple_items(holder)
        if len(values) < tuple.__len__(holder):
            return self._add(before, ANY_ITEM)
        for at, value in enumerate(values):
            if value is obj:
                if type(fields) is tuple and at < len(fields):
                    return self._add(before, attribute_segment(fields[at]))
                return self._add(before, item_segment(at) if len(values) <= _MAX_TUPLE else ANY_ITEM)
        return self._add(before, ANY_ITEM)

    def _from_function(self, before: Path, function: types.FunctionType, obj: Any) -> Path:
        if obj is function.__closure__:
            kind = SegmentKind.HOOK_CLOSURE if _leads_to_hook(before) else SegmentKind.CLOSURE
            return self._add(before, PathSegment(kind, _short(function)))
        if obj is function.__defaults__ or obj is function.__kwdefaults__:
            arguments = PathSegment(SegmentKind.DEFAULT_ARGUMENT, _short(function))
            return self._add(before, arguments, namespace=obj is function.__kwdefaults__)
        return self._add(before, namespace=type(obj) is dict)

    def _from_generator(self, before: Path, generator: Any, obj: Any) -> Path:
        frames = (getattr(generator, attribute, None) for attribute in ("gi_frame", "cr_frame", "ag_frame"))
        pairs = [pair for frame in frames if frame is not None for pair in frame_locals(frame)]
        name = next((name for name, value in pairs if value is obj), "?")
        running = PathSegment(SegmentKind.GENERATOR, generator.__name__)
        return self._add(before, running, PathSegment(SegmentKind.VARIABLE, name))

    def _from_instance(self, before: Path, holder: Any, obj: Any) -> Path:
        if issubclass(type(holder), BaseException) and obj is read_member(_TRACEBACK, holder):
            return self._add(before, PathSegment(SegmentKind.TRACEBACK, "__traceback__"))
        attribute = self._from_attributes(before, holder, obj)
        return attribute or self._add(before, attribute_segment(_slot_name(holder, obj)))

    def _from_attributes(self, before: Path, holder: Any, obj: Any) -> Path | None:
        """The path to an object's attributes, or to one of them; None to what is neither.

        CPython keeps the attributes of most objects in the object itself until their dict is asked for (from
        3.14 on also those of tensors, autograd contexts and subclasses of containers): then the object refers
        to the values, else to the dict.
        """
        own = instance_dict(holder)
        if own is None:
            return None
        if obj is own:
            return self._add(before, namespace=True)
        for name, value in list(own.items()):
            if value is obj:
                if name in _MODULE_DICTS and self._kind(type(holder)) == MODULE:
                    return self._add(before, namespace=True)
                return self._add(before, attribute_segment(name))
        return None

    def _garbage_name(self, position: int) -> str:
        """The most telling type of a cycle: the first class instance met from its entry."""
        graph = self._graph
        fallback = name_of(type(graph.objects[position]))
        for obj in graph.objects[position : position + 200]:
            kind = type(obj)
            if module_of(kind) not in _COMMON_MODULES and not issubclass(kind, type):
                if self._kind(kind) == TENSOR:
                    fallback = name_of(kind)
                    continue
                return name_of(kind)
        return fallback


def _leads_to_hook(path: Path) -> bool:
    """Whether a function at the end of a path is called as a hook: something on the way says so."""
    return any(
        segment.kind in (SegmentKind.HOOKS, SegmentKind.HOOK_CLOSURE) or "hook" in segment.name
        for segment in path.whole
    )


def dict_labels(holder: dict[Any, Any], namespace: bool) -> dict[int, PathSegment]:
    """The segment of every value's key, by the value's id. See `key_labels`."""
    items = list(dict.items(holder))  # a subclass's own methods could do anything
    return key_labels([(key if type(key) is str else None, id(value)) for key, value in items], namespace)


def key_labels(keys: Sequence[tuple[str | None, int]], namespace: bool) -> dict[int, PathSegment]:
    """The segment of every key of a dict, by what identifies the key's value.

    Keys that are no strings vary by nature (`[*]`). String keys that differ only in digits fold once there
    are enough of them, and a dict of many keys is a table, not a record.

    Args:
        keys: (text of the key, None if it is no string; what identifies the value).
        namespace: the keys are names of attributes.
    """
    patterns = Counter(_DIGITS.sub("*", text) for text, _ in keys if text is not None)
    enough = _ENOUGH_VARIABLES if namespace else _ENOUGH
    many = not namespace and len(patterns) > _MAX_DICT_KEYS
    labels: dict[int, PathSegment] = {}
    for text, value_id in keys:
        if text is None or many:
            label = ANY_ITEM
        else:
            pattern = _DIGITS.sub("*", text)
            if pattern != text and patterns[pattern] >= enough:
                text = pattern
            if text == "*" or (namespace and text.isdigit()):
                label = ANY_ITEM
            else:
                label = attribute_segment(text) if namespace else item_segment(repr(text))
        labels.setdefault(value_id, label)
    return labels


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
    """Name of the slot that holds an object; its type where it is in none."""
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
    elif kind in _NAMED:
        name = getattr(function, "__qualname__", None) or name_of(kind)
    else:
        name = name_of(kind)
    return name.rsplit("<locals>.", 1)[-1]
