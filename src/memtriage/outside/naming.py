"""What names another process's objects."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterable, Sequence
from typing import Final

from memtriage.account.naming import LRU, FunctionParts, ObjectNamer
from memtriage.account.path_rules import Hop, item_segment
from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.observe.kinds import LOCALS, NODE, TENSOR
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.objects import Frame

_NAMES: Final[dict[type, str]] = {
    BaseException: "builtins.BaseException",
    LRU: "functools._lru_cache_wrapper",
    functools.partial: "functools.partial",
    threading.local: "_thread._local",
}
"""Classes that are known by their names: they are at other addresses in each process."""
_BOUND_METHODS: Final = 8
"""Bound methods of bound methods that are followed to the function's name. Torn memory may have a circle."""


class RemoteNamer(ObjectNamer):
    """Names objects of one graph of another process by their addresses."""

    def __init__(self, graph: RemoteGraph) -> None:
        super().__init__(graph)
        self._graph = graph
        self._heap = graph.heap
        self._torch = graph.torch
        self._memory = graph.heap.memory
        self._layout = graph.heap.layout

    def _identity(self, position: int) -> int:
        address, kind = self._graph.objects[position], self._graph.kinds[position]
        if kind == TENSOR:
            return self._torch.wrapper(address) or address
        return self._torch.node_wrapper(address) or address if kind == NODE else address

    def _native(self, position: int) -> int:
        return self._graph.objects[position]

    def _content(self, position: int) -> int:
        own = self._identity(position)
        return self._at(own, self._layout.cell_value) if self._is_exactly(position, types.CellType) else own

    def _at(self, address: int, offset: int) -> int:
        return self._memory.word(address + offset)

    def _class_name(self, position: int) -> tuple[str, str] | None:
        klass = self._graph.type_at(position)
        return None if klass is None else (klass.module, klass.name)

    def _is_a(self, position: int, *classes: type) -> bool:
        klass = self._graph.type_at(position)
        if klass is None:
            return False
        return self._heap.is_a(klass, *classes) or any(_NAMES.get(each) in klass.bases for each in classes)

    def _is_exactly(self, position: int, *classes: type) -> bool:
        klass = self._graph.type_at(position)
        return klass is not None and any(
            self._heap.is_exactly(klass, each) or _NAMES.get(each) == klass.bases[0] for each in classes
        )

    def _own_dict(self, position: int) -> int:
        klass = self._graph.type_at(position)
        return 0 if klass is None else self._heap.instance_dict(self._identity(position), klass)

    def _attributes(self, position: int) -> list[tuple[str, int]]:
        klass = self._graph.type_at(position)
        return [] if klass is None else self._heap.attributes(self._identity(position), klass)

    def _slot(self, parent: int, position: int) -> str | None:
        klass = self._graph.type_at(parent)
        holder, value = self._identity(parent), self._identity(position)
        return None if klass is None else self._heap.slot_name(holder, klass, value)

    def _keys_of(self, position: int) -> Iterable[tuple[str | None, int]]:
        items = self._heap.dict_items(self._graph.objects[position])
        return ((self._heap.text(key), value) for key, value in items)

    def _items(self, position: int) -> list[int]:
        address = self._graph.objects[position]
        is_list = self._is_a(position, list)
        return self._heap.list_items(address) if is_list else self._heap.tuple_items(address)

    def _fields(self, position: int) -> Sequence[str]:
        klass = self._graph.type_at(position)
        for base in () if klass is None or self._heap.is_exactly(klass, tuple) else klass.lineage:
            if fields := self._heap.dict_value(self._at(base, self._layout.type_dict), "_fields"):
                return self._texts(fields)
        return ()

    def _texts(self, values: int) -> list[str]:
        return [self._heap.text(item) or "?" for item in self._heap.tuple_items(values)]

    def _function(self, position: int) -> FunctionParts:
        address, layout = self._graph.objects[position], self._layout
        code = self._at(address, layout.function_code)
        names = self._texts(self._at(code, layout.code_value_names))
        return FunctionParts(
            closure=self._at(address, layout.function_closure),
            defaults=self._at(address, layout.function_defaults),
            keyword_defaults=self._at(address, layout.function_keyword_defaults),
            free=names[len(names) - self._memory.half(code + layout.code_free) :],
            arguments=names[: self._memory.half(code + layout.code_arguments)],
        )

    def _callable(self, position: int) -> str:
        return self._short(self._graph.objects[position])

    def _called(self, position: int) -> str:
        return self._short(self._at(self._graph.objects[position], self._layout.partial_function))

    def _bound_to(self, position: int) -> int:
        return self._at(self._graph.objects[position], self._layout.method_self)

    def _call(self, position: int) -> tuple[str, list[tuple[str, int]]]:
        address, layout = self._graph.objects[position], self._layout
        frame: Frame | None
        if self._graph.kinds[position] == LOCALS:
            frame = self._graph.frames[address].frame
        elif self._is_exactly(position, types.FrameType):
            frame = self._heap.frame(self._at(address, layout.frame_object_frame))
        else:
            frame = self._heap.frame(self._heap.generator_frame(address))
            name = self._heap.text(self._at(address, layout.generator_name)) or "?"
            return name, frame.variables if frame else []
        return (frame.name, frame.variables) if frame else ("?", [])

    def _thread(self, position: int) -> str | None:
        return self._graph.frames[self._graph.objects[position]].thread

    def _traceback(self, position: int) -> int:
        return self._at(self._graph.objects[position], self._layout.exception_traceback)

    def _gradient(self, position: int) -> int:
        return self._torch.gradient(self._graph.objects[position])

    def _base(self, position: int) -> int:
        return self._torch.base(self._graph.objects[position])

    def _node_name(self, position: int) -> str:
        return self._torch.node_name(self._graph.objects[position])

    def _leaf(self, position: int) -> int:
        return self._torch.leaf(self._graph.objects[position])

    def _has_parts(self, position: int) -> bool:
        return False  # what a sparse tensor consists of is not read

    def _context_variable(self, parent: int, position: int) -> str | None:
        return None  # nor are contexts

    def _saved_labels(self, position: int) -> dict[int, Hop]:
        labels: dict[int, Hop] = {}
        for saved in self._torch.saved(self._graph.objects[position]):
            name, klass = PathSegment(SegmentKind.SAVED, saved.name), self._heap.type_of(saved.packed)
            value = saved.tensor or saved.packed
            if not saved.tensor and klass is not None and "torch.Tensor" in klass.bases:
                value = self._torch.tensor(saved.packed) or saved.packed
            labels[value] = (name,) if saved.place is None else (name, item_segment(saved.place))
        return labels

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
        elif _NAMES[LRU] in klass.bases:
            name = heap.text(heap.attribute(function, klass, "__qualname__"))
        elif heap.is_exactly(klass, types.BuiltinFunctionType):
            name = heap.c_text(memory.word(memory.word(function + layout.builtin_definition)))
        return (name or klass.name).rsplit("<locals>.", 1)[-1]
