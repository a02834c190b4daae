"""Every entry of the catalogue against stand-ins of its library: found, measured, cleared, filled again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import memtriage
from memtriage.catalogue.catalogue import BUILT_IN, read_holders
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import KINDS, ClearPolicy, Condition, HolderOutcome, HolderReading
from support.holder_standins import NBYTES, STANDINS, WITHOUT_STORAGES, Stage, Standin, tensor

pytestmark = pytest.mark.usefixtures("only_new_objects")

ENTRIES = {holder.name: holder for holder in BUILT_IN}
CASES = [
    pytest.param(ENTRIES[name], standin, id=f"{name}-{number}")
    for name, standins in STANDINS.items()
    for number, standin in enumerate(standins)
]
CLEARABLE = [case for case in CASES if case.values[0].policy != "never"]
KEPT = [case for case in CASES if case.values[0].policy == "never"]
FORBIDDEN = [
    pytest.param(*case.values, condition, id=f"{case.id}-{condition}")
    for case in CLEARABLE
    for condition in case.values[0].forbidden
]


def read(holder: Holder) -> HolderReading:
    """What the entry holds, beyond what other tests of this process left behind."""
    with Scene() as scene:
        holders = read_holders(scene, [holder])
    return holders[0] if holders else HolderReading(name=holder.name)


def clear(holder: Holder, **options: Any) -> HolderOutcome:
    report = memtriage.clear_caches([holder.name], **options)
    (outcome,) = report.entries
    return outcome


def test_every_entry_has_a_stand_in_and_a_name_of_its_own() -> None:
    assert [holder.name for holder in BUILT_IN] == list(dict.fromkeys(holder.name for holder in BUILT_IN))
    assert set(STANDINS) == set(ENTRIES)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda one: one.name)
def test_an_entry_says_what_it_must(entry: Holder) -> None:
    assert entry.symbol and entry.holds and entry.library
    assert entry.kind in KINDS and entry.policy in get_args(ClearPolicy)
    assert set(entry.forbidden) <= set(get_args(Condition))
    assert entry.why if entry.policy != "automatic" else entry.clears and entry.refills and not entry.why
    words = [getattr(entry, field.name) for field in dataclasses.fields(entry)]
    assert all("  " not in word and word.isascii() for word in words if isinstance(word, str))


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda one: one.name)
def test_device_tensors_are_not_cleared_while_graphs_exist(entry: Holder) -> None:
    on_device = (
        entry.kind != "host" and entry.name != "torch.cudagraph_trees" and entry.name != "torch.dynamo"
    )
    assert "graphs" in entry.forbidden or not on_device


@pytest.mark.parametrize(("entry", "standin"), CASES)
def test_it_is_found_and_measured(entry: Holder, standin: Standin, stage: Stage) -> None:
    fill = standin(stage)
    before = read(entry)
    fill()
    after = read(entry)
    assert after.failed is None
    assert len(after.places) > len(before.places)
    grown = after.total - before.total
    assert grown == (0 if entry.name in WITHOUT_STORAGES else NBYTES)


@pytest.mark.parametrize(("entry", "standin"), CLEARABLE)
def test_it_is_cleared_and_fills_again(entry: Holder, standin: Standin, stage: Stage) -> None:
    fill = standin(stage)
    before = read(entry)
    fill()
    outcome = clear(entry)
    assert (outcome.status, outcome.reason) == ("cleared", None)
    wanted = 0 if entry.name in WITHOUT_STORAGES else NBYTES
    assert sum(outcome.freed.values()) >= wanted
    assert sum(outcome.before.values()) - sum(outcome.after.values()) >= wanted
    emptied = read(entry)
    assert emptied.total <= before.total
    assert len(emptied.places) <= len(before.places)
    fill()
    again = read(entry)
    assert again.total - emptied.total == wanted
    assert clear(entry).status == "cleared"


@pytest.mark.parametrize(("entry", "standin"), KEPT)
def test_what_must_stay_is_skipped_with_its_reason(entry: Holder, standin: Standin, stage: Stage) -> None:
    fill = standin(stage)
    fill()
    before = read(entry)
    outcome = clear(entry)
    assert outcome.status == "skipped" and outcome.freed == {}
    assert outcome.reason is not None and outcome.reason.startswith(entry.why)
    assert read(entry).total == before.total
    assert outcome.before == before.nbytes


class _Captured:
    """A CUDA graph that was captured."""

    def pool(self) -> tuple[int, int]:
        return (1, 0)


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    def now(condition: str) -> object:
        if condition == "graphs":
            monkeypatch.setattr(torch._C, "_CUDAGraph", _Captured, raising=False)
            return _Captured()
        weight = torch.ones(3, requires_grad=True)
        return (weight * weight).sum()  # saved its factors, and nobody ran backward

    return now


@pytest.mark.parametrize(("entry", "standin", "condition"), FORBIDDEN)
def test_it_is_not_cleared_while_that_is_forbidden(
    entry: Holder, standin: Standin, condition: Condition, stage: Stage, forbid: Callable[[str], object]
) -> None:
    standin(stage)()
    held = read(entry).total
    obstacle = forbid(condition)
    outcome = clear(entry)
    assert outcome.status == "skipped" and outcome.freed == {}
    assert outcome.reason is not None
    assert ("replayed" if condition == "graphs" else "pending") in outcome.reason
    assert read(entry).total == held
    del obstacle
    assert clear(entry).status == "cleared"


def test_nothing_at_all_is_cleared_during_a_capture(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for standins in STANDINS.values():
        standins[0](stage)()
    monkeypatch.setattr("memtriage.observe.cuda.capturing", lambda: True)
    report = memtriage.clear_caches()
    assert {entry.status for entry in report.entries} == {"skipped"}
    assert all("capture" in (entry.reason or "") for entry in report.entries)
    assert report.collected is None and report.cache.startswith("not emptied")
    assert read(ENTRIES["te.causal_mask"]).total == NBYTES


def test_a_backward_that_is_under_way_forbids(stage: Stage) -> None:
    STANDINS["te.fp8_workspaces"][0](stage)()
    seen: list[HolderOutcome] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(clear(ENTRIES["te.fp8_workspaces"], between_steps=True))

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
    assert (seen[0].status, seen[0].reason) == ("skipped", "a backward pass is under way")


def test_the_caller_may_say_that_what_is_pending_never_runs(stage: Stage) -> None:
    STANDINS["te.fp8_workspaces"][0](stage)()
    weight = torch.ones(3, requires_grad=True)
    kept = (weight * weight).sum()
    assert clear(ENTRIES["te.fp8_workspaces"]).status == "skipped"
    assert clear(ENTRIES["te.fp8_workspaces"], between_steps=True).status == "cleared"
    assert kept.grad_fn is not None


def test_a_graph_that_only_a_dispatcher_keeps_is_no_obstacle(stage: Stage) -> None:
    STANDINS["megatron.dispatcher"][0](stage)
    moe = stage.kept[-1]
    weight = torch.ones(1000, requires_grad=True)
    moe.token_dispatcher.probs = weight * weight
    outcome = clear(ENTRIES["megatron.dispatcher"])
    assert (outcome.status, moe.token_dispatcher.probs) == ("cleared", None)


def test_a_library_is_never_imported_to_look_for_it(stage: Stage) -> None:
    before = set(sys.modules)
    with Scene() as scene:
        read_holders(scene, BUILT_IN)
    assert set(sys.modules) == before


def test_a_tensor_in_two_places_counts_once(stage: Stage) -> None:
    shared = tensor()
    cache = {"a": shared, "b": [shared.view(-1)]}
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    assert read(ENTRIES["te.causal_mask"]).total == NBYTES
