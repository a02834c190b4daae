"""A census of a process whose memory is not what it should be, or that ends or forks meanwhile."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.outside import census as outside
from memtriage.outside import gradients
from memtriage.outside.census import (
    JobReader,
    OutsideCensus,
    RemoteReading,
    joined,
    take_census,
    walk_once,
)
from memtriage.outside.gradients import Gradients
from memtriage.outside.interpreter import InterpreterLayout, RemoteInterpreter
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import GoneError, OutsideError, ProcessMemory, Words
from memtriage.outside.pause import Stop
from memtriage.outside.python_layout import layout_of
from memtriage.outside.tensors import TorchReader
from memtriage.outside.torch_layout import calibrate
from support.jobs import job_of, next_line, told
from support.remote_memory import SIZE, hostile_heap, own_address

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
    _, heap = hostile_heap(seed, pointers, minor)
    found = InterpreterLayout(
        runtime=8, modules=888, collector=672, permanent=80, thread_id=152, native_id=160
    )
    try:
        reading = RemoteReading(heap, TorchReader(heap, calibrate()), RemoteModules(heap), 0.0)
        interpreter = RemoteInterpreter(heap, found, own_address)
        frames, _ = interpreter.frames(os.getpid())
        walk_once(reading, interpreter, frames, own_address, lambda: False)
    except OutsideError as error:
        assert "\n" not in str(error)
    else:
        assert reading.objects <= SIZE


@known_python
def test_a_job_that_ends_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(_FORKS) as job:

        class Ending(ProcessMemory):
            """A process that is killed after its chunks were listed, before they are read."""

            def own_chunks(self) -> list[int]:
                job.kill()
                job.wait()
                return super().own_chunks()

        monkeypatch.setattr(outside, "ProcessMemory", Ending)
        with pytest.raises(GoneError, match=f"process {job.pid} ended"):
            take_census(job.pid)


_KEEPS_GRAPHS = """
import sys, torch
from memtriage.observe.malloc import malloc_info
kept, weight = [], torch.ones(8, requires_grad=True)
def keep(number):
    for _ in range(number):
        value = weight
        for _ in range(100):
            value = torch.exp(value) * 0.1
        kept.append(value.sum())
        kept[-1].backward()
keep(10)
before = malloc_info().in_use
keep(40)
print(malloc_info().in_use - before, flush=True)
sys.stdin.readline()
"""


@known_python
def test_the_nodes_that_losses_keep_count_as_memory_of_their_list() -> None:
    """Nothing is saved any more after a backward: the nodes themselves are what grows."""
    with job_of(_KEEPS_GRAPHS, says="") as job:
        taken = int(next_line(job))
        census = take_census(job.pid)
    kept = PathSegment(SegmentKind.VARIABLE, "kept")
    (losses,) = (group for group in census.groups if kept in group.anchor)
    assert losses.count == 50
    assert losses.on_host * 40 / 50 == pytest.approx(taken, rel=0.1)


_TRAINS = """
import sys, torch
def train():
    kept = [torch.zeros(1000)]
    print("ready", flush=True)
    sys.stdin.readline()
train()
"""


@known_python
@pytest.mark.parametrize("torn", ["broken off", "without frames", "without the outer ones"])
def test_frames_are_copied_again_until_the_outermost_is_sure(
    torn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame pointer that is torn to 0 ends a stack as the outermost frame does."""
    frames = RemoteInterpreter.frames

    def read(self: RemoteInterpreter, main_thread: int) -> object:
        tries.append(main_thread)
        found, outermost = frames(self, main_thread)
        if len(tries) > 1:
            return found, outermost
        return {
            "broken off": (found[:0], 0),
            "without frames": ([], 0),
            "without the outer ones": (found[:1], found[0][1].address + 8),
        }[torn]

    tries: list[int] = []
    with job_of(_TRAINS) as job, JobReader(job.pid, 600) as reader:
        monkeypatch.setattr(RemoteInterpreter, "frames", read)
        census = joined([reader.read()])
        assert tries == [job.pid] * 3
        monkeypatch.setattr(RemoteInterpreter, "frames", lambda self, main_thread: ([], 0))
        without = joined([reader.read()])
    assert [(one.holder, one.nbytes) for one in census.storages] == [("frame train(): kept[*]", 4000)]
    assert census.missing == []
    assert without.missing == ["what runs in the main thread could not be read"]


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
    with job_of(program) as job:
        found = take_census(job.pid, within_s=600)
    assert [one.holder for one in found.storages] == ["__main__.local.sessions['a'][*]"]


