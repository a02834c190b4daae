"""When a watched process can be looked at: between two backwards, and not in the middle of a mark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from memtriage.model.asked import Answer
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.position import TrainingPosition
from memtriage.observe.main_thread import MainThreadCall
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote import answer
from memtriage.session.remote.answer import Lock, Responder
from memtriage.session.remote.listen import Deadline
from memtriage.store.layout import RankIdentity

LEDGER = Ledger(device="host", total=5, source="test", rows=[LedgerRow(row="libraries", bytes=5)])


class Watched:
    """What a watch gives its responder."""

    def __init__(self) -> None:
        self.progress = TrainingProgress()
        self.progress.position = TrainingPosition(step=12, microbatch=1, phase="forward")
        self.progress.thread = threading.get_ident()
        self.running = True
        self.lock = threading.RLock()
        self.responder = Responder(
            identity=RankIdentity("job", 0, 3, 8, 3),
            argv=["train.py"],
            progress=self.progress,
            lock=cast(Lock, self.lock),
            running=lambda: self.running,
            baselines={0: 7},
            script_root="/root",
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(answer, "answer_in_copy", lambda baselines, root, follow: None)
    monkeypatch.setattr(answer, "take_answer", lambda baselines, root, follow: Answer(pid=1))
    monkeypatch.setattr(answer, "take_ledgers", lambda storages, baselines: [LEDGER])
    return Watched()


def asking(watched: Watched, within_s: float = 60.0) -> Answer:
    """The answer that a thread gets while this one, the main thread, is busy with Python code."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask(watched, within_s)))
    thread.start()
    try:
        while thread.is_alive():
            sum(range(100))
    finally:
        thread.join()  # what it asks for must not run in the next test
    return answers[0]


def ask(watched: Watched, within_s: float) -> Answer:
    return watched.responder.answer(within_s)


def test_the_answer_says_where_the_run_stands(watched: Watched) -> None:
    reply = asking(watched)
    assert (reply.rank, reply.run_id, reply.argv) == (3, "job", ["train.py"])
    assert (reply.step, reply.microbatch, reply.doing) == (12, 1, "forward")
    assert reply.notes == []


def test_it_is_taken_by_the_main_thread(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def take(baselines: dict[int, int], root: str, follow: bool) -> Answer:
        names.append(threading.current_thread().name)
        assert (baselines, root) == ({0: 7}, "/root")
        return Answer(pid=1)

    monkeypatch.setattr(answer, "take_answer", take)
    asking(watched)
    assert names == [threading.main_thread().name]


def test_a_main_thread_that_hangs_is_looked_at_from_outside(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MainThreadCall, "result", lambda self, within_s, done_within_s: (False, None))
    names: list[str] = []

    def take(baselines: object, root: object, follow: object) -> Answer:
        names.append(threading.current_thread().name)
        return Answer(pid=1)

    monkeypatch.setattr(answer, "take_answer", take)
    thread = threading.Thread(target=lambda: ask(watched, 60.0), name="asker")
    thread.start()
    thread.join()
    assert names == ["asker"]


def test_a_backward_is_waited_for(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    takes: list[Callable[[], Answer | None]] = [lambda: None, lambda: None, lambda: Answer(pid=1)]
    monkeypatch.setattr(answer, "take_answer", lambda baselines, root, follow: takes.pop(0)())
    assert asking(watched).step == 12
    assert takes == []


def test_census_waits_for_backward_entry(watched: Watched) -> None:
    watched.progress.position = TrainingPosition(step=12, microbatch=1, phase="backward")
    assert asking(watched).doing == "backward"
    watched.progress.thread = None  # some other one, as in Ray Train's workers
    reply = asking(watched, within_s=0.0)
    assert reply.ledgers == [LEDGER] and "inside a backward" in reply.notes[0]


def test_a_backward_that_does_not_end_leaves_the_ledgers(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "take_answer", lambda baselines, root, follow: None)
    reply = asking(watched, within_s=0.0)
    assert reply.ledgers == [LEDGER] and reply.holders == []
    assert reply.refused is None and "inside a backward" in reply.notes[0]


def test_a_watch_that_has_ended_refuses(watched: Watched) -> None:
    watched.running = False
    assert asking(watched).refused == "its watch has ended"


class NoResult:
    """A copy of the process that fails or is late."""

    def result(self, within_s: float) -> None:
        return None


def test_the_process_takes_what_a_copy_failed_at(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[NoResult] = []
    monkeypatch.setattr(answer, "answer_in_copy", lambda *asked: copies.append(NoResult()) or copies[-1])
    monkeypatch.setattr(answer, "take_answer", lambda *asked: Answer(pid=1))
    assert asking(watched).step == 12
    assert len(copies) == 1


def test_a_copy_that_is_late_leaves_the_ledgers(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NoResult] = []
    monkeypatch.setattr(answer, "answer_in_copy", lambda *asked: made.append(NoResult()) or made[-1])
    monkeypatch.setattr(Deadline, "left_s", property(lambda self: 0.0 if made else 60.0))
    reply = asking(watched)
    assert reply.ledgers == [LEDGER] and reply.refused is None
    (note,) = reply.notes
    assert "took longer" in note and "backward" not in note


def test_a_backward_after_a_copy_that_failed_is_told_as_such(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    class Failed:
        def result(self, within_s: float) -> None:
            looks.append("copy")

    def busy(*asked: object) -> None:
        looks.append("process")

    monkeypatch.setattr(answer, "answer_in_copy", lambda *asked: Failed())
    monkeypatch.setattr(answer, "take_answer", busy)
    monkeypatch.setattr(Deadline, "left_s", property(lambda self: 0.0 if "process" in looks else 60.0))
    (note,) = asking(watched).notes
    assert looks == ["copy", "process"] and "backward" in note


def test_what_a_census_fails_at_is_told(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(baselines: Any, root: Any, follow: bool) -> Answer:
        raise ValueError("odd heap")

    monkeypatch.setattr(answer, "take_answer", fail)
    assert asking(watched).refused == "the census failed (ValueError: odd heap)"


def test_the_lock_is_given_back(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    asking(watched)
    assert not cast(Lock, watched.lock)._is_owned()
    taken = threading.Thread(target=watched.lock.acquire)
    taken.start()
    taken.join()
    assert asking(watched, within_s=0.0).notes != []
