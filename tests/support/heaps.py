"""Small walked heaps of real objects, put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import MODULE, NODE, OPTIMIZER, TENSOR


def heap_of(*chains: list[Any], root: str = "train", native: Sequence[list[Any]] = ()) -> HeapGraph:
    """A heap in which each object of a chain was reached through the one before it.

    Args:
        chains: those that begin with the same objects share these; the first object of a chain is a root.
        root: name of these roots.
        native: further chains, whose roots only C++ or the interpreter holds.
    """
    graph = HeapGraph()
    lists = {TENSOR: graph.tensors, NODE: graph.nodes, MODULE: graph.modules, OPTIMIZER: graph.optimizers}
    for chain in (*chains, *native):
        above = -1
        for obj in chain:
            at = graph.index.get(id(obj))
            if at is None:
                at = graph.index[id(obj)] = len(graph.objects)
                graph.objects.append(obj)
                graph.parents.append(above)
                lists.get(graph.kinds.classify(obj), []).append(at)
                if above < 0:
                    graph.root_names[at] = root if any(chain is each for each in chains) else ""
            above = at
    graph.first_garbage = len(graph.objects)
    graph.index[id(graph.objects)] = -1  # as a walk does with what is its own
    return graph
