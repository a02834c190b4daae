"""The roots of a walk over another process: modules of the program, what runs, then libraries."""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

from memtriage.observe.kinds import LOCALS
from memtriage.outside.graph import RemoteGraph
from support.outside_parts import known_python, walk_of

pytestmark = known_python

PROGRAM = """
import sys, threading
from memtriage.observe.frames import running_frames
class Thing: pass
shared = Thing()
waiting, stop = threading.Barrier(5), threading.Event()
def wait():
    running = sys._getframe()
    objects.append(id(running))
    waiting.wait()
    stop.wait()
def evaluate():
    mine, also = Thing(), shared
    found.append(id(mine))
    next(running_frames(lambda file: wait()))  # memtriage's own function, which is no part of the program
found, objects = [], []
"""


def until_they_wait(program: Any, idents: Sequence[int | None]) -> None:
    """Return when the threads wait for the end: until then their functions change while they are read."""
    program["waiting"].wait()
    condition = program["stop"]._cond
    while True:
        running = sys._current_frames()
        ready = all(running[ident].f_code is threading.Condition.wait.__code__ for ident in idents if ident)
        if ready and len(condition._waiters) == len(idents) and not condition._lock.locked():
            return
        time.sleep(0.001)


def root_of(graph: RemoteGraph, address: int) -> int:
    at = graph.objects.index(address)
    while graph.parents[at] >= 0:
        at = graph.parents[at]
    return at


def test_roots_are_the_program_then_its_functions_then_libraries(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("a_library")
    library.__file__ = torch.__file__
    monkeypatch.setitem(sys.modules, "a_library", library)
    program.run(PROGRAM)
    library.__dict__.update(shared=program["shared"], own=[1, program["Thing"]()])
    threads = [threading.Thread(target=program["evaluate"], name=name) for name in ("main", "job-1", "job-2")]
    for thread in threads:
        thread.start()
    unlisted = _thread.start_new_thread(program["evaluate"], ())
    until_they_wait(program, [unlisted, *(thread.ident for thread in threads)])
    try:
        walk = walk_of({"train", "a_library", "threading"}, threads=threads, idents=[unlisted])
        graph = walk.run()
    finally:
        program["stop"].set()
        for thread in threads:
            thread.join()
    roots = {name: at for at, name in graph.root_names.items()}
    frames = [at for at, kind in enumerate(graph.kinds) if kind == LOCALS]
    assert roots["train"] == 0 and roots["a_library"] > max(frames)
    assert roots["train.Thing"] < min(frames)
    assert root_of(graph, id(program["shared"])) == 0
    assert root_of(graph, id(library.__dict__["own"])) == roots["a_library"]
    assert graph.first_unrooted == graph.first_garbage == len(graph.objects)
    assert {running.thread for running in graph.frames.values()} == {None, "job-*", f"id {unlisted}"}
    of_program = [graph.frames[graph.objects[at]].frame.file == str(program.file) for at in frames]
    assert of_program == [True] * 12 + [False] * (len(frames) - 12)  # then what waits in the standard library
    assert len(frames) > 12
    assert "running_frames" not in {running.frame.name for running in graph.frames.values()}
    assert not set(program["objects"]) & set(graph.objects)  # each is a root by its variables
    assert len({root_of(graph, address) for address in program["found"]}) == 4


def test_a_frame_that_is_newer_than_the_heap_hides_no_object(program: Any) -> None:
    """Where the heap's copy has an older frame, whose word for Python's frame is one of its variables."""
    program.run(PROGRAM.replace("Barrier(5)", "Barrier(2)"))
    thread = threading.Thread(target=program["evaluate"])
    thread.start()
    until_they_wait(program, [thread.ident])
    try:
        walk = walk_of({"train", "threading"}, threads=[thread])
        for _, frame in walk._running:
            where = np.array([frame.address + walk._heap.layout.frame_object])
            walk._heap.memory.put(where, np.array([program["found"]]))
        graph = walk.run()
    finally:
        program["stop"].set()
        thread.join()
    assert program["found"][0] in graph.objects


def test_a_checkpoint_is_found_by_what_it_will_fill() -> None:
    out = checkpoint(torch.sin, torch.ones(4, requires_grad=True), use_reentrant=False)
    (frame,) = [obj for obj in gc.get_objects() if type(obj) is _CheckpointFrame]
    holders = [reference() for reference in frame.weak_holders]
    walk = walk_of(set(), [id(frame), id(frame.weak_holders)])
    graph = walk.run()
    assert graph.checkpoints == {id(holder): id(frame) for holder in holders}
    assert len(holders) == 1 and out.grad_fn is not None


def test_without_the_module_of_threads_they_go_by_number(program: Any) -> None:
    program.run(PROGRAM.replace("Barrier(5)", "Barrier(3)"))
    threads = [threading.Thread(target=program["evaluate"], name=name) for name in ("main", "job")]
    for thread in threads:
        thread.start()
    until_they_wait(program, [thread.ident for thread in threads])
    try:
        graph = walk_of({"train"}, threads=threads).run()
    finally:
        program["stop"].set()
        for thread in threads:
            thread.join()
    assert {each.thread for each in graph.frames.values()} == {None, f"id {threads[1].ident}"}
