"""What names the objects of this process."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from memtriage.account.naming import LRU, FunctionParts, ObjectNamer
from memtriage.account.path_rules import Hop, item_segment
from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.observe.classes import (
    addresses,
    attributes_of,
    bases_of,
    exactly,
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
from memtriage.observe.kinds import FrameLocals
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain
from memtriage.process.stdlib import gc

_TRACEBACK = vars(BaseException)["__traceback__"]
_CONTEXT_TABLES = frozenset(("hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"))
"""Tables of a `contextvars.Context`. No object of the program leads to the current context."""
_NAMED = addresses(types.FunctionType, types.BuiltinFunctionType, LRU)


class PathNamer(ObjectNamer):
    """Names objects of one heap graph by their ids."""

    def __init__(self, graph: HeapGraph) -> None:
        super().__init__(graph)
        self._graph = graph

    def _identity(self, position: int) -> int:
        return id(self._graph.objects[position])

    _native = _identity

    def _content(self, position: int) -> int:
        obj = self._graph.objects[position]
        return id(next(iter(gc.get_referents(obj)), obj) if type(obj) is types.CellType else obj)

    def _class_name(self, position: int) -> tuple[str, str]:
        kind = type(self._graph.objects[position])
        return module_of(kind), name_of(kind)

    def _is_a(self, position: int, *classes: type) -> bool:
        return issubclass(type(self._graph.objects[position]), classes)

    def _is_exactly(self, position: int, *classes: type) -> bool:
        return exactly(self._graph.objects[position], *classes)

    def _own_dict(self, position: int) -> int:
        own = instance_dict(self._graph.objects[position])
        return 0 if own is None else id(own)

    def _attributes(self, position: int) -> Iterator[tuple[str, int]]:
        for name, value in list((instance_dict(self._graph.objects[position]) or {}).items()):
            if type(name) is str:
                yield name, id(value)

    def _slot(self, parent: int, position: int) -> str | None:
        holder, obj = self._graph.objects[parent], self._graph.objects[position]
        for klass in bases_of(type(holder)):
            for name, member in list(attributes_of(klass).items()):
                if type(member) is types.MemberDescriptorType and read_member(member, holder) is obj:
                    return name
        return None

    def _keys_of(self, position: int) -> Iterator[tuple[str | None, int]]:
        for key, value in list(dict.items(self._graph.objects[position])):  # a subclass's could do anything
            yield key if type(key) is str else None, id(value)

    def _items(self, position: int) -> list[int]:
        holder = self._graph.objects[position]
        if type(holder) is list:
            return list(map(id, holder))
        values = tuple_items(holder)
        return list(map(id, values)) if len(values) == tuple.__len__(holder) else []

    def _fields(self, position: int) -> Sequence[object]:
        fields = stored(self._graph.objects[position], "_fields")
        return fields if type(fields) is tuple else ()

    def _function(self, position: int) -> FunctionParts:
        function = self._graph.objects[position]
        code = function.__code__
        return FunctionParts(
            id(function.__closure__),
            id(function.__defaults__),
            id(function.__kwdefaults__),
            code.co_freevars,
            code.co_varnames[: code.co_argcount],
        )

    def _callable(self, position: int) -> str:
        return _short(self._graph.objects[position])

    def _called(self, position: int) -> str:
        return _short(self._graph.objects[position].func)

    def _bound_to(self, position: int) -> int:
        return id(self._graph.objects[position].__self__)

    def _call(self, position: int) -> tuple[str, Iterable[tuple[str, int]]]:
        obj = self._graph.objects[position]
        if type(obj) is FrameLocals:
            return obj.code.co_name, zip(obj.names, map(id, obj.values), strict=True)
        if type(obj) is types.FrameType:
            name, frames = obj.f_code.co_name, [obj]
        else:
            found = (getattr(obj, attribute, None) for attribute in ("gi_frame", "cr_frame", "ag_frame"))
            name, frames = obj.__name__, [frame for frame in found if frame is not None]
        return name, [(name, id(value)) for frame in frames for name, value in frame_locals(frame)]

    def _thread(self, position: int) -> str | None:
        thread: str | None = self._graph.objects[position].thread
        return thread

    def _traceback(self, position: int) -> int:
        return id(read_member(_TRACEBACK, self._graph.objects[position]))

    def _gradient(self, position: int) -> int:
        own = plain(self._graph.objects[position])
        return id(own.grad) if own.grad_fn is None or own.retains_grad else 0

    def _base(self, position: int) -> int:
        own = plain(self._graph.objects[position])
        return id(own._base) if own._is_view() else 0

    def _node_name(self, position: int) -> str:
        return name_of(type(self._graph.objects[position]))

    def _leaf(self, position: int) -> int:
        return id(getattr(self._graph.objects[position], "variable", None))

    def _saved_labels(self, position: int) -> dict[int, Hop]:
        labels: dict[int, Hop] = {}
        for name, place, value in self._graph.reader.saved_values(self._graph.objects[position]):
            saved = PathSegment(SegmentKind.SAVED, name)
            labels[id(value)] = (saved,) if place is None else (saved, item_segment(place))
        return labels

    def _has_parts(self, position: int) -> bool:
        return is_sparse(self._graph.objects[position])

    def _context_variable(self, parent: int, position: int) -> str | None:
        table, value = self._graph.objects[parent], self._graph.objects[position]
        if name_of(type(table)) not in _CONTEXT_TABLES:
            return None
        held = gc.get_referents(table)  # for each variable its value, then the variable
        names = (key.name for before, key in pairwise(held) if before is value and type(key) is ContextVar)
        return next(names, None)


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
