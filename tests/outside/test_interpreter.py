"""The interpreter of another process: what its collector follows, and what runs."""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
from dataclasses import replace

import pytest

from memtriage.outside import interpreter
from memtriage.outside.interpreter import (
    InterpreterLayout,
    RemoteInterpreter,
    check_self,
    measure,
    own_layout,
)
from memtriage.outside.memory import GoneError, OutsideError, ProcessMemory
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import PythonLayout
from support.remote_memory import SIZE, START, FakeMemory

_FOUND = InterpreterLayout(runtime=START, modules=8, collector=16, permanent=80, thread_id=0, native_id=0)
_STATE = START + 4096
_OBJECTS = [START + 8192 + 32 * at for at in range(20_000)]
_LAYOUT = PythonLayout()


def _interpreter(generations: list[list[int]]) -> RemoteInterpreter:
    """An interpreter whose collector has these objects, by their words for the collector."""
    data = bytearray(SIZE)

    def put(address: int, value: int) -> None:
        struct.pack_into("<Q", data, address - START, value)

    put(START + _LAYOUT.runtime_interpreters, _STATE)
    put(_STATE + _FOUND.modules, START)
    heads = [_STATE + _FOUND.collector + offset for offset in (0, 24, 48, 80)]
    for head, members in zip(heads, [*generations, []], strict=True):
        for at, after in zip([head, *members], [*members, head], strict=True):
            put(at, after)
    heap = RemoteHeap(FakeMemory(bytes(data)), _LAYOUT, lambda own: own)
    return RemoteInterpreter(heap, _FOUND, lambda own: own)


def test_objects_are_listed_in_the_order_of_the_collector() -> None:
    order = random.Random(0).sample(_OBJECTS, 18_000)
    of_process = _interpreter([order[:10], order[10:1000], order[1000:]])
    assert of_process.tracked().tolist() == [at + _LAYOUT.collector_head for at in order]
    assert of_process.tracked(young=True).tolist() == [at + _LAYOUT.collector_head for at in order[:1000]]
    assert not of_process.cut


def test_a_list_that_leads_back_into_itself_ends() -> None:
    order = _OBJECTS[:12_000]
    now = _interpreter([order[:5000], [], order])  # the same objects are in two lists
    found = now.tracked().tolist()
    assert now.cut
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", ["is_special_build", "layout_of"])
def test_a_python_that_is_not_known_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = name == "is_special_build"
    monkeypatch.setattr(interpreter, name, (lambda: True) if special else (lambda version: None))
    with pytest.raises(
        OutsideError, match=r"expected a 64-bit release of CPython .*; start the job"
    ) as error:
        own_layout()
    assert ("a debug or free-threaded build" in str(error.value)) == special
    assert "\n" not in str(error.value)


def test_modules_and_running_functions_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = own_layout()
    found = measure(layout)
    arrived, gate = threading.Event(), threading.Event()

    def inner() -> None:
        arrived.set()
        gate.wait()

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    arrived.wait()
    try:
        heap = RemoteHeap(ProcessMemory(os.getpid()), layout, lambda own: own)
        itself = RemoteInterpreter(heap, found, lambda own: own)
        threads, _ = itself.frames(threading.get_native_id())
        waiting = [frame for ident, frame in threads if ident == thread.ident]
        as_main = [frame.name for ident, frame in itself.frames(thread.native_id or 0)[0] if ident is None]
        monkeypatch.setattr(heap, "frame", lambda address: None)
        broken_off = itself.frames(threading.get_native_id())
    finally:
        gate.set()
        thread.join()
    names = [frame.name for frame in waiting]
    assert names[names.index("inner") :][:2] == ["inner", "outer"]
    assert dict(waiting[names.index("outer")].variables) == {"inner": id(inner)}
    assert as_main == names
    assert broken_off == ([], 0)
    assert (
        dict(itself.modules()).items()
        >= {name: id(sys.modules[name]) for name in ("sys", "threading")}.items()
    )
    assert not itself.has_others()


def test_python_that_has_not_started_may_be_read_later() -> None:
    heap = RemoteHeap(FakeMemory(bytes(SIZE)), _LAYOUT, lambda own: own)
    with pytest.raises(GoneError, match="has not started in the process, or has ended"):
        RemoteInterpreter(heap, _FOUND, lambda own: own)
    with pytest.raises(GoneError, match="has not started"):
        RemoteInterpreter(heap, _FOUND, lambda own: None)


def test_no_more_objects_are_followed_than_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "MOST_TRACKED", 5000)
    whole = _interpreter([[], [], _OBJECTS[:4096]])
    assert len(whole.tracked()) == 4096
    assert not whole.cut
    more = _interpreter([[], [], _OBJECTS])
    assert len(more.tracked()) == 8192  # in parts of 4096
    assert more.cut


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = own_layout()
    wrong = replace(measure(layout), modules=8)
    with pytest.raises(OutsideError, match=r"^this build of Python \S+ keeps modules elsewhere than the rel"):
        check_self(layout, wrong)


class _CopiedAtOnce(ProcessMemory):
    """Memory that is copied when it is opened: whatever is made later is not in the copy."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.read_ahead(self.own_chunks())


def test_this_process_is_compared_as_it_was_when_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = own_layout()
    monkeypatch.setattr(interpreter, "ProcessMemory", _CopiedAtOnce)
    check_self(layout, measure(layout))
