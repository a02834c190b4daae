"""When a watched process can be looked at: between two backwards, and not in the middle of a mark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from memtriage.model.asked import Answer
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.session import asked
from memtriage.session.asked import Lock, answer
from memtriage.store.layout import RankIdentity

LEDGER = Ledger(device="host", total=5, source="test", rows=[LedgerRow(row="libraries", bytes=5)])


class Session:
    """Stands in for a watch."""

    def __init__(self) -> None:
        self.identity = RankIdentity("job", 0, 3, 8, 3)
        self.argv = ["train.py"]
        self.step_count, self.microbatch, self.phase = 12, 1, "forward"
        self.training_thread = threading.get_ident()
        self.running = True
        self.lock = threading.RLock()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(asked, "take_answer", lambda baselines, root: Answer(pid=1, paused_s=0.5))
    monkeypatch.setattr(asked, "take_ledgers", lambda storages, baselines: [LEDGER])
    return Session()


def asking(session: Session, within_s: float = 60.0) -> Answer:
    """The answer that a thread gets while this one, the main thread, is busy with Python code."""
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(ask(session, within_s)))
    thread.start()
    while thread.is_alive():
        sum(range(100))
    return found[0]


def ask(session: Session, within_s: float) -> Answer:
    return answer(session, cast(Lock, session.lock), {0: 7}, "/root", within_s)


def test_the_answer_says_where_the_run_stands(session: Session) -> None:
    found = asking(session)
    assert (found.rank, found.run_id, found.argv) == (3, "job", ["train.py"])
    assert (found.step, found.microbatch, found.doing) == (12, 1, "forward")
    assert found.notes == []


def test_it_is_taken_by_the_main_thread(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def take(baselines: dict[int, int], root: str) -> Answer:
        names.append(threading.current_thread().name)
        assert (baselines, root) == ({0: 7}, "/root")
        return Answer(pid=1)

    monkeypatch.setattr(asked, "take_answer", take)
    asking(session)
    assert names == [threading.main_thread().name]


def test_a_main_thread_that_hangs_is_looked_at_from_outside(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked.MainThreadCall, "result", lambda self, within_s, done_within_s: (False, None))
    names: list[str] = []

    def take(baselines: object, root: object) -> Answer:
        names.append(threading.current_thread().name)
        return Answer(pid=1)

    monkeypatch.setattr(asked, "take_answer", take)
    thread = threading.Thread(target=lambda: ask(session, 60.0), name="asker")
    thread.start()
    thread.join()
    assert names == ["asker"]


def test_a_backward_is_waited_for(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    takes: list[Callable[[], Answer | None]] = [lambda: None, lambda: None, lambda: Answer(pid=1)]
    monkeypatch.setattr(asked, "take_answer", lambda baselines, root: takes.pop(0)())
    assert asking(session).step == 12
    assert takes == []


def test_who_is_on_the_way_into_a_backward_is_looked_at_only_from_its_own_thread(session: Session) -> None:
    session.phase = "backward"
    assert asking(session).doing == "backward"
    session.training_thread = None  # some other one, as in Ray Train's workers
    found = asking(session, within_s=0.0)
    assert found.ledgers == [LEDGER] and "inside a backward" in found.notes[0]


def test_a_backward_that_does_not_end_leaves_the_ledgers(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "take_answer", lambda baselines, root: None)
    found = asking(session, within_s=0.0)
    assert found.ledgers == [LEDGER] and found.holders == []
    assert found.refused is None and "inside a backward" in found.notes[0]


def test_a_watch_that_has_ended_refuses(session: Session) -> None:
    session.running = False
    assert asking(session).refused == "its watch has ended"


def test_what_a_census_fails_at_is_told(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(baselines: Any, root: Any) -> Answer:
        raise ValueError("odd heap")

    monkeypatch.setattr(asked, "take_answer", fail)
    assert asking(session).refused == "the census failed (ValueError: odd heap)"


def test_in_the_main_thread_it_is_taken_at_once_or_not_at_all(session: Session) -> None:
    assert ask(session, 60.0).step == 12
    with session.lock:  # in the middle of a mark
        found = ask(session, 60.0)
    assert found.retry and found.refused is not None


def test_the_lock_is_given_back(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asking(session)
    assert not cast(Lock, session.lock)._is_owned()
    taken = threading.Thread(target=session.lock.acquire)
    taken.start()
    taken.join()
    assert asking(session, within_s=0.0).notes != []
