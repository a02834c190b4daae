"""What IPython's `Out` keeps: every value that a cell has shown, for good."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Final

from memtriage.account.census import CensusView
from memtriage.integrations.notebook.words import cell_path
from memtriage.model.cell import OutputHold
from memtriage.model.paths import SegmentKind
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.tensors import storage_facts

_LATEST: Final = ("_", "__", "___")
_LEAST_HELD: Final = 64 << 10
"""Bytes from which an output is told of: a shown loss or metric is none."""
_HIDDEN: Final = ("get_ipython", "_oh", "Out", *_LATEST)


def behind_variables(namespace: MutableMapping[str, Any]) -> None:
    """Move IPython's own names behind the user's in the namespace, for a census.

    A holder path goes through the first name that leads to an object: what both `model` and `_` hold is to
    be called `model`.
    """
    for name in _HIDDEN:
        if name in namespace:
            namespace[name] = namespace.pop(name)


def output_holds(view: CensusView, outputs: Mapping[int, Any]) -> list[OutputHold]:
    """Outputs that keep storages which nothing else does, the largest first.

    Args:
        view: a census of this instant.
        outputs: IPython's `Out`.
    """
    graph = view.graph
    numbers = {id(value): number for number, value in outputs.items()}
    sizes: dict[int, dict[str, int]] = {}
    counted: set[tuple[str, int]] = set()
    for position in graph.tensors:
        facts = storage_facts(graph.objects[position])
        if facts is None or (facts.device, facts.address) in counted:
            continue
        counted.add((facts.device, facts.address))  # the first tensor of a storage has the shortest path
        number = None
        if cell_path(view.path(position))[0].kind is SegmentKind.OUTPUT:
            number = _above(graph, position, numbers)
        if number is not None:
            held = sizes.setdefault(number, {})
            held[facts.device] = held.get(facts.device, 0) + facts.nbytes
    holds = [
        OutputHold(number=number, bytes=held, kind=type(outputs[number]).__name__)
        for number, held in sizes.items()
        if sum(held.values()) >= _LEAST_HELD
    ]
    return sorted(holds, key=lambda hold: -sum(hold.bytes.values()))


def _above(graph: HeapGraph, position: int, numbers: Mapping[int, int]) -> int | None:
    """Return the output through which an object was reached."""
    at = position
    while at >= 0:
        number = numbers.get(id(graph.objects[at]))
        if number is not None:
            return number
        at = graph.parents[at]
    return None


def drop_outputs(shell: Any, numbers: Collection[int]) -> None:
    """Take outputs out of `Out`, out of `_7`, `_`, `__` and `___`, and out of the last cell's result."""
    namespace, hook = shell.user_ns, shell.displayhook
    gone = [namespace["_oh"].pop(number) for number in numbers if number in namespace["_oh"]]
    kept_too = (namespace, shell.user_ns_hidden, vars(hook))
    for number in numbers:
        for names in kept_too[:2]:
            names.pop(f"_{number}", None)
    for name in _LATEST:
        for names in kept_too:
            if any(names.get(name) is value for value in gone):
                names[name] = ""
    last = shell.last_execution_result
    if last is not None and any(last.result is value for value in gone):
        last.result = None
    gone.clear()
    gc.collect()
