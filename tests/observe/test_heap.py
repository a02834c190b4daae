"""The walk: order of roots, what is left to C++ and to garbage, and that it switches everything back."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import types
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memtriage.observe import walker
from memtriage.observe.heap import HeapWalk
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import (
    MODULE,
    NODE,
    TENSOR,
    FrameLocals,
)
from memtriage.observe.library_search import WantedContainers
from memtriage.observe.walker import CensusBudget


class Marked:
    """Something to look for in a walk."""


def position(graph: HeapGraph, kind: type) -> int:
    (found,) = [at for at, obj in enumerate(graph.objects) if type(obj) is kind]
    return found


def root_of(graph: HeapGraph, at: int) -> int:
    while graph.parents[at] >= 0:
        at = graph.parents[at]
    return at


def test_graph_is_closed_and_has_each_object_once() -> None:
    kept = torch.ones(4, requires_grad=True).exp()
    with HeapWalk() as graph:
        size = len(graph.objects)
        assert len(graph.parents) == size
        assert len({id(obj) for obj in graph.objects}) == size
        assert all(-1 <= above < at for at, above in enumerate(graph.parents))
        assert all(graph.index[id(obj)] == at for at, obj in enumerate(graph.objects))
        at = graph.index[id(kept)]
        assert at in graph.tensors
        assert graph.kind(at) == TENSOR
        node = graph.index[id(kept.grad_fn)]
        assert node in graph.nodes
        assert graph.parents[node] == at
        assert any(child is kept.grad_fn for child in graph.referents(at))
        assert all(graph.kind(each) == NODE for each in graph.nodes)
        assert all(graph.kind(module) == MODULE for module in graph.modules)
        assert graph.first_own <= graph.first_unrooted <= graph.first_garbage <= size
        assert not gc.isenabled()
    assert gc.isenabled()
    assert graph.objects == graph.parents == graph.tensors == graph.nodes == []
    assert graph.index == graph.root_names == {}


def test_own_objects_are_no_part_of_the_program() -> None:
    # In an interpreter of its own: the tests' modules hold memtriage's objects, and are a program.
    script = """
        import memtriage.treat.parking.api, memtriage.treat.phase  # both keep objects
        from memtriage.observe.classes import module_of
        from memtriage.observe.heap import HeapWalk
        from memtriage.observe.kinds import FrameLocals

        with HeapWalk() as graph:
            kinds = {type(held) for held in graph.objects[:graph.first_own]} - {FrameLocals}
            print([kind.__name__ for kind in kinds if module_of(kind).startswith("memtriage")])
            names = [name for at, name in graph.root_names.items() if at < graph.first_own]
            print([name for name in names if "memtriage" in name])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_roots_are_user_modules_then_frames_then_libraries(program: Any) -> None:
    program.run("class Marked: pass\ndef walk(look):\n    mine = Marked()\n    return look(mine)")

    def look(mine: Any) -> tuple[int, int, int]:
        with HeapWalk() as graph:
            names = {name: at for at, name in graph.root_names.items() if name}
            return names["train"], root_of(graph, graph.index[id(mine)]), names["json"]

    user, frame, library = program["walk"](look)
    assert user < frame < library


def test_a_local_variable_is_reached_through_its_frame() -> None:
    mine = Marked()
    with HeapWalk() as graph:
        at = position(graph, Marked)
        root = graph.objects[root_of(graph, at)]
        assert (root.code, root.thread) == (sys._getframe().f_code, None)
        assert dict(zip(root.names, root.values, strict=True))["mine"] is mine


def test_ended_frames_are_roots_when_given() -> None:
    def failing() -> None:
        mine = Marked()
        raise ValueError(id(mine))

    try:
        failing()
    except ValueError as error:
        trace = error.__traceback__
        assert trace is not None and trace.tb_next is not None
        frame = trace.tb_next.tb_frame
        error.__traceback__ = None
        del trace
    with HeapWalk([frame]) as graph:
        assert graph.objects[root_of(graph, position(graph, Marked))].code.co_name == "failing"


