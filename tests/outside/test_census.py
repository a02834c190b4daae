"""A census of a process whose memory is not what it should be, or that ends or forks meanwhile."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from memtriage.model.census import StorageRecord
from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.outside import census as outside
from memtriage.outside.census import RemoteReading, read_once, take_census
from memtriage.outside.interpreter import InterpreterLayout, RemoteInterpreter
from memtriage.outside.memory import GoneError, OutsideError, ProcessMemory
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import layout_of
from memtriage.outside.torch_layout import calibrate
from support.remote_memory import SIZE, START, hostile_memory

known_python = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)
_FORKS = """
import os, sys, torch
kept = [torch.zeros(1000)]
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.readline() if child else os.read(0, 1)
"""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Free what is in reference cycles before a test, and not again until it ends."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([11, 12, 13, 14]))
def test_hostile_memory_gives_a_census_or_one_line(seed: int, pointers: bool, minor: int) -> None:
    """The whole walk over random bytes, or over pointers that lead anywhere."""
    layout = layout_of((3, minor))
    assert layout is not None
    memory = hostile_memory(random.Random(seed), pointers)
    found = InterpreterLayout(
        runtime=8, modules=888, collector=672, permanent=80, thread_id=152, native_id=160
    )

    def translate(own: int) -> int:
        return START + own % SIZE & ~7

    try:
        heap = RemoteHeap(memory, layout, translate)
        reading = read_once(heap, found, calibrate(), translate, os.getpid(), lambda: False)
    except OutsideError as error:
        assert "\n" not in str(error)
    else:
        assert reading.objects <= SIZE


@known_python
def test_a_job_that_ends_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"

        class Ending(ProcessMemory):
            """A process that is killed after its chunks were listed, before they are read."""

            def own_chunks(self) -> list[int]:
                job.kill()
                job.wait()
                return super().own_chunks()

        monkeypatch.setattr(outside, "ProcessMemory", Ending)
        with pytest.raises(GoneError, match=f"process {job.pid} ended"):
            take_census(job.pid)


@known_python
def test_frames_are_copied_again_where_a_call_broke_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys, torch
def train():
    kept = [torch.zeros(1000)]
    print("ready", flush=True)
    sys.stdin.readline()
train()
"""
    tries = []
    frames = RemoteInterpreter.frames

    def broken_off(self: RemoteInterpreter, main_thread: int) -> object:
        tries.append(main_thread)
        return frames(self, main_thread) if len(tries) > 1 else ([], False)

    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        outside._own_build()  # which reads this process
        monkeypatch.setattr(RemoteInterpreter, "frames", broken_off)
        found = take_census(job.pid, twice=False, within_s=600)
        job.kill()
    assert tries == [job.pid, job.pid]
    assert [(one.holder, one.nbytes) for one in found.storages] == [("frame train(): kept[*]", 4000)]


@known_python
@pytest.mark.parametrize("class_body", ["", "\n    def __init__(self): self.role = 'server'"])
def test_what_a_thread_keeps_for_itself_is_an_attribute(class_body: str) -> None:
    program = f"""
import sys, threading, torch
class Scratch(threading.local):
    "Values of one thread."{class_body}
local = Scratch()
local.sessions = {{"a": [torch.zeros(1000)]}}
print("ready", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        found = take_census(job.pid, twice=False, within_s=600)
        job.kill()
    assert [one.holder for one in found.storages] == ["__main__.local.sessions['a'][*]"]


@known_python
def test_the_copy_of_a_job_is_gone_after_its_census(no_collection: None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        take_census(job.pid, within_s=600)
        assert sum(each.data.nbytes for each in gc.get_objects() if isinstance(each, ProcessMemory)) == 0
        job.kill()


@known_python
def test_a_job_and_its_fork_are_read_alike() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
        child = int(job.stdout.readline())
        for pid in (job.pid, child):
            found = take_census(pid, within_s=600)
            assert [(one.holder, one.nbytes) for one in found.storages] == [("__main__.kept[*]", 4000)]
        job.stdin.write("\n\n")
        job.stdin.close()
        job.kill()


_CALLED = [
    (("frame train", "variable history", "item *"), ("frame step", "variable self", "item *"), True),
    (("thread t", "frame train", "variable kept"), ("frame train", "variable kept"), True),
    (("frame train", "variable history", "item *"), ("frame train", "variable history"), False),
    (("module job", "variable history"), ("frame train", "variable history"), False),
    (("module job", "variable history"), ("module job", "variable last"), False),
]


@pytest.mark.parametrize(("first", "second", "agree"), _CALLED)
def test_readings_agree_about_a_storage_in_variables_of_other_functions(
    first: tuple[str, ...], second: tuple[str, ...], agree: bool
) -> None:
    def reading(path: tuple[str, ...]) -> RemoteReading:
        segments = tuple(PathSegment(SegmentKind(kind), name) for kind, name in map(str.split, path))
        record = StorageRecord(
            device="cpu", address=64, nbytes=4000, owner="variable", path=segments, shared=False
        )
        return RemoteReading({("cpu", 64): record}, {}, set(), {}, 0, 0, 0, None, np.zeros(0, np.int64))

    agreed, moved = outside._agreed(reading(first), reading(second))
    assert moved == ({} if agree else {("cpu", 64): 4000})
    assert list(agreed.storages) == ([("cpu", 64)] if agree else [])
