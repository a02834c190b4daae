"""Work of the watch that neither a tracer nor a profiler of the program sees."""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from memtriage.observe.main_thread import MainThreadCall
from memtriage.process import untraced as untraced_module
from memtriage.process.untraced import call_untraced, untraced


class Watching:
    """A program's tracer and profiler, with what they saw: kind, event, function and its file."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, str]] = []

    def tracer(self, frame: FrameType, event: str, argument: object) -> object:
        self._saw("trace", event, frame)
        return self.tracer

    def profiler(self, frame: FrameType, event: str, argument: object) -> None:
        self._saw("profile", event, frame)

    def _saw(self, kind: str, event: str, frame: FrameType) -> None:
        self.events.append((kind, event, frame.f_code.co_name, frame.f_code.co_filename))

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self.profiler)
        sys.settrace(self.tracer)
        try:
            yield
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])

    def balanced(self, function: str) -> bool:
        """Whether each kind saw one call of a function and one return."""
        seen = [(kind, event) for kind, event, name, _ in self.events if name == function]
        return all(
            seen.count((kind, event)) == 1 for kind in ("trace", "profile") for event in ("call", "return")
        )

    def own_events(self) -> list[tuple[str, str, str, str]]:
        return [event for event in self.events if "/memtriage/" in event[3]]


def work() -> None:
    sum(map(ord, "work"))


def fails() -> None:
    raise KeyError("of the work")


@pytest.fixture
def watching() -> Watching:
    return Watching()


def test_nothing_of_the_work_is_seen_and_the_caller_is_seen_whole(watching: Watching) -> None:
    run = untraced(work)

    def calls() -> None:
        run()
        watching.events.append(("trace", "here", "calls", __file__))

    with watching.on():
        calls()
        assert (sys.gettrace(), sys.getprofile()) == (watching.tracer, watching.profiler)
    assert watching.balanced("calls")
    assert "work" not in {name for _, _, name, _ in watching.events} and watching.own_events() == []


def test_both_are_back_after_work_that_fails(watching: Watching) -> None:
    run = untraced(fails)
    with watching.on():
        with pytest.raises(KeyError, match="of the work"):
            run()
        assert (sys.gettrace(), sys.getprofile()) == (watching.tracer, watching.profiler)
    assert "fails" not in {name for _, _, name, _ in watching.events}


def test_a_call_in_the_main_thread_is_not_seen(watching: Watching) -> None:
    call = MainThreadCall(work)
    thread = threading.Thread(target=lambda: call.result(60.0))
    with watching.on():
        thread.start()
        while thread.is_alive():
            sum(range(100))
    assert watching.events and watching.own_events() == []


def test_what_comes_after_the_work_is_seen(watching: Watching) -> None:
    later: list[Callable[[], object]] = []
    run = untraced(lambda: later.append(work), iter(later))
    with watching.on():
        run()
    assert watching.balanced("work")


@pytest.mark.parametrize("does", [work, fails])
def test_cprofile_does_not_see_the_work_and_goes_on(does: Callable[[], None]) -> None:
    def calls() -> None:
        with suppress(KeyError):
            untraced(does)()
        after()

    def after() -> None:
        pass

    profile = cProfile.Profile()
    profile.runcall(calls)
    callers = {
        name: {caller for _, _, caller in entry[4]} for (_, _, name), entry in profile_stats(profile).items()
    }
    assert does.__name__ not in callers
    assert callers["after"] == {"calls"} and callers["calls"] == set()


def profile_stats(profile: cProfile.Profile) -> dict[Any, Any]:
    return vars(pstats.Stats(profile))["stats"]


@pytest.mark.parametrize("does", [work, fails])
def test_nothing_is_left_for_the_collector(does: Callable[[], None]) -> None:
    class Marked:
        def __call__(self) -> None:
            does()

    def runs() -> weakref.ref[Marked]:
        marked = Marked()
        try:
            untraced(marked)()
        except KeyError:
            pass
        return weakref.ref(marked)

    gc.disable()
    try:
        assert runs()() is None
    finally:
        gc.enable()


def test_dropped_work_leaves_nothing_for_the_collector() -> None:
    """Nor does it keep the frame in which it was dropped, with the program's variables."""

    class Marked:
        def __call__(self) -> None: ...

    def drops() -> list[weakref.ref[Marked]]:
        marked, of_the_program = Marked(), Marked()
        untraced(marked)
        return [weakref.ref(marked), weakref.ref(of_the_program)]

    gc.disable()
    try:
        assert [left() for left in drops()] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("seen_by", ["tracer", "profiler"])
def test_a_tracer_or_a_profiler_alone_does_not_see_the_work(watching: Watching, seen_by: str) -> None:
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(watching.tracer if seen_by == "tracer" else None)
    sys.setprofile(watching.profiler if seen_by == "profiler" else None)
    try:
        call_untraced(work, [fine])
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    names = {name for _, _, name, _ in watching.events}
    assert "work" not in names and "fine" in names


def fine() -> None: ...


def test_without_one_the_work_is_just_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untraced_module, "untraced", lambda *arguments: pytest.fail("not needed"))
    calls: list[str] = []

    def failing() -> None:
        calls.append("work")
        raise KeyError

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    try:
        with pytest.raises(KeyError):
            call_untraced(failing, [lambda: calls.append("then")])
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert calls == ["work", "then"]
