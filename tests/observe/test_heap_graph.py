"""What a walk has reached, how it was walked, and what it has not reached."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from memtriage.observe.heap_graph import HeapGraph


def test_what_was_not_walked_is_the_rest_of_what_the_collector_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, fenced = ModuleType("passing"), [[1]]
    vars(module)["held"] = fenced
    monkeypatch.setitem(sys.modules, "passing", module)
    reached, missed = [[1]], [[2]]
    graph = HeapGraph()
    graph.index = {id(reached): 0, id(fenced): -1, id(vars(module)): -1}
    found = {id(each) for each in graph.not_walked()}
    assert {id(missed), id(vars(module))} <= found
    assert not {id(reached), id(fenced)} & found
