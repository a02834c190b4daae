"""Facts about a holder from the objects around it: their classes, their source files, their graph."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from memtriage.model.paths import HolderPath
from memtriage.observe.classes import bases_of, instance_dict, module_of, name_of, qualified_name_of
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import MODULE, NODE, OPTIMIZER, TENSOR, FrameLocals
from memtriage.observe.origin import CodeOrigin
from memtriage.observe.store_statements import Store
from memtriage.observe.stores import making_line, storing_line
from memtriage.observe.tensors import plain

_NODES_ASKED = 200
_NODES_FOLLOWED = 2_000
_SEVERAL = 3
"""With this many modules or optimizers, they are collected. Fewer may belong together: two players, a model
and its average."""
_CODE = {
    id(types.GeneratorType): "gi_code",
    id(types.CoroutineType): "cr_code",
    id(types.AsyncGeneratorType): "ag_code",
}
_PLAIN_MODULES = ("builtins", "collections", "types", "functools", "typing", "abc")


@dataclass(frozen=True, slots=True)
class HolderFacts:
    """Facts about the objects from a root to a holder.

    Attributes:
        classes: `module.Name` of their classes and base classes, the holder's first.
        files: source files of the program that define their functions, classes and modules.
        in_optimizer: one of these objects is an optimizer.
    """

    classes: list[str]
    files: list[str]
    in_optimizer: bool


def holder_facts(graph: HeapGraph, holder: int) -> HolderFacts:
    """Collect facts about a holder and the objects that lead to it."""
    classes: dict[str, None] = {}
    files: dict[str, None] = {}
    in_optimizer = False
    at = holder
    while at >= 0:
        obj = graph.objects[at]
        in_optimizer = in_optimizer or graph.kind(at) == OPTIMIZER
        for klass in bases_of(type(obj)):
            if module_of(klass) not in _PLAIN_MODULES:
                classes[f"{module_of(klass)}.{qualified_name_of(klass)}"] = None
        files.update(dict.fromkeys(_files_of(obj)))
        if graph.parents[at] < 0 and graph.root_names[at]:
            if issubclass(type(obj), type):  # a class that keeps something for its objects
                classes[graph.root_names[at]] = None
            files.update(dict.fromkeys(_file_of_module(_module_of_root(graph.root_names[at], obj))))
        at = graph.parents[at]
    origin = CodeOrigin()
    own_files = [file for file in files if origin.is_user_file(file)]
    return HolderFacts(list(classes), own_files, in_optimizer)


def store_of(anchor: HolderPath, files: Sequence[str], allocated: str | None = None) -> Store | None:
    """Return the statement that stores into a holder, or the call that makes what a library keeps.

    Args:
        anchor, allocated: as for `storing_line`.
        files: source files that the holder leads to; without any, those of the whole program count.
    """
    return storing_line(anchor, files, allocated) if files else making_line(anchor, program_files())


def program_files() -> list[str]:
    """Return the source files of the program's own modules."""
    origin = CodeOrigin()
    files = dict.fromkeys(file for name in list(sys.modules) for file in _file_of_module(name))
    return [file for file in files if origin.is_user_file(file)]


def collects(graph: HeapGraph, positions: Iterable[int]) -> Literal["module", "optimizer"] | None:
    """Return whether storages of one path belong to whole modules or optimizers that are collected.

    They do if they belong to several of these that no other module or optimizer contains.
    """
    outermost = {at: kind for position in positions for at, kind in _outermost(graph, position)}
    kinds = set(outermost.values())
    if len(outermost) < _SEVERAL or len(kinds) > 1:
        return None
    return "module" if MODULE in kinds else "optimizer"


def _outermost(graph: HeapGraph, at: int) -> list[tuple[int, int]]:
    """Return the module or optimizer nearest to the root on the way to an object, with its kind, if any."""
    outermost = []
    while at >= 0:
        kind = graph.kind(at)
        if kind in (MODULE, OPTIMIZER):
            outermost = [(at, kind)]
        at = graph.parents[at]
    return outermost


