"""Time-based marks: when they are due, and that the main thread makes them where it can be looked at."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from memtriage.session import time_marks
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote.answer import Lock
from memtriage.session.signals.own_work import do_own_work
from memtriage.session.time_marks import POLICY, TimeMarks
from support.own_process import printed_by


class Program:
    """A watched program: a clock, how long ago its last mark was, and the time-based marks that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.quiet_s = 0.0
        self.made: list[float] = []
        self.failed: list[str] = []
        self.lock = threading.RLock()
        self.progress = TrainingProgress()
        monkeypatch.setattr(self.progress, "elapsed", lambda: self.now)
        self.while_marking: Callable[[], object] = lambda: None
        self.marks = TimeMarks(
            self.progress,
            since_mark=lambda: self.quiet_s,
            mark=self._mark,
            lock=cast(Lock, self.lock),
            failed=lambda where, error: self.failed.append(f"{where}: {error}"),
        )

    def _mark(self) -> None:
        self.made.append(self.now)
        self.while_marking()

    def wakes(self) -> float:
        """The sampler wakes; then the main thread comes to what it has asked for."""
        again = self.marks.at_wake()
        sum(range(100))
        return again

    def runs(self, until_s: float) -> list[float]:
        """When marks were made in a program that takes so long, with a sampler that is never late."""
        while self.now < until_s:
            self.now += max(self.wakes(), 1e-3)
        return self.made


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


# --- when ---------------------------------------------------------------------------------------------------


def test_a_short_program_has_many_and_a_long_one_not_too_many(program: Program) -> None:
    made = program.runs(1.0)
    assert made[0] == pytest.approx(POLICY.apart_s, abs=0.005)
    assert 24 <= len(made) <= 40
    program.progress.repeats = True  # until then the stacks are read as often as in the beginning
    assert 700 <= len(program.runs(3600.0)) <= 900
    last = program.made[-1] - program.made[-2]
    assert last == pytest.approx(POLICY.share * 3600, rel=0.1)


