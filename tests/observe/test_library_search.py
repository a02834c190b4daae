"""A census that leaves out what libraries have besides tensors says the same as one of everything."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from memtriage.account.census import Look
from memtriage.model.paths import HolderPath, in_words
from memtriage.observe.containers import ContainerLengths, KnownLengths, grown_containers, most_grown
from memtriage.observe.heap_graph import HeapGraph

SCRIPT = """
    import gc, json, functools, sys
    import torch
    from memtriage.account.census import Look
    from memtriage.model.paths import in_words

    class Holder: pass

    def through_the_graph():
        return (torch.ones(100, requires_grad=True) * 2).exp()

    def generator():
        local = torch.ones(200)
        yield 1
        yield 2

    gc.disable()
    model = torch.nn.Linear(10, 10)
    both = torch.ones(300)
    json.in_both = [both]
    json.by_variable = torch.ones(400)
    json.by_table = {"a": [torch.ones(500)], "b": [through_the_graph()]}
    json.JSONDecoder.by_class = torch.ones(600)
    json.cached = functools.lru_cache(lambda: torch.ones(700))
    json.cached()
    def add_closure():
        captured = torch.ones(800)
        json.by_closure = lambda: captured
    add_closure()
    json.module = torch.nn.Linear(20, 20)
    json.module(torch.ones(2, 20)).sum().backward()
    cycle = Holder(); cycle.me, cycle.value = cycle, torch.ones(900)
    del cycle

    def look(also):
        with Look(wanted=also) as view:
            graph = view.graph
            records = sorted(
                (record.nbytes, record.owner, in_words(record.path)) for record in view.census().storages
            )
            print(json.dumps([graph.all_libraries, len(graph.objects), records]))

    for value in generator():
        look(None if value == 1 else lambda objects: [])
"""


@pytest.fixture(scope="module")
def censuses() -> tuple[Any, Any]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole, short = map(json.loads, done.stdout.splitlines())
    return whole, short


def test_every_tensor_has_the_same_path_and_owner(censuses: tuple[Any, Any]) -> None:
    (all_libraries, _, whole), (no_libraries, _, short) = censuses
    assert (all_libraries, no_libraries) == (True, False)
    assert short == whole
    paths = [path for _, _, path in short]
    assert any("json.by_table['b'][*] -> grad_fn" in path for path in paths)
    assert any("garbage" in path for path in paths)
    assert any("generator" in path for path in paths)


def test_most_of_the_heap_is_left_out(censuses: tuple[Any, Any]) -> None:
    (_, whole, _), (_, short, _) = censuses
    assert short < 0.1 * whole


def look_for(program: Any, containers: Any) -> tuple[bool, list[str]]:
    """Whether all libraries were walked, and the paths of the containers that grew, `containers` asked."""

    def look() -> tuple[bool, list[str]]:
        with Look(wanted=containers) as view:
            graph: HeapGraph = view.graph
            containers.now.add(graph.objects)
            grown = grown_containers(graph, earlier)
            return graph.all_libraries, [in_words(view.path(container.position)) for container in grown]

    earlier = containers.earlier
    return program["walk"](look)


class Containers:
    """Notes the containers of libraries at one walk, and asks for those that grew at the next."""

    def __init__(self, earlier: KnownLengths) -> None:
        self.earlier = earlier
        self.now = ContainerLengths()

    def __call__(self, objects: Iterable[Any]) -> list[Any]:
        return most_grown(self.now.add(objects), self.earlier)


def test_a_table_of_a_library_that_grows_is_found(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"first": ("entry", [1])}
    monkeypatch.setattr(json, "table_of_a_test", {"entries": table}, raising=False)
    program.run("def walk(look):\n    return look()")
    first = Containers(KnownLengths({}, {}))
    look_for(program, first)
    table["second"] = ("entry", [2])
    del table
    all_libraries, grown = look_for(program, Containers(first.now.by_address()))
    assert not all_libraries
    assert "json.table_of_a_test['entries']" in grown


TRACE: ContextVar[list[Any]] = ContextVar("TRACE")


def test_a_wanted_container_of_tensors_is_named_and_not_kept_alive() -> None:
    TRACE.set([{"output": torch.ones(1013)}])
    output = weakref.ref(TRACE.get()[0]["output"])
    gc.collect()
    gc.disable()
    try:
        with Look(wanted=lambda objects: [TRACE.get()]) as view:
            assert not view.graph.all_libraries
            paths = [in_words(record.path) for record in view.census().storages if record.nbytes == 4052]
        TRACE.get().clear()
        assert output() is None
    finally:
        gc.enable()
    assert paths == ["context variable TRACE[*]['output']"]


@pytest.mark.parametrize("make", [lambda leaf: leaf * 2, lambda leaf: (leaf * 2).grad_fn])
def test_many_tensors_and_nodes_of_a_library_are_found(
    make: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = [make(torch.ones(1013, requires_grad=True)) for _ in range(300)]
    for _ in range(100):
        kept = [kept]
    monkeypatch.setattr(json, "kept", kept, raising=False)
    del kept
    with Look(wanted=lambda objects: []) as view:
        assert not view.graph.all_libraries
        found = [in_words(record.path) for record in view.census().storages if record.nbytes == 4052]
    assert sum(path.startswith("json.kept[*]") for path in found) >= 300


def test_many_garbage_cycles_are_garbage() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me, self.value = self, torch.ones(1013)

    gc.collect()
    gc.disable()
    try:
        for _ in range(300):
            Holder()
        with Look(wanted=lambda objects: []) as view:
            assert not view.graph.all_libraries
            found = [in_words(record.path) for record in view.census().storages if record.nbytes == 4052]
    finally:
        gc.enable()
    assert found == ["garbage cycle of Holder.value"] * 300


def test_what_a_library_keeps_too_is_not_said_to_be_retained(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.run("import torch\nkept = [torch.ones(256) for _ in range(4)]\nalone = [torch.ones(256)]")
    monkeypatch.setattr(json, "also_kept", program["kept"][:1], raising=False)

    def details(also: Any) -> dict[str, Any]:
        with Look(wanted=also) as view:
            keys = {in_words(group.anchor): group.key for group in view.census().groups}
            wanted = [keys["train.kept[*]"], keys["train.alone[*]"]]
            found = view.details(wanted, lambda obj: None)
            return {in_words(anchor): detail for (_, anchor), detail in found.items()}

    short, whole = details(lambda objects: []), details(None)
    assert (short["train.kept[*]"].retained, short["train.kept[*]"].elsewhere) == (None, True)
    assert (short["train.alone[*]"].retained, short["train.alone[*]"].elsewhere) == (1024, False)
    assert (whole["train.kept[*]"].retained, whole["train.kept[*]"].elsewhere) == (3072, False)
    held: list[HolderPath] = whole["train.kept[*]"].also_held_by
    assert "json.also_kept[*]" in map(in_words, held)
