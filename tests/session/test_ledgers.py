"""Ledgers for the record, taken with a census."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from memtriage.account.census import CensusView
from memtriage.model.census import Census, StorageRecord
from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import Reading
from memtriage.session import ledgers
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.marks import MarkPoint
from memtriage.session.record import SessionRecord


def census(nodes: int = 0, devices: tuple[str, ...] = ()) -> Census:
    storages = [StorageRecord(device=device, address=0, nbytes=8, owner="variable") for device in devices]
    return Census(
        storages=storages,
        groups=[],
        objects=9,
        nodes=nodes,
        seconds=0.1,
        parameters=0,
    )


def mark(name: str, *readings: Reading) -> MarkPoint:
    return MarkPoint(name, TrainingPosition(), list(readings))


def noted(tmp_path: Path, taken: Census) -> list[str]:
    """The notes in the record after ledgers were taken twice."""
    record = SessionRecord(tmp_path / "rank.jsonl")
    progress = SimpleNamespace(position=TrainingPosition(step=1), elapsed=lambda: 1.0)
    keeper = LedgerKeeper(None, cast(Any, progress), record, Mock(), Mock(), Mock())
    view = cast(CensusView, SimpleNamespace(census=lambda: taken))
    keeper.take(view)
    keeper.take(view)
    record.close()
    assert keeper.taken
    lines = map(json.loads, (tmp_path / "rank.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["t"] == "note"]


@pytest.mark.parametrize(("nodes", "notes"), [(3, ["not shown"]), (0, [])])
def test_what_torch_does_not_show_of_graphs_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, notes: list[str]
) -> None:
    monkeypatch.setattr(ledgers, "unread_saved_tensors", lambda: "not shown")
    assert noted(tmp_path, census(nodes)) == notes


@pytest.mark.parametrize(
    ("devices", "named"),
    [(("xpu:1", "xpu:0", "cpu"), "xpu:0, xpu:1"), (("mps:0",), "mps:0"), (("cpu", "cuda:0"), None)],
)
def test_devices_that_are_not_counted_are_said_once(
    tmp_path: Path, devices: tuple[str, ...], named: str | None
) -> None:
    notes = noted(tmp_path, census(devices=devices))
    assert [note.partition(" is not counted")[0] for note in notes] == (
        [] if named is None else [f"device memory of {named}"]
    )


def test_a_torch_for_rocm_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    (note,) = noted(tmp_path, census(devices=("cuda:0",)))
    assert note.startswith("this torch is built for ROCm, where memtriage was never tried")


def test_the_next_ledgers_are_due_when_these_cost_a_five_hundredth(tmp_path: Path) -> None:
    elapsed = 1.0
    progress = SimpleNamespace(position=TrainingPosition(step=1), elapsed=lambda: elapsed)
    keeper = LedgerKeeper(None, cast(Any, progress), Mock(), Mock(), Mock(), Mock())
    assert not keeper.taken and not keeper.is_due()
    keeper.take(cast(CensusView, SimpleNamespace(census=census)))
    assert keeper.taken and not keeper.is_due()
    elapsed = 1.0 + 0.1 / 0.002 - 1
    assert not keeper.is_due()
    elapsed = 1.0 + 60 / 0.002
    assert keeper.is_due()


def test_what_was_outside_at_the_first_mark_is_kept_by_device() -> None:
    keeper = LedgerKeeper(None, Mock(), Mock(), Mock(), Mock(), Mock())
    keeper.at_mark(mark("step", Reading("cuda:12", outside=7), Reading("cpu", outside=9), Reading("cuda:0")))
    keeper.at_mark(mark("step", Reading("cuda:12", outside=8), Reading("cuda:0", outside=3)))
    assert keeper.baselines == {12: 7, 0: 3}


@pytest.mark.parametrize(
    ("at_end", "seconds", "outdated"),
    [(900, 0.1, True), (500, 0.1, False), (None, 0.1, False), (900, 11.0, False)],
)
def test_ledgers_are_outdated_if_the_memory_of_later_steps_is_still_there(
    at_end: int | None, seconds: float, outdated: bool
) -> None:
    progress = SimpleNamespace(position=TrainingPosition(step=1), elapsed=lambda: 100.0)
    keeper = LedgerKeeper(None, cast(Any, progress), Mock(), Mock(), Mock(), Mock())
    taken = census()
    taken.seconds = seconds
    keeper.at_mark(mark("step", Reading("cuda:0", allocated=10_000)))
    keeper.take(cast(CensusView, SimpleNamespace(census=lambda: taken)))
    keeper.at_mark(mark("end", Reading("cuda:0", allocated=10_000)))
    assert not keeper.outdated, "no step since"
    keeper.at_mark(mark("step", Reading("cuda:0", allocated=1000)))
    keeper.at_mark(mark("end", Reading("cuda:0", allocated=at_end)))
    assert keeper.outdated == outdated


@pytest.mark.parametrize(
    ("before", "left", "step"),
    [
        (["variable"] * 6, ["variable"] * 5, 9),
        (["variable"] * 6, ["variable"], 4),
        (["parameter", *["gradient"] * 5], ["parameter"], 9),  # as after zero_grad()
        (["parameter", "optimizer state", "gradient"], ["gradient"], 4),
    ],
)
def test_ledgers_stay_those_of_the_program_if_its_functions_have_returned(
    before: list[str], left: list[str], step: int
) -> None:
    def view(owners: list[str]) -> CensusView:
        taken = census(devices=("cpu",) * len(owners))
        for storage, owner in zip(taken.storages, owners, strict=True):
            storage.owner = owner
        return cast(CensusView, SimpleNamespace(census=lambda: taken))

    progress = SimpleNamespace(position=TrainingPosition(step=4), elapsed=lambda: 1.0)
    keeper = LedgerKeeper(None, cast(Any, progress), Mock(), Mock(), Mock(), Mock())
    keeper.take(view(before))
    progress.position = TrainingPosition(step=9)
    keeper.at_mark(mark("end"))
    keeper.take(view(left))
    assert {ledger.step for ledger in keeper.last} == {step}


def test_a_partial_census_is_noted(tmp_path: Path) -> None:
    partial = census()
    partial.partial = "searched 5 of more than 9 objects"
    assert noted(tmp_path, partial) == [
        "a census is partial: searched 5 of more than 9 objects; some holders are unknown"
    ]