def test_imports_that_take_long_do_not_set_marks_further_apart(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        @property
        def _initializing(self) -> bool:
            return program.now < 20.0

    monkeypatch.setattr(torch, "__spec__", Spec())
    made = program.runs(21.0)
    assert made[0] >= 20.0
    assert len(made) >= 24


def test_a_program_that_trains_gets_none_unless_it_pauses(program: Program) -> None:
    program.progress.backward_begins()
    program.progress.backward_completes()
    assert program.runs(3.0) == []
    program.quiet_s = POLICY.quiet_s
    program.wakes()
    assert len(program.made) == 1


def test_steps_by_the_program_s_word_are_training(program: Program) -> None:
    program.progress.step_completes()
    assert program.runs(3.0) == []


def test_none_is_made_once_it_has_ended(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.now = 1.0
    asked: list[Any] = []
    monkeypatch.setattr(time_marks.MainThreadCall, "ask", lambda call: asked.append(call))
    program.marks.at_wake()
    program.marks.stop()
    program.marks.at_wake()
    assert len(asked) == 1
    asked[0]._run()  # the interpreter comes to it after all
    assert program.made == []


def test_one_is_asked_for_at_a_time(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(time_marks.MainThreadCall, "ask", lambda call: asked.append(call))
    monkeypatch.setattr(time_marks.MainThreadCall, "queued", property(lambda call: call in asked))
    program.now = 1.0
    for _ in range(3):
        program.marks.at_wake()
    (call,) = asked
    asked.clear()
    call._run()  # the main thread has come back
    assert program.made == [1.0]
    program.now = 2.0
    program.marks.at_wake()
    assert len(asked) == 1


def test_a_program_that_imports_is_asked_less_and_less_often(program: Program) -> None:
    namespace = {"wakes": program.wakes}
    exec(compile("def importing(): return wakes()", "<frozen importlib._bootstrap>", "exec"), namespace)
    asked = 0
    while program.now < 10.0:
        program.now += namespace["importing"]()
        asked += 1
    at_once, growing = 1.0 / 0.03, math.log(10.0) / math.log(1.03)
    assert asked == pytest.approx(at_once + growing, rel=0.05)
    assert program.made == []
    program.now += program.wakes()  # it has imported all
    assert program.runs(program.now + 0.9)[0] < 10.5
    assert len(program.made) == pytest.approx(0.9 / 0.03, rel=0.1)


# --- where --------------------------------------------------------------------------------------------------


def test_the_main_thread_makes_it(program: Program) -> None:
    threads: list[int] = []
    program.while_marking = lambda: threads.append(threading.get_ident())
    program.now = 1.0
    sampler = threading.Thread(target=program.marks.at_wake)
    sampler.start()
    while not threads:
        sum(range(100))
    sampler.join()
    assert threads == [threading.main_thread().ident]


def test_not_in_the_middle_of_the_watch_s_own_work(program: Program) -> None:
    program.now = 1.0
    do_own_work(program.wakes)
    assert program.made == []
    with program.lock:
        program.wakes()
    assert program.made == []
    program.wakes()
    assert program.made == [1.0]


def test_not_while_another_thread_makes_a_mark(program: Program) -> None:
    program.now = 1.0
    taken, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with program.lock:
            taken.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    program.wakes()
    go_on.set()
    thread.join()
    assert program.made == []


@pytest.mark.parametrize("busy", ["backward_runs", "capturing", "backward begins", "torch"])
def test_not_where_a_census_must_not_be_taken(
    program: Program, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    program.now = 1.0
    if busy == "backward_runs":
        monkeypatch.setattr(time_marks, "backward_runs", lambda: True)
    elif busy == "capturing":
        monkeypatch.setattr(time_marks.cuda, "capturing", lambda: True)
    elif busy == "backward begins":
        program.quiet_s = POLICY.quiet_s
        program.progress.backward_begins()
    else:
        half_there = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
        monkeypatch.setitem(sys.modules, "torch", half_there)
    program.wakes()
    assert program.made == []


@pytest.mark.parametrize(("file", "makes"), [("<frozen importlib._bootstrap>", 0), ("train.py", 1)])
def test_not_inside_the_import_system(program: Program, file: str, makes: int) -> None:
    program.now = 1.0
    code = compile("at_wake(); sum(range(100))", file, "exec")
    exec(code, {"at_wake": program.marks.at_wake})
    assert len(program.made) == makes


# --- what the program does not notice -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("a file that vanished"), SystemExit("by an audit hook")])
def test_a_mark_that_fails_or_that_an_audit_hook_ends_is_noted(
    program: Program, error: BaseException
) -> None:
    def fails() -> None:
        raise error

    program.now = 1.0
    program.while_marking = fails
    program.wakes()
    assert program.failed == [f"time mark: {error}"]


@pytest.mark.parametrize("error", [TimeoutError("in time"), KeyboardInterrupt("in time")])
def test_what_the_program_raises_in_a_mark_is_the_program_s(
    program: Program, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def ends() -> None:
        raise error

    monkeypatch.setattr(time_marks, "is_programs_exception", lambda error: str(error) == "in time")
    program.now = 1.0
    program.while_marking = ends
    with pytest.raises(type(error), match="in time"):
        program.wakes()
    assert program.failed == []
    assert program.lock.acquire(blocking=False)


def test_census_sees_variables_of_the_interrupted_function() -> None:
    script = """
        import threading, torch
        from memtriage.account.census import take_census
        from memtriage.model.paths import in_words
        from memtriage.observe.main_thread import MainThreadCall

        found = []

        def look():
            found.extend(in_words(group.path) for group in take_census().groups if group.nbytes == 12 << 10)

        def evaluate(model):
            outputs = [torch.ones(1 << 10) for _ in range(3)]
            thread = threading.Thread(target=lambda: MainThreadCall(look).result(60))
            thread.start()
            while not found:
                sum(range(100))
            thread.join()

        evaluate(None)
        print(int(any("evaluate" in path and "outputs" in path for path in found)))
    """
    assert printed_by("import textwrap; exec(textwrap.dedent('''" + script + "'''))") == [1]
