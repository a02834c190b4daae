"""A census that another process has asked for: what it answers, and when there is none."""

from __future__ import annotations

import gc
import os
import weakref

import msgspec
import pytest

from memtriage.model.asked import Answer
from memtriage.model.census import HolderGroup
from memtriage.session.remote import take
from memtriage.session.remote.take import held_rows, take_answer
from support.paths import named

torch = pytest.importorskip("torch")


def group(nbytes: int, device: str = "cpu") -> HolderGroup:
    return HolderGroup(
        device=device,
        anchor=named(f"kept[{nbytes}]"),
        path=named(f"kept[{nbytes}]"),
        count=2,
        nbytes=nbytes,
        by_path={},
        owners={"variable": nbytes},
        attached=False,
    )


def test_small_holders_are_told_together_so_that_the_sum_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take, "MOST_HOLDERS", 2)
    rows = held_rows([group(1), group(30), group(2), group(20), group(5, "cuda:0")])
    assert [(row.holder, row.bytes) for row in rows] == [
        ("kept[30]", 30),
        ("kept[20]", 20),
        (None, 5),
        (None, 3),
    ]
    assert rows[3].owners == {"variable": 3} and rows[3].count == 4
    assert rows[0].holder_path == named("kept[30]") and rows[2].holder_path is None
    assert sum(row.bytes for row in rows) == 58


def test_an_answer_tells_who_holds_what_and_holds_nothing() -> None:
    kept = [torch.zeros(1_000_003) for _ in range(3)]
    answer = take_answer()
    assert answer is not None
    assert answer.pid == os.getpid()
    row = next(holder for holder in answer.holders if holder.bytes == 3 * 4 * 1_000_003)
    assert row.count == 3 and row.holder is not None and row.holder.endswith("kept[*]")
    assert {ledger.device for ledger in answer.ledgers} >= {"host"}
    assert all(sum(row.bytes for row in ledger.rows) == ledger.total for ledger in answer.ledgers)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer
    gone = weakref.ref(kept[0])
    kept.clear()
    gc.collect()
    assert gone() is None


def test_none_while_a_backward_runs() -> None:
    answers: list[object] = []
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_hook(lambda gradient: answers.append(take_answer()))
    (parameter * 2).sum().backward()
    assert answers == [None]


def test_what_torch_does_not_show_of_graphs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.ones(4, requires_grad=True) * 2
    for unread, notes in (("not shown", ["not shown"]), (None, [])):
        monkeypatch.setattr(take, "unread_saved_tensors", lambda unread=unread: unread)
        answer = take_answer()
        assert answer is not None and answer.nodes > 0 and answer.notes == notes
    assert graph.grad_fn is not None
