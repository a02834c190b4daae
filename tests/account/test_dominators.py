"""Dominators against their definition: d dominates n when removing d cuts every path from the root to n."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.account.dominators import immediate_dominators


def reach(successors: list[list[int]], root: int, without: int = -1) -> set[int]:
    if root == without:
        return set()
    seen, stack = {root}, [root]
    while stack:
        for after in successors[stack.pop()]:
            if after != without and after not in seen:
                seen.add(after)
                stack.append(after)
    return seen


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(1, 12))
    node = st.integers(0, size - 1)
    return [draw(st.lists(node, max_size=4)) for _ in range(size)]


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_matches_the_definition(successors: list[list[int]]) -> None:
    dominator = immediate_dominators(successors, 0)
    reachable = reach(successors, 0)
    for node in range(len(successors)):
        if node == 0 or node not in reachable:
            assert dominator[node] == -1
            continue
        strict = {d for d in reachable if d != node and node not in reach(successors, 0, without=d)}
        assert dominator[node] in strict
        # the immediate one is dominated by all the others
        for other in strict - {dominator[node]}:
            assert dominator[node] not in reach(successors, 0, without=other)


def test_a_long_chain_is_no_recursion() -> None:
    size = 50_000
    successors = [[n + 1] for n in range(size - 1)] + [[]]
    dominator = immediate_dominators(successors, 0)
    assert dominator == [-1, *range(size - 1)]
