"""Holder paths: the chain from a root to an object, in the words of the program.

A path is a tuple of segments. Segments that begin with `.` or `[` are appended as they are, others are
joined with ` -> `:

    train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]
    frame evaluate(): acts[*]
    train.model.fc._forward_hooks[*] -> closure of hook grab: captured['n1'][*]
    functools.lru_cache causal_mask[*]

Folding keeps the number of different paths small: positions in lists and varying keys become `[*]`, a walk
along the graph keeps only its first and its last node, and a run of segments that repeats (linked lists,
chains of contexts) is cut to two rounds.
"""

from __future__ import annotations

import functools
import re
import types
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from memtriage.observe.classes import (
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
from memtriage.observe.heap import HeapGraph
from memtriage.observe.kinds import FUTURE, KLASS, MODULE, NODE, PLACEHOLDER, SAVED, TENSOR, FrameLocals

_MODULE_DICTS = ("_modules", "_parameters", "_buffers")
_MAX_DICT_KEYS = 32
_MAX_TUPLE = 8
_DIGITS = re.compile(r"\d+")
_COMMON_MODULES = ("builtins", "collections", "types", "functools")
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_LRU = type(functools.lru_cache(lambda: None))
_TRACEBACK = vars(BaseException)["__traceback__"]
_NAMED = (types.FunctionType, types.BuiltinFunctionType, _LRU)


@dataclass(frozen=True, slots=True)
class Path:
    """A folded path.

    Attributes:
        segments: the pieces; see the module's docstring.
        anchor: how many segments lead up to the first hop into the autograd graph (all, if there is none):
            what the program itself holds.
        namespace: the object is a dict whose keys are attribute names.
        in_graph: the object is an autograd node.
    """

    segments: tuple[str, ...]
    anchor: int
    namespace: bool = False
    in_graph: bool = False

    @property
    def text(self) -> str:
        return render(self.segments)

    @property
    def anchor_text(self) -> str:
        return render(self.segments[: self.anchor])


def render(segments: tuple[str, ...]) -> str:
    """Joins segments: `.` and `[` stick to what is before them, others follow ` -> `."""
    text = ""
    for segment in segments:
        if not text or segment[0] in ".[":
            text += segment
        else:
            text += f" -> {segment}"
    return text


def extend(segments: tuple[str, ...], segment: str) -> tuple[str, ...]:
    """Appends a segment, folding a third occurrence back to the second (a chain that repeats)."""
    if len(segments) > 3 and segments.count(segment) >= 2:
        first = segments.index(segment)
        second = segments.index(segment, first + 1)
        return segments[: second + 1]
    return segments + (segment,)


def _without_last(path: Path) -> Path:
    """The path before its last segment, which is about to be replaced by a longer one."""
    return Path(path.segments[:-1], min(path.anchor, len(path.segments) - 1), in_graph=path.in_graph)


class PathNamer:
    """Names objects of one heap graph, each shared prefix once. Use it while the graph is alive."""

    def __init__(self, graph: HeapGraph) -> None:
        self._graph = graph
        self._known: dict[int, Path] = {}
        self._labels: dict[int, dict[int, str]] = {}

    def _kind(self, kind: type) -> int:
        return self._graph.kinds[kind]

    def path(self, position: int) -> Path:
        """The folded path of the object at a position of the graph."""
        known, parents = self._known, self._graph.parents
        chain = []
        at = position
        while at not in known:
            chain.append(at)
            at = parents[at]
            if at < 0:
                break
        for at in reversed(chain):
            known[at] = self._root(at) if parents[at] < 0 else self._step(at)
        return known[position]

    def edge(self, parent: int, child: int) -> Path:
        """The path of `child` if it were reached through `parent`."""
        self.path(parent)
        return self._from(parent, child)

    def _root(self, position: int) -> Path:
        graph = self._graph
        name = graph.root_names[position]
        obj = graph.objects[position]
        if name:
            return Path((name,), 1, namespace=type(obj) is dict)
        if type(obj) is FrameLocals:
            where = f"frame {obj.code.co_name}():"
            return Path((f'thread "{obj.thread}" {where}' if obj.thread else where,), 1)
        if position >= graph.first_garbage:
            return Path((f"garbage cycle of {self._garbage_name(position)}",), 1)
        return self._unrooted(obj)

    def _unrooted(self, obj: Any) -> Path:
        kind = type(obj)
        if issubclass(kind, _GENERATORS):
            return Path((f"generator {obj.__name__}()",), 1)
        if self._kind(kind) == NODE:
            return Path(("C++", f"grad_fn {name_of(kind)}"), 1, in_graph=True)
        if self._kind(kind) == TENSOR:
            return Path((f"C++ -> {name_of(kind)}",), 1)
        return Path((f"C++ or an evaluation stack -> {name_of(kind)}",), 1)

    def _step(self, position: int) -> Path:
        return self._from(self._graph.parents[position], position)

    def _from(self, parent: int, position: int) -> Path:
        graph = self._graph
        holder, obj = graph.objects[parent], graph.objects[position]
        before = self._known[parent]
        kind = self._kind(type(holder))
        if kind == TENSOR:
            return self._from_tensor(before, holder, obj)
        if kind == NODE:
            return self._from_node(before, parent, holder, obj)
        if kind == KLASS:
            return self._add(before, "", namespace=type(obj) is dict)
        if type(holder) is FrameLocals:
            name = next((n for n, v in zip(holder.names, holder.values, strict=True) if v is obj), "?")
            return Path((f"{before.segments[0]} {name}",), 1)
        return self._from_python(before, parent, holder, obj)

    def _add(self, before: Path, segment: str, namespace: bool = False) -> Path:
        """Extends a path inside Python; a hop out of the graph keeps the anchor where it was."""
        segments = extend(before.segments, segment) if segment else before.segments
        inside = before.anchor < len(before.segments) or before.in_graph
        anchor = min(before.anchor, len(segments)) if inside else len(segments)
        return Path(segments, anchor, namespace)

    def _from_tensor(self, before: Path, tensor: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            segment = f"grad_fn {name_of(type(obj))}"
            segments = extend(before.segments, segment)
            return Path(segments, min(before.anchor, len(segments)), in_graph=True)
        if type(obj) is dict:
            return self._add(before, "", namespace=True)
        if (tensor.grad_fn is None or tensor.retains_grad) and tensor.grad is obj:
            return self._add(before, ".grad")
        if tensor._is_view() and tensor._base is obj:
            return self._add(before, "._base")
        if self._kind(type(obj)) == TENSOR and is_sparse(tensor):
            return self._add(before, "")  # its indices or values
        if issubclass(type(obj), dict):
            return self._add(before, "._hooks")
        return self._add(before, f".{_slot_name(tensor, obj)}")

    def _from_node(self, before: Path, parent: int, node: Any, obj: Any) -> Path:
        if self._kind(type(obj)) == NODE:
            hop = f"… -> {name_of(type(obj))}"
            last = before.segments[-1]
            kept = before.segments[:-1] if last.startswith("… -> ") else before.segments
            return Path(kept + (hop,), min(before.anchor, len(kept)), in_graph=True)
        label = self._node_labels(parent, node).get(id(obj))
        if label is not None:
            return self._add(before, label)
        if type(obj) is dict and obj is getattr(node, "__dict__", None):
            return Path(before.segments, before.anchor, namespace=True, in_graph=True)
        if getattr(node, "variable", None) is obj:
            return self._add(before, "variable")
        return self._add(before, "hooks")

    def _node_labels(self, parent: int, node: Any) -> dict[int, str]:
        labels = self._labels.get(parent)
        if labels is None:
            labels = {id(value): name for name, value in self._graph.reader.saved_values(node)}
            self._labels[parent] = labels
        return labels

    def _from_python(self, before: Path, parent: int, holder: Any, obj: Any) -> Path:
        kind = type(holder)
        if issubclass(kind, _CONTAINERS) and type(obj) is dict and obj is instance_dict(holder):
            return self._add(before, "", namespace=True)
        if issubclass(kind, dict):
            return self._from_dict(before, parent, holder, obj)
        if issubclass(kind, (list, deque, set, frozenset)):
            if before.segments[-1].startswith("ctx.") and kind is list and len(holder) <= 8:
                at = next((at for at, value in enumerate(holder) if value is obj), "*")
                return self._add(before, f"[{at}]")  # a context's list is a record: its places have meaning
            return self._add(before, "[*]")
        if issubclass(kind, tuple):
            return self._from_tuple(before, parent, holder, obj)
        if self._kind(kind) == FUTURE:
            return self._add(before, "Future.value()" if type(obj) is not dict else "", type(obj) is dict)
        if self._kind(kind) == SAVED:
            return self._add(before, "")
        if self._kind(kind) == PLACEHOLDER and type(obj) is not dict:
            return self._add(before, "checkpoint")
        if kind is types.FunctionType:
            return self._from_function(before, holder, obj)
        if kind is types.CellType:
            return self._add(before, "")
        if kind is _LRU:
            name = f"functools.lru_cache {_short(holder)}"
            if type(obj) is dict and obj is not getattr(holder, "__dict__", None):
                return Path((name,), 1)  # the unbounded cache's own dict
            return Path((name, "[*]"), 2)
        if name_of(kind) == "_lru_list_elem":
            return before if before.segments[-1] == "[*]" else self._add(before, "[*]")
        if kind is types.MethodType:
            return self._add(before, ".__self__" if obj is holder.__self__ else "")
        if kind is functools.partial:
            return self._add(before, f"functools.partial {_short(holder.func)}")
        if issubclass(kind, _GENERATORS):
            return self._from_generator(before, holder, obj)
        if kind is types.TracebackType:
            return self._add(before, "")
        if kind is types.FrameType:
            name = next((name for name, value in frame_locals(holder) if value is obj), "?")
            return self._add(before, f"frame {holder.f_code.co_name}(): {name}")
        return self._from_instance(before, holder, obj)

    def _from_dict(self, before: Path, parent: int, holder: dict[Any, Any], obj: Any) -> Path:
        labels = self._labels.get(parent)
        if labels is None:
            labels = dict_labels(holder, before.namespace)
            self._labels[parent] = labels
        label = labels.get(id(obj), "[*]")  # a key, or a value that came meanwhile
        if before.in_graph:
            return Path(before.segments + (f"ctx{label}",), before.anchor)
        if before.segments[-1].endswith(":"):  # keyword-only defaults
            return self._add(_without_last(before), f"{before.segments[-1]} {label[1:]}")
        if before.namespace and label[1:] in _MODULE_DICTS and self._belongs_to_module(parent):
            return self._add(before, "", namespace=True)
        return self._add(before, label)

    def _belongs_to_module(self, position: int) -> bool:
        above = self._graph.parents[position]
        return above >= 0 and self._kind(type(self._graph.objects[above])) == MODULE

    def _from_tuple(self, before: Path, parent: int, holder: tuple[Any, ...], obj: Any) -> Path:
        above = self._graph.parents[parent]
        if above >= 0 and before.segments[-1].endswith(":"):
            names = _tuple_names(self._graph.objects[above], holder)
            for name, value in zip(names, holder, strict=False):
                if value is obj:
                    return self._add(_without_last(before), f"{before.segments[-1]} {name}")
        fields = getattr(type(holder), "_fields", ())
        values = tuple(tuple.__iter__(holder))
        for at, value in enumerate(values):
            if value is obj:
                if type(fields) is tuple and at < len(fields):
                    return self._add(before, f".{fields[at]}")
                return self._add(before, f"[{at}]" if len(values) <= 8 else "[*]")
        return self._add(before, "[*]")

    def _from_function(self, before: Path, function: types.FunctionType, obj: Any) -> Path:
        if obj is function.__closure__:
            hook = "hook " if any("hook" in segment for segment in before.segments) else ""
            return self._add(before, f"closure of {hook}{_short(function)}:")
        if obj is function.__defaults__:
            return self._add(before, f"default argument of {_short(function)}:")
        if obj is function.__kwdefaults__:
            return self._add(before, f"default argument of {_short(function)}:", namespace=True)
        return self._add(before, "", namespace=type(obj) is dict)

    def _from_generator(self, before: Path, generator: Any, obj: Any) -> Path:
        frames = (getattr(generator, attribute, None) for attribute in ("gi_frame", "cr_frame", "ag_frame"))
        pairs = [pair for frame in frames if frame is not None for pair in frame_locals(frame)]
        name = next((name for name, value in pairs if value is obj), "?")
        return self._add(before, f"generator {generator.__name__}(): {name}")

    def _from_instance(self, before: Path, holder: Any, obj: Any) -> Path:
        if issubclass(type(holder), BaseException) and obj is read_member(_TRACEBACK, holder):
            return self._add(before, ".__traceback__")
        own = instance_dict(holder)
        if own is not None:
            if obj is own:
                return self._add(before, "", namespace=True)
            for name, value in list(own.items()):
                if value is obj:
                    if name in _MODULE_DICTS and self._kind(type(holder)) == MODULE:
                        return self._add(before, "", namespace=True)
                    return self._add(before, f".{name}")
        return self._add(before, f".{_slot_name(holder, obj)}")

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


def dict_labels(holder: dict[Any, Any], namespace: bool) -> dict[int, str]:
    """Text of every value's key, by the value's id.

    Keys that are no strings vary by nature (`[*]`). String keys that differ only in digits fold once there
    are enough of them, and a dict of many keys is a table, not a record.
    """
    patterns: Counter[str] = Counter()
    keys: list[tuple[str | None, int]] = []
    for key, value in list(dict.items(holder)):  # a subclass's own methods could do anything
        text = key if type(key) is str else None
        keys.append((text, id(value)))
        if text is not None:
            patterns[_DIGITS.sub("*", text)] += 1
    enough = 8 if namespace else 3
    many = not namespace and len(patterns) > _MAX_DICT_KEYS
    labels: dict[int, str] = {}
    for text, value_id in keys:
        if text is None or many:
            label = "[*]"
        else:
            pattern = _DIGITS.sub("*", text)
            if pattern != text and patterns[pattern] >= enough:
                text = pattern
            if namespace:
                label = "[*]" if text == "*" or text.isdigit() else f".{text}"
            else:
                label = "[*]" if text == "*" else f"[{text!r}]"
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
