"""Holder paths of another process's objects, by the rules of `memtriage.account.path_rules`."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Sequence

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
from memtriage.observe.kinds import ARRAY, KLASS, LOCALS, MODULE, NODE, PLACEHOLDER, TENSOR
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.objects import RemoteType

_LRU = "functools._lru_cache_wrapper"
_BOUND_METHODS = 8
"""Bound methods of bound methods that are followed to the function's name. Torn memory may have a circle."""


class RemoteNamer(FoldedPaths):
    """Names objects of one graph of another process."""

    def __init__(self, graph: RemoteGraph) -> None:
        super().__init__(graph.parents)
        self._graph = graph
        self._heap = graph.heap
        self._torch = graph.torch
        self._memory = graph.heap.memory
        self._layout = graph.heap.layout
        self._keys: dict[int, dict[int, PathSegment]] = {}
        self._labels: dict[int, dict[int, Hop]] = {}

    # --- roots ---

    def _root(self, position: int) -> Path:
        graph = self._graph
        name = graph.root_names.get(position)
        if name is not None:
            if graph.kinds[position] == KLASS:
                return root_path(PathSegment(SegmentKind.CLASS, name))
            return root_path(PathSegment(SegmentKind.MODULE, name), namespace=True)
        if position in graph.not_searched:
            return root_path(PathSegment(SegmentKind.NOT_SEARCHED))
        if graph.kinds[position] == LOCALS:
            running = graph.frames[graph.objects[position]]
            frame = PathSegment(SegmentKind.FRAME, running.frame.name)
            if running.thread:
                return root_path(PathSegment(SegmentKind.THREAD, running.thread), frame)
            return root_path(frame)
        if position >= graph.first_garbage:
            return root_path(PathSegment(SegmentKind.GARBAGE_CYCLE, self._garbage_name(position)))
        return self._unrooted(position)

    def _unrooted(self, position: int) -> Path:
        graph = self._graph
        address, kind, klass = graph.objects[position], graph.kinds[position], graph.type_at(position)
        if kind == NODE:
            return self._graph_root(self._torch.node_name(address))
        name = "Tensor" if klass is None else klass.name
        if kind == TENSOR:
            return root_path(PathSegment(SegmentKind.NATIVE, name))
        if klass is not None and self._heap.is_a(klass, *GENERATORS):
            return root_path(PathSegment(SegmentKind.GENERATOR, self._generator_name(address)))
        return root_path(PathSegment(SegmentKind.UNSEEN, name))

    def _garbage_name(self, position: int) -> str:
        graph = self._graph
        within = range(position, min(position + CYCLE_SEARCHED, len(graph.objects)))
        types = ((graph.type_at(at), graph.kinds[at] == TENSOR) for at in within)
        met = (
            (klass.module, klass.name, is_tensor)
            for klass, is_tensor in types
            if klass is not None and not klass.is_class
        )
        first = graph.type_at(position)
        return telling_name(met, "Tensor" if first is None else first.name)

    # --- steps ---

    def _from(self, parent: int, position: int) -> Path:
        graph = self._graph
        before, kind = self._known[parent], graph.kinds[parent]
        if kind == TENSOR:
            return self._from_tensor(before, parent, position)
        if kind == NODE:
            return self._from_node(before, parent, position)
        if kind == KLASS:
            return self._add(before, namespace=self._is_dict(position))
        if kind == LOCALS:
            return self._from_frame(before, parent, position)
        return self._from_python(before, parent, position)

    def _object(self, position: int) -> int:
        """The address of the Python object at a position: of a tensor or node its Python part."""
        address, kind = self._graph.objects[position], self._graph.kinds[position]
        if kind == TENSOR:
            return self._torch.wrapper(address) or address
        if kind == NODE:
            return self._torch.node_wrapper(address) or address
        return address

    def _is_dict(self, position: int) -> bool:
        klass = self._graph.type_at(position)
        return klass is not None and self._heap.is_exactly(klass, dict)

    def _from_frame(self, before: Path, parent: int, position: int) -> Path:
        variables = self._graph.frames[self._graph.objects[parent]].frame.variables
        wanted = self._object(position)
        return root_path(*before.hops[0], PathSegment(SegmentKind.VARIABLE, _variable_of(wanted, variables)))

    def _from_tensor(self, before: Path, parent: int, position: int) -> Path:
        graph, torch = self._graph, self._torch
        tensor, obj, kind = graph.objects[parent], graph.objects[position], graph.kinds[position]
        if kind == NODE:
            return self._into_graph(before, torch.node_name(obj))
        if self._is_dict(position):
            return self._add(before, namespace=True)
        if torch.gradient(tensor) == obj:
            return self._add(before, PathSegment(SegmentKind.GRADIENT, "grad"))
        if torch.base(tensor) == obj:
            return self._add(before, attribute_segment("_base"))
        klass = graph.type_at(position)
        if klass is not None and self._heap.is_a(klass, dict):
            return self._add(before, PathSegment(SegmentKind.HOOKS, "_hooks"))
        return self._from_instance(before, parent, position)

    def _from_node(self, before: Path, parent: int, position: int) -> Path:
        graph, torch = self._graph, self._torch
        node, obj, kind = graph.objects[parent], graph.objects[position], graph.kinds[position]
        if kind == NODE:
            return self._along_graph(before, torch.node_name(obj))
        label = self._node_labels(parent, node).get(obj)
        if label is not None:
            return self._add(before, *label)
        klass, context = graph.type_at(parent), torch.node_wrapper(node)
        if klass is not None and self._heap.instance_dict(context, klass) == obj:
            return self._context_dict(before)
        if klass is not None:  # since Python 3.14 a context may have attributes without a dict
            value = self._object(position)
            attributes = self._heap.inline_values(context, klass)
            name = next((name for name, held in attributes if held == value), None)
            if name is not None:
                return self._context(before, PathSegment(SegmentKind.CONTEXT, name))
        if torch.leaf(node) == obj:
            return self._add(before, PathSegment(SegmentKind.LEAF, "variable"))
        return self._add(before, PathSegment(SegmentKind.NODE_HOOKS, "hooks"))

    def _node_labels(self, parent: int, node: int) -> dict[int, Hop]:
        labels = self._labels.get(parent)
        if labels is None:
            labels = self._labels[parent] = {}
            for saved in self._torch.saved(node):
                name = PathSegment(SegmentKind.SAVED, saved.name)
                value = saved.tensor or self._torch_or_self(saved.packed)
                labels[value] = (name,) if saved.place is None else (name, item_segment(saved.place))
        return labels

    def _torch_or_self(self, address: int) -> int:
        klass = self._heap.type_of(address)
        if klass is not None and "torch.Tensor" in klass.bases:
            return self._torch.tensor(address) or address
        return address

    def _from_python(self, before: Path, parent: int, position: int) -> Path:
        graph, heap, layout = self._graph, self._heap, self._layout
        holder, obj = graph.objects[parent], self._object(position)
        klass = graph.type_at(parent)
        if klass is None:
            return self._add(before)
        if heap.is_a(klass, *CONTAINERS) and heap.instance_dict(holder, klass) == obj:
            return self._add(before, namespace=True)
        if heap.is_a(klass, dict):
            return self._from_dict(before, parent, position)
        if heap.is_a(klass, list, deque, set, frozenset):
            if heap.is_exactly(klass, list) and self._is_of_context(before):
                items = heap.list_items(holder)
                return self._place(before, items.index(obj) if obj in items else None, len(items))
            return self._add(before, ANY_ITEM)
        if heap.is_a(klass, tuple):
            return self._from_tuple(before, parent, klass, obj)
        if graph.kinds[parent] == PLACEHOLDER and not self._is_dict(position):
            return self._add(before, PathSegment(SegmentKind.CHECKPOINT, "checkpoint"))
        if heap.is_exactly(klass, types.FunctionType):
            return self._from_function(before, holder, obj, is_dict=self._is_dict(position))
        if heap.is_exactly(klass, types.CellType) or heap.is_exactly(klass, types.TracebackType):
            return self._add(before)
        if _LRU in klass.bases:
            is_own_dict = self._is_dict(position) and heap.instance_dict(holder, klass) != obj
            return self._cached(self._short(holder), is_own_dict=is_own_dict)
        if heap.is_exactly(klass, types.MethodType):
            bound = self._memory.word(holder + layout.method_self) == obj
            return self._add(before, *((attribute_segment("__self__"),) if bound else ()))
        if klass.bases[0] == "functools.partial":
            called = self._short(self._memory.word(holder + layout.partial_function))
            return self._add(before, PathSegment(SegmentKind.PARTIAL, called))
        if heap.is_a(klass, *GENERATORS):
            frame = heap.frame(heap.generator_frame(holder))
            variable = _variable_of(obj, frame.variables if frame else [])
            return self._running(before, SegmentKind.GENERATOR, self._generator_name(holder), variable)
        if heap.is_exactly(klass, types.FrameType):
            frame = heap.frame(self._memory.word(holder + layout.frame_object_frame))
            variable = _variable_of(obj, frame.variables if frame else [])
            return self._running(before, SegmentKind.FRAME, frame.name if frame else "?", variable)
        if self._is_thread_local(parent) and self._is_dict(position):
            return self._add(before)  # what all threads keep there, each in a dict of its own
        if graph.kinds[parent] == ARRAY:
            return self._add(before, attribute_segment(f"<{self._type_name(position)}>"))
        return self._from_instance(before, parent, position)

    def _is_thread_local(self, position: int) -> bool:
        klass = self._graph.type_at(position) if position >= 0 else None
        return klass is not None and "_thread._local" in klass.bases

    def _from_dict(self, before: Path, parent: int, position: int) -> Path:
        if self._is_thread_local(self._graph.parents[parent]) and self._is_dict(position):
            return self._add(before, namespace=True)
        label = self._key_labels(parent, before.namespace).get(self._object(position), ANY_ITEM)
        return self._entry(before, parent, label)

    def _key_labels(self, parent: int, namespace: bool) -> dict[int, PathSegment]:
        labels = self._keys.get(parent)
        if labels is None:
            items = self._heap.dict_items(self._graph.objects[parent])
            labels = key_labels([(self._heap.text(key), value) for key, value in items], namespace)
            self._keys[parent] = labels
        return labels

    def _is_module(self, position: int) -> bool:
        return self._graph.kinds[position] == MODULE

    def _from_tuple(self, before: Path, parent: int, klass: RemoteType, obj: int) -> Path:
        graph, heap = self._graph, self._heap
        holder, above = graph.objects[parent], graph.parents[parent]
        values = heap.tuple_items(holder)
        if above >= 0 and self._is_of_function(before):
            names = self._tuple_names(graph.objects[above], holder, len(values))
            for name, value in zip(names, values, strict=False):
                if value == obj:
                    return self._variable_of_function(before, name)
        if obj not in values:
            return self._add(before, ANY_ITEM)
        at = values.index(obj)
        fields = [] if heap.is_exactly(klass, tuple) else self._fields(klass)
        if at < len(fields):
            return self._add(before, attribute_segment(fields[at]))
        return self._place(before, at, len(values))

    def _fields(self, klass: RemoteType) -> list[str]:
        """Names of a named tuple's places."""
        for base in klass.lineage:
            fields = self._heap.dict_value(self._memory.word(base + self._layout.type_dict), "_fields")
            if fields:
                return [name for item in self._heap.tuple_items(fields) if (name := self._heap.text(item))]
        return []

    def _tuple_names(self, function: int, values: int, count: int) -> list[str]:
        """Variable names of a function's closure or positional defaults."""
        memory, layout = self._memory, self._layout
        klass = self._heap.type_of(function)
        if klass is None or not self._heap.is_exactly(klass, types.FunctionType):
            return []
        code = memory.word(function + layout.function_code)
        names = [
            self._heap.text(name) or "?"
            for name in self._heap.tuple_items(memory.word(code + layout.code_value_names))
        ]
        if memory.word(function + layout.function_closure) == values:
            return names[len(names) - memory.half(code + layout.code_free) :]
        if memory.word(function + layout.function_defaults) == values:
            arguments = memory.half(code + layout.code_arguments)
            return names[max(0, arguments - count) : arguments]
        return []

    def _from_function(self, before: Path, function: int, obj: int, *, is_dict: bool) -> Path:
        memory, layout = self._memory, self._layout
        if memory.word(function + layout.function_closure) == obj:
            return self._closure(before, self._short(function))
        by_keyword = memory.word(function + layout.function_keyword_defaults) == obj
        if by_keyword or memory.word(function + layout.function_defaults) == obj:
            return self._defaults(before, self._short(function), by_keyword=by_keyword)
        return self._add(before, namespace=is_dict)

    def _generator_name(self, generator: int) -> str:
        return self._heap.text(self._memory.word(generator + self._layout.generator_name)) or "?"

    def _from_instance(self, before: Path, parent: int, position: int) -> Path:
        graph, heap = self._graph, self._heap
        holder, obj, klass = self._object(parent), self._object(position), graph.type_at(parent)
        if klass is None:
            return self._add(before, attribute_segment(f"<{self._type_name(position)}>"))
        traceback = self._memory.word(holder + self._layout.exception_traceback)
        if "builtins.BaseException" in klass.bases and traceback == obj:
            return self._add(before, PathSegment(SegmentKind.TRACEBACK, "__traceback__"))
        if heap.instance_dict(holder, klass) == obj:
            return self._add(before, namespace=True)
        for name, value in heap.attributes(holder, klass):
            if value == obj:
                return self._attribute(before, parent, name)
        slot = heap.slot_name(holder, klass, obj)
        return self._add(before, attribute_segment(slot or f"<{self._type_name(position)}>"))

    def _type_name(self, position: int) -> str:
        klass = self._graph.type_at(position)
        return "?" if klass is None else klass.name

    def _short(self, function: int) -> str:
        """Name of a function or class; of any other callable its type's name."""
        memory, layout, heap = self._memory, self._layout, self._heap
        klass = heap.type_of(function)
        for _ in range(_BOUND_METHODS):  # a bound method, of a bound method, …
            if klass is None or not heap.is_exactly(klass, types.MethodType):
                break
            function = memory.word(function + layout.method_function)
            klass = heap.type_of(function)
        if klass is None:
            return "?"
        name: str | None = klass.name
        if klass.is_class and (named := heap.class_at(function)) is not None:
            name = named.qualified_name
        elif heap.is_exactly(klass, types.FunctionType):
            name = heap.text(memory.word(function + layout.function_qualified_name))
        elif _LRU in klass.bases:
            name = heap.text(heap.attribute(function, klass, "__qualname__"))
        elif heap.is_exactly(klass, types.BuiltinFunctionType):
            name = heap.c_text(memory.word(memory.word(function + layout.builtin_definition)))
        return (name or klass.name).rsplit("<locals>.", 1)[-1]


def _variable_of(obj: int, pairs: Sequence[tuple[str, int]]) -> str:
    return next((name for name, value in pairs if value == obj), "?")
