"""Dominators of a flow graph, and the bytes that each node retains.

Semi-NCA (Georgiadis, "Linear-Time Algorithms for Dominators and Related Problems", 2005): as simple as the
iterative algorithm, and fast on the deep, narrow graphs that autograd makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def immediate_dominators(successors: Sequence[Sequence[int]], root: int) -> list[int]:
    """Return the immediate dominator of every node; -1 for the root and for nodes it does not reach.

    Args:
        successors: for each node the nodes it refers to.
        root: the node all paths start from.
    """
    size = len(successors)
    number = [-1] * size  # depth-first preorder
    order: list[int] = []
    parent = [-1] * size
    stack = [(root, -1)]
    predecessors: list[list[int]] = [[] for _ in range(size)]
    while stack:
        node, above = stack.pop()
        if number[node] >= 0:
            continue
        number[node] = len(order)
        parent[node] = above
        order.append(node)
        for after in successors[node]:
            predecessors[after].append(node)
            if number[after] < 0:
                stack.append((after, node))
    semi = number[:]
    label = list(range(size))
    ancestor = [-1] * size
    dominator = [-1] * size

    def evaluate(node: int) -> int:
        path = []
        at = node
        while ancestor[at] >= 0 and ancestor[ancestor[at]] >= 0:
            path.append(at)
            at = ancestor[at]
        for below in reversed(path):
            up = ancestor[below]
            if semi[label[up]] < semi[label[below]]:
                label[below] = label[up]
            ancestor[below] = ancestor[up]
        return label[node]

    for node in reversed(order[1:]):
        best = semi[node]
        for before in predecessors[node]:
            if number[before] < 0:
                continue
            candidate = semi[evaluate(before)] if ancestor[before] >= 0 else number[before]
            if candidate < best:
                best = candidate
        semi[node] = best
        ancestor[node] = parent[node]
        dominator[node] = parent[node]
    for node in order[1:]:
        at = dominator[node]
        while number[at] > semi[node]:
            at = dominator[at]
        dominator[node] = at
    dominator[root] = -1
    return dominator


def dominated(dominator: Sequence[int], by: Iterable[int], nodes: Iterable[int]) -> list[int]:
    """Return those of `nodes` that one of `by` dominates, or is.

    Args:
        dominator: from `immediate_dominators`; -1 if a node has none.
    """
    is_dominated = {-1: False} | dict.fromkeys(by, True)
    below = []
    for node in nodes:
        passed, at = [], node
        while at not in is_dominated:
            passed.append(at)
            at = dominator[at]
        is_dominated.update(dict.fromkeys(passed, is_dominated[at]))
        if is_dominated[node]:
            below.append(node)
    return below