def test_garbage_is_told_from_what_cpp_holds() -> None:
    class Cycle(Marked):
        def __init__(self) -> None:
            self.me = self

    class Held(Marked):
        pass

    future: Any = torch.futures.Future()
    future.set_result(Held())  # C++ holds the value
    futures = weakref.ref(future)
    gc.disable()
    try:
        Cycle()
        with HeapWalk() as graph:
            cycle, held = position(graph, Cycle), position(graph, Held)
            assert cycle >= graph.first_garbage
            assert graph.objects[graph.parents[held]] is futures()
            assert held < graph.first_own
    finally:
        gc.enable()


def test_weak_references_hold_nothing() -> None:
    class Thing(Marked):
        pass

    thing = Thing()
    holders = {"weak": weakref.ref(thing), "proxy": weakref.proxy(thing)}
    with HeapWalk() as graph:
        above = type(graph.objects[graph.parents[position(graph, Thing)]])
        assert above is FrameLocals  # not the dict
    del thing
    assert holders["weak"]() is None
    with HeapWalk() as graph:
        assert not [obj for obj in graph.objects if type(obj) is Thing]


def test_optimizers_wait_for_the_model(program: Any) -> None:
    program.run(
        "import torch\nadam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(9))])\n"
        "class Model:\n    deep = {'a': {'b': [adam.param_groups[0]['params'][0]]}}\nmodel = Model()"
    )
    parameter = program["adam"].param_groups[0]["params"][0]
    holder = program["model"].deep["a"]["b"]
    with HeapWalk() as graph:
        optimizer = graph.index[id(program["adam"])]
        assert optimizer in graph.optimizers
        assert graph.objects[graph.parents[graph.index[id(parameter)]]] is holder


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with HeapWalk():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_failure_inside_the_walk_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no room for the list")

    calls: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(walker, "tracked_objects", fail)
    with pytest.raises(MemoryError):
        HeapWalk().__enter__()
    assert gc.isenabled()
    with Mode():
        torch.ones(1)
    assert len(calls) == 1


def test_modules_and_classes_of_a_function_die_with_it() -> None:
    def step() -> list[weakref.ref[Any]]:
        module = types.ModuleType("passing")
        module.__dict__["Local"] = type("Local", (), {})
        sys.modules["passing"] = module
        with HeapWalk():
            pass
        del sys.modules["passing"]
        return [weakref.ref(module), weakref.ref(module.__dict__["Local"])]

    gone = step()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("wanted", [None, lambda objects: []])
def test_a_walk_beyond_its_budget_is_partial_and_says_so(wanted: WantedContainers | None) -> None:
    many = [[number] for number in range(20_000)]
    kept = [torch.ones(8) for _ in range(3)]
    with HeapWalk(budget=CensusBudget(objects=2_000), wanted=wanted) as graph:
        assert graph.cut is not None and "the most that a census takes" in graph.cut
        reached = {id(graph.objects[position]) for position in graph.tensors}
        assert {id(tensor) for tensor in kept} <= reached
        assert graph.first_garbage == len(graph.objects)
    with HeapWalk(budget=CensusBudget(seconds=0.0), wanted=wanted) as graph:
        assert graph.cut is not None and "the longest time" in graph.cut
    del many


def test_more_objects_of_libraries_than_the_budget_are_not_searched() -> None:
    """To list all references between them would take much memory."""
    half = CensusBudget(objects=len(gc.get_objects()) // 2)
    with HeapWalk(budget=half, wanted=lambda objects: []) as graph:
        assert graph.all_libraries and graph.cut is not None
    with HeapWalk(wanted=lambda objects: []) as graph:
        assert not graph.all_libraries and graph.cut is None


def test_very_many_entries_do_not_hide_what_else_there_is() -> None:
    many = [[number] for number in range(60_000)]
    deep = {"one": {"two": {"three": [torch.ones(8)]}}}
    budget = CensusBudget(objects=len(gc.get_objects()), wide=50_000, wide_seconds=0.0)
    with HeapWalk(budget=budget) as graph:
        assert graph.cut is not None
        position = graph.index[id(deep["one"]["two"]["three"][0])]
        assert graph.parents[position] >= 0  # reached through its holders, not entered as a remainder
    del many
