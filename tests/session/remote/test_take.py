"""A census that another process has asked for: what it answers, and when there is none."""

from __future__ import annotations

import gc
import os
import weakref

import msgspec
import pytest

from memtriage.model.asked import Answer
from memtriage.model.census import HolderGroup
from memtriage.observe.cgroup import HostLimit
from memtriage.session.remote import take
from memtriage.session.remote.take import answer_in_copy, held_rows, take_answer
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


@pytest.mark.parametrize("follow", [False, True])
def test_a_copy_gives_the_same_answer(follow: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 7))
    kept = [model(torch.randn(3, 50)).sum() for _ in range(5)]
    copy = answer_in_copy({}, None, follow)
    assert copy is not None
    inside = take_answer({}, None, follow)
    text = copy.result(60)
    assert text is not None and inside is not None and kept
    copied = msgspec.json.decode(text, type=Answer)
    assert copied.pid == os.getpid()
    rows = [(row.device, row.holder, row.count, row.bytes, row.owners) for row in copied.holders]
    assert rows == [(row.device, row.holder, row.count, row.bytes, row.owners) for row in inside.holders]
    assert copied.nodes == inside.nodes > 0
    assert [group.holders for group in copied.groups] == [group.holders for group in inside.groups]
    assert all(sum(row.bytes for row in ledger.rows) == ledger.total for ledger in copied.ledgers)


def test_none_while_torch_is_only_partly_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    assert take_answer() is None
    assert answer_in_copy({}, None, follow=False) is None


def test_none_where_a_copy_might_need_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    used = take.in_use()
    assert used is not None
    for left, made in ((2 * used.resident - 1, False), (4 * used.resident, True)):
        limit = HostLimit(used.resident + left, "this test")
        monkeypatch.setattr(take, "host_limit", lambda limit=limit: limit)
        monkeypatch.setattr(take, "in_use", lambda: used)
        copy = answer_in_copy({}, None, follow=False)
        assert (copy is not None) == made
        if copy is not None:
            assert copy.result(60)


@pytest.mark.parametrize("shared", [False, True])
def test_none_where_page_locked_memory_would_be_copied_at_once(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """As `cudaHostRegister` leaves it; a copy does not get pages of `cudaHostAlloc`, which are shared."""
    locked = torch.zeros(50_000_003)
    if shared:
        locked.share_memory_()
    monkeypatch.setattr(take.cuda, "initialized", lambda: True)
    monkeypatch.setattr(take.cuda, "capturing", lambda: False)
    monkeypatch.setattr(take, "is_pinned", lambda tensor: tensor is locked)
    for most, made in ((locked.nbytes, True), (locked.nbytes - 1, shared)):
        monkeypatch.setattr(take, "_COPIED_AT_ONCE", most)
        copy = answer_in_copy({}, None, follow=False)
        assert (copy is not None) == made
        if copy is not None:
            assert copy.result(60)


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