def differentiates(graph: HeapGraph, nodes: Iterable[int]) -> bool:
    """Whether a gradient of these nodes is needed: one has its own graph, or an input requires gradients."""
    for position in nodes:
        node = graph.objects[position]
        if name_of(type(node)).count("Backward") > 1:  # `MulBackwardBackward0`
            return True
        leaf = getattr(node, "variable", None)
        if leaf is not None and "Parameter" not in map(name_of, bases_of(type(leaf))):
            return True
    return False


def has_no_graph(tensor: Any) -> bool:
    """Whether a tensor has no autograd graph."""
    return plain(tensor).grad_fn is None


def leads_to(graph: HeapGraph, position: int, nodes: Sequence[int]) -> bool:
    """Whether most of the graph of the tensor at a position is these nodes, and it has most of them."""
    node_ids = {id(graph.objects[at]) for at in nodes}
    waiting = [plain(graph.objects[position]).grad_fn]
    seen = {id(waiting[0])}
    for node in waiting:
        if len(waiting) > _NODES_FOLLOWED:
            break
        for after, _ in node.next_functions:
            if after is not None and id(after) not in seen:
                seen.add(id(after))
                waiting.append(after)
    shared = sum(id(node) in node_ids for node in waiting)
    return 2 * shared > min(len(node_ids), _NODES_FOLLOWED) and 2 * shared > len(waiting)


def backward_ran(graph: HeapGraph, nodes: Iterable[int]) -> bool:
    """Whether more than half of the nodes that save something have freed what they saved."""
    filled = freed = 0
    every = (graph.objects[position] for position in nodes)
    saving = (node for node in every if graph.reader.saved_attributes(type(node)))
    for node in islice(saving, _NODES_ASKED):
        if next(graph.reader.saved_values(node), None) is None:
            freed += 1
        else:
            filled += 1
    return freed > filled


def packs_itself(graph: HeapGraph, positions: Sequence[int]) -> bool:
    """Whether a tensor's node saves its own output tensor, which only a pack hook can cause.

    Without hooks, a node that saves its output keeps another tensor with the same storage and no node.
    """
    return any(_in_its_own_cycle(graph, position) for position in positions)


def _in_its_own_cycle(graph: HeapGraph, at: int) -> bool:
    while at >= 0 and graph.kind(at) in (NODE, TENSOR):
        obj = graph.objects[at]
        node = obj if graph.kind(at) == NODE else plain(obj).grad_fn
        if node is not None and _saves_what_it_made(graph, node):
            return True
        at = graph.parents[at]
    return False


def _saves_what_it_made(graph: HeapGraph, node: Any) -> bool:
    values = (value for _, _, value in graph.reader.saved_values(node))
    return any(plain(value).grad_fn is node for value in values if graph.kinds[type(value)] == TENSOR)


def _files_of(obj: Any) -> list[str]:
    if type(obj) is FrameLocals:
        return [obj.code.co_filename]
    if type(obj) is types.FunctionType:
        return [obj.__code__.co_filename]
    if type(obj) is types.MethodType:
        return _files_of(obj.__func__)
    code = _CODE.get(id(type(obj)))
    if code is not None:
        return [getattr(obj, code).co_filename]
    if issubclass(type(obj), type):
        return _file_of_module(module_of(obj))
    return [file for klass in bases_of(type(obj)) for file in _file_of_module(module_of(klass))]


def _module_of_root(name: str, obj: Any) -> str:
    """Return the module that a root belongs to; for a namespace its own `__name__`."""
    own = obj.get("__name__") if type(obj) is dict else None
    return own if type(own) is str else name.rpartition(".")[0]


def _file_of_module(name: str) -> list[str]:
    namespace = instance_dict(sys.modules.get(name)) or {}
    file = namespace.get("__file__")
    return [file] if type(file) is str else []
