"""Variables that got a new value while the old one was alive: found by two looks, before a cell and after."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from memtriage.account.census import CensusView, Look
from memtriage.integrations.notebook import variables as variables_module
from memtriage.integrations.notebook.variables import Variables
from memtriage.model.blocks import DeviceCounters
from memtriage.model.cell import Rebinding
from memtriage.model.census import Census, StorageRecord
from memtriage.observe import cuda
from memtriage.observe.tensors import storage_facts
from support.paths import of_module

MIB = 1 << 20
OTHERS: set[int] = set()
"""Addresses of the storages of other tests."""


def mib(size: float) -> torch.Tensor:
    return torch.zeros(round(size * MIB), dtype=torch.uint8)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, only_new_objects: None) -> Any:
    """The module in which a notebook's cells run."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    with Look() as view:
        OTHERS.update(storage.address for storage in view.census().storages)
    yield module
    OTHERS.clear()
    vars(module).clear()


def without_others(view: CensusView) -> Any:
    """What a look sees of this test: other tests may keep tensors that outweigh its own."""
    census = view.census()
    own = [storage for storage in census.storages if storage.address not in OTHERS]
    return SimpleNamespace(
        graph=view.graph, path=view.path, census=lambda: msgspec.structs.replace(census, storages=own)
    )


def rebound(cell: Callable[[], None]) -> dict[str, Rebinding]:
    """What a cell has rebound, by variable."""
    gc.collect()
    with Look() as view:
        variables = Variables(view)
    variables.begin()
    cell()
    gc.collect()
    with Look() as view:
        found = variables.rebindings(without_others(view))
    assert [each.old for each in found] == sorted((each.old for each in found), reverse=True)
    return {each.name: each for each in found}


def test_old_and_new_values_at_once_are_found(main: Any) -> None:
    main.model = {"weight": mib(8), "bias": mib(2)}
    main.held = mib(6)
    main.also, main.more, main.most = {"x": main.held}, [main.held], (main.held,)
    main.and_more = {0: main.held}
    main.first_freed, main.unchanged, main.moved = mib(5), mib(5), mib(5)
    main.shrunk, main.gone = mib(7), mib(5)

    def cell() -> None:
        del main.first_freed
        main.first_freed = mib(5)
        main.model = {"weight": mib(8), "bias": mib(3)}
        main.held = mib(7)
        main.elsewhere, main.moved = main.moved, mib(5)
        main.shrunk = mib(0.5)
        del main.gone

    found = rebound(cell)
    assert set(found) == {"model", "held", "moved"}
    model, held, moved = found["model"], found["held"], found["moved"]
    assert (model.device, model.old, model.new, model.still_held_by) == ("cpu", 10 * MIB, 11 * MIB, [])
    assert model.extra is not None and 8 * MIB < model.extra <= 14 * MIB
    assert (held.old, held.new, held.extra) == (6 * MIB, 7 * MIB, None)
    first, *others = held.still_held_by
    assert first == "also['x']"
    assert len(set(others)) == 2 and set(others) <= {"more", "most", "and_more"}
    assert (moved.old, moved.new, moved.still_held_by) == (5 * MIB, 5 * MIB, ["elsewhere"])


def test_only_the_notebook_s_variables_of_some_size_are_followed(
    main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper: Any = ModuleType("helper")
    helper.__file__ = "/home/user/helper.py"
    monkeypatch.setitem(sys.modules, "helper", helper)
    helper.cache = mib(2)
    main.least, main.under, main._own, main.Out = mib(1), mib(1 - 1 / MIB), mib(2), [mib(2)]
    main.number = 1

    def cell() -> None:
        for name, size in (("least", 1), ("under", 1), ("_own", 2)):
            setattr(main, name, mib(size))
        main.Out = [mib(2)]
        helper.cache = mib(2)

    assert set(rebound(cell)) == {"least"}


def test_what_is_small_beside_all_tensors_is_left_out(main: Any) -> None:
    main.small, main.large, main.other = mib(3), mib(5), mib(40)

    def cell() -> None:
        main.small, main.large = mib(3), mib(5)

    assert set(rebound(cell)) == {"large"}


def test_a_value_that_overlaps_little_needs_no_more_memory(main: Any) -> None:
    """The old value goes when most of the new one is yet to come, or has less than half of its bytes."""
    main.late, main.early = mib(8), mib(8)

    def cell() -> None:
        main.first = mib(3)
        del main.late
        main.late = mib(8)
        main.second = mib(2)  # with the first more than half
        main.third = mib(8)
        del main.early
        main.early = mib(8)

    assert set(rebound(cell)) == {"early"}


@pytest.mark.parametrize(
    ("before", "at_once", "extra"),
    [(2 * MIB, 9 * MIB, 7 * MIB), (2 * MIB, 5 * MIB, None), (None, 9 * MIB, None)],
)
def test_on_a_gpu_the_allocator_s_counter_tells(
    monkeypatch: pytest.MonkeyPatch, before: int | None, at_once: int, extra: int | None
) -> None:
    """The value of `x` is alive on `cuda:10` while the new one is made, or all but gone."""
    path = of_module("__main__", "x")
    record = StorageRecord(device="cuda:10", address=64, nbytes=8 * MIB, owner="variable", path=path)
    tensors = [torch.zeros(2)]
    found = Census(storages=[record], groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)
    view: Any = SimpleNamespace(
        graph=SimpleNamespace(tensors=[0], objects=tensors), census=lambda: found, path=lambda position: path
    )
    facts = storage_facts(tensors[0])
    assert facts is not None
    on_gpu = replace(facts, device="cuda:10", nbytes=8 * MIB)
    monkeypatch.setattr(variables_module, "storage_facts", lambda tensor: on_gpu)
    allocated = before
    monkeypatch.setattr(
        cuda, "counters", lambda device: DeviceCounters(allocated=allocated if device == 10 else 0)
    )
    variables = Variables(view)
    variables.begin()
    allocated = at_once
    tensors.clear()
    assert [(each.device, each.extra) for each in variables.rebindings(view)] == (
        [] if extra is None else [("cuda:10", extra)]
    )
