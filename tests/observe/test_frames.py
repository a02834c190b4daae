"""Reading a running function's variables must name them all and keep none of them alive."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from types import FrameType

from memtriage.observe.frames import alike_named, frame_locals, running_frames


class Thing:
    pass


_COLLECTING = """
import gc, sys, threading
from memtriage.observe.frames import stacks

class Slow:
    gone = 0

    def __del__(self):
        Slow.gone += 1
        sum(number for number in range(300_000))  # long enough for another thread to be given the interpreter

def begin_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

for _ in range(30):  # so many frames are made meanwhile that a collection falls due there
    threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Thread(target=begin_threads, daemon=True).start()
gc.set_threshold(20)
while Slow.gone < 50:
    garbage = Slow()
    garbage.itself = garbage
    del garbage
    assert threading.main_thread().ident in stacks()
    assert gc.isenabled()
"""


def test_a_collection_while_listing_frames_does_not_hang() -> None:
    subprocess.run([sys.executable, "-c", _COLLECTING], check=True, timeout=60)


_ENDING = """
import gc, threading, time
from memtriage.observe.frames import stacks

class Slow:
    gone = 0

    def __del__(self):
        Slow.gone += 1
        time.sleep(0.001)  # the other threads get their turn

def deep(calls):
    deep(calls - 1) if calls else time.sleep(0.0005)

def run_threads():
    while True:
        threads = [threading.Thread(target=deep, args=(40,), daemon=True) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

threading.Thread(target=run_threads, daemon=True).start()
gc.set_threshold(20)
while Slow.gone < 1000:
    for _ in range(3):
        garbage = Slow()
        garbage.itself = garbage
        del garbage
    assert threading.get_ident() in stacks()
    assert gc.isenabled()
"""


def test_threads_may_end_while_their_frames_are_listed() -> None:
    """CPython 3.11 collects as it makes the object of a frame, and then uses the frame of an ended thread."""
    subprocess.run([sys.executable, "-c", _ENDING], check=True, timeout=60)


def outer(free: Thing) -> tuple[dict[str, object], weakref.ref[Thing]]:
    mine = Thing()
    watched = weakref.ref(mine)
    if watched() is None:
        unbound = 1
        assert unbound

    def inner() -> dict[str, object]:
        assert free is not None
        caller = sys._getframe(1)
        return dict(frame_locals(caller))

    seen = inner()
    seen_types = {name: type(value) for name, value in seen.items()}
    del mine, seen
    return {"types": seen_types, "alive": watched() is not None}, watched


def test_names_arguments_cells_and_locals_and_keeps_nothing() -> None:
    result, watched = outer(Thing())
    types = result["types"]
    assert isinstance(types, dict)
    assert types["mine"] is Thing
    assert types["free"] is Thing
    assert "unbound" not in types
    assert result["alive"] is False
    assert watched() is None


def test_module_body_has_no_fast_locals() -> None:
    frames: list[FrameType] = []
    namespace = {"frames": frames, "sys": sys}
    exec("frames.append(sys._getframe())", namespace)
    assert frame_locals(frames.pop()) == []


def test_free_variables_are_read_through_their_cell() -> None:
    captured = [1, 2, 3]

    def reader() -> dict[str, object]:
        assert captured
        return dict(frame_locals(sys._getframe()))

    assert reader()["captured"] is captured


def test_running_frames_lists_this_one_and_skips_by_file() -> None:
    names = {frame.f_code.co_name for thread, frame in running_frames(lambda name: False) if thread is None}
    assert "test_running_frames_lists_this_one_and_skips_by_file" in names
    skipped = {frame.f_code.co_name for _, frame in running_frames(lambda name: name == __file__)}
    assert "test_running_frames_lists_this_one_and_skips_by_file" not in skipped


def test_the_thread_that_asks_is_as_good_as_the_main_one() -> None:
    seen: dict[str, str | None] = {}

    def look() -> None:
        for thread, frame in running_frames(lambda name: False):
            seen.setdefault(frame.f_code.co_name, thread)

    def stays(ready: threading.Event, done: threading.Event) -> None:
        ready.set()
        done.wait()

    ready, done = threading.Event(), threading.Event()
    other = threading.Thread(target=stays, args=(ready, done), name="other")
    other.start()
    ready.wait()
    asking = threading.Thread(target=look, name="asking")
    asking.start()
    asking.join()
    done.set()
    other.join()
    assert seen["look"] is None  # as in Ray Train, whose training thread is not the main one
    assert seen["test_the_thread_that_asks_is_as_good_as_the_main_one"] is None
    assert seen["stays"] == "other"


_RACE = """
import sys, threading
from memtriage.observe.frames import frame_locals

stop = False

def inner():
    values = []
    for number in range(3):
        values = [number] * 10
        pair = (values, object())
    return pair

def work():
    while not stop:
        inner()

sys.setswitchinterval(1e-6)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
for _ in range(4000):
    for frame in sys._current_frames().values():
        while frame is not None:
            frame_locals(frame)
            frame = frame.f_back
stop = True
"""


def test_frames_of_threads_that_go_on_meanwhile() -> None:
    # In a process of its own: a stale pointer (as before the 3.11 reader took one at a time) ends it at once.
    subprocess.run([sys.executable, "-c", _RACE], check=True)


def test_threads_that_differ_in_numbers_have_one_name() -> None:
    names = {1: "MainThread", 2: "Thread-7", 3: "Thread-12", 4: "pool_0 worker", 5: "loader-3"}
    assert alike_named(names) == names | {2: "Thread-*", 3: "Thread-*"}
