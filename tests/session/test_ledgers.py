"""Ledgers for the record, taken with a census."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from memtriage.account.census import CensusView
from memtriage.model.census import Census
from memtriage.model.position import TrainingPosition
from memtriage.session import ledgers
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.record import SessionRecord


def census(nodes: int) -> Census:
    return Census(
        storages=[],
        groups=[],
        nodes_by_anchor={},
        garbage=0,
        objects=9,
        nodes=nodes,
        seconds=0.1,
        parameters=0,
    )


@pytest.mark.parametrize(("nodes", "notes"), [(3, ["not shown"]), (0, [])])
def test_what_torch_does_not_show_of_graphs_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, nodes: int, notes: list[str]
) -> None:
    monkeypatch.setattr(ledgers, "unread_saved_tensors", lambda: "not shown")
    record = SessionRecord(tmp_path / "rank.jsonl")
    progress = SimpleNamespace(position=TrainingPosition(step=1), elapsed=lambda: 1.0)
    keeper = LedgerKeeper(None, cast(Any, progress), record, Mock(), Mock(), Mock())
    view = cast(CensusView, SimpleNamespace(census=lambda: census(nodes)))
    keeper.take(view)
    keeper.take(view)
    record.close()
    text = (tmp_path / "rank.jsonl").read_text()
    assert text.count("not shown") == len(notes) and keeper.taken