@known_python
def test_the_copy_of_a_job_is_gone_after_its_census(no_collection: None) -> None:
    with job_of(_FORKS) as job:
        take_census(job.pid, within_s=600)
        assert sum(each.data.nbytes for each in gc.get_objects() if isinstance(each, ProcessMemory)) == 0


@known_python
def test_a_job_and_its_fork_are_read_alike() -> None:
    with job_of(_FORKS) as job:
        child = int(told(job))
        for pid in (job.pid, child):
            found = take_census(pid, within_s=600)
            assert [(one.holder, one.nbytes) for one in found.storages] == [("__main__.kept[*]", 4000)]
        os.kill(child, signal.SIGKILL)


# --- a job that trains meanwhile: each line that it is sent is a step ---

_STEPS = """
import sys, torch
torch.manual_seed(0)
def train():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    history = []
    def step(line):
        if line == "zero":
            optimizer.zero_grad()
            return
        model(torch.randn(16, 64)).sum().backward()
        if line == "step":
            optimizer.step()
            history.append(torch.zeros(4096))
    step("step")
    print("ready", flush=True)
    for line in sys.stdin:
        step(line.strip())
        print("done", flush=True)
train()
"""
_PARAMETERS = 4 * (64 * 64 + 64 + 64 * 8 + 8)
_STATES = 2 * _PARAMETERS + 4 * 4  # of each parameter two averages and a number


def bytes_by_owner(census: OutsideCensus) -> Counter[str]:
    found = Counter[str]()
    for one in census.storages:
        found[one.owner] += one.nbytes
    return found


@known_python
@pytest.mark.parametrize("pause", [False, True])
def test_gradients_that_come_and_go_are_read_when_they_are_there(
    pause: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heap is copied while there are none; the job goes on at each later look."""
    lines = iter(["backward", "zero", "backward", "step"])

    def look(torch: TorchReader, leaves: Words) -> Gradients:
        if line := next(lines, ""):
            told(job, line)
        return now(torch, leaves)

    now = gradients.gradients_now
    monkeypatch.setattr(gradients, "gradients_now", look)
    with job_of(_STEPS) as job:
        told(job, "zero")
        census = take_census(job.pid, pause=pause, pause_s=60, within_s=600)
    found = bytes_by_owner(census)
    assert census.missing == []
    assert (found["parameter"], found["gradient"]) == (_PARAMETERS, _PARAMETERS)
    assert found["optimizer state"] == _STATES
    assert sum(group.nbytes for group in census.groups if "history" in str(group.path)) >= 4 * 4096
    assert (census.moved is None) == pause


@known_python
def test_gradients_that_are_gone_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four parameters loses its gradient at each look, and gets none again."""
    now, looks = gradients.gradients_now, []

    def look(torch: TorchReader, leaves: Words) -> Gradients:
        found = now(torch, leaves)
        at = np.flatnonzero(found.there)
        looks.append(len(at))
        found.there[at[len(looks) % len(at)]] = False
        return found

    monkeypatch.setattr(gradients, "gradients_now", look)
    monkeypatch.setattr(gradients, "_ENOUGH_S", 0.02)
    with job_of(_STEPS) as job:
        census = take_census(job.pid, within_s=600)
    assert set(looks) == {4}
    assert census.missing == ["1 gradient changed while it was read"]


@known_python
def test_readings_are_joined_by_storage_whatever_their_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(_TRAINS) as job, JobReader(job.pid, 600) as reader:
        first = reader.read()
        again = reader.read_again(first)
        (key,) = first.storages
        elsewhere = (PathSegment(SegmentKind.MODULE, "job"), PathSegment(SegmentKind.VARIABLE, "last"))
        one = again.storages[key]
        one.record = msgspec.structs.replace(one.record, path=elsewhere)
        again.storages["cpu", key[1] + 64] = one  # whose tensor has another storage by now
        census = joined([first, again])
    assert [one.address for one in census.storages] == [key[1]]
    assert census.moved == 1


@known_python
def test_a_stop_that_is_too_short_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stop, "copy", lambda self, memory, chunks: len(chunks) // 2)
    monkeypatch.setattr(ProcessMemory, "agrees", lambda self, other, number: False)
    with job_of(_STEPS) as job:
        census = take_census(job.pid, pause=True, within_s=600)
    (missing,) = census.missing
    assert re.fullmatch(
        r"50 ms were too short to copy the .* MiB that change: try --pause=1[0-9]0ms", missing
    )
    assert bytes_by_owner(census)["parameter"] == _PARAMETERS
