"""What objects refer to, worked out for many at once: the same as for each alone."""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.outside.interpreter import RemoteInterpreter, measure
from memtriage.outside.memory import ProcessMemory
from memtriage.outside.objects import HIGHEST, RemoteHeap
from memtriage.outside.python_layout import layout_of
from memtriage.outside.references import ClassRows, References
from memtriage.outside.same_build import SharedFiles
from support.jobs import job_of
from support.outside_parts import moved
from support.remote_memory import SIZE, START, hostile_heap

_JOB = """
import collections, functools, json, logging, types, weakref

class Plain:
    def __init__(self):
        self.one, self.two = [1], {2: (3,)}

class WithDict(Plain):
    def __init__(self):
        super().__init__()
        vars(self)["more"] = object()

class Slotted:
    __slots__ = ("one", "two", "__weakref__", "__dict__")
    def __init__(self):
        self.one, self.two, self.three = [1], None, {4}

class Items(list):
    pass

class Table(dict):
    pass

class Record(collections.namedtuple("Record", "one two")):
    pass

@functools.lru_cache
def cached(value, other=([],), *, named=({},)):
    return [value]

def generate():
    kept = [5]
    yield kept

some = [Plain(), WithDict(), Slotted(), Items([[1], [2]]), Table(a=[1]), Record([1], [2])]
mixed = {1: [1], (2,): [2], "three": [3]}
queue = collections.deque(([n] for n in range(200)), maxlen=150)
generator = generate()
next(generator)
cached(1), cached(2)
names = [weakref.ref(some[0], lambda r: None), some[0].__init__, functools.partial(cached, [1])]
try:
    raise ValueError([6])
except ValueError as error:
    kept_error = error
print("ready", flush=True)
input()
"""


@pytest.mark.skipif(layout_of(sys.version_info[:2]) is None, reason="this Python is not known")
def test_the_same_references_as_of_each_object_alone() -> None:
    with job_of(_JOB) as job:
        layout = layout_of(sys.version_info[:2])
        assert layout is not None
        found = measure(layout)
        memory = ProcessMemory(job.pid)
        files = SharedFiles(job.pid, memory.mappings)
        heap = RemoteHeap(memory, layout, files.theirs)
        objects = RemoteInterpreter(heap, found, files.theirs).tracked()
        assert len(objects) > 5000
        rows = ClassRows(heap, lambda address: 1)
        of = rows.rows(memory.data[memory.places(objects) + 1])
        edges = References(heap, rows).of(objects, of)
        together: dict[int, list[int]] = {}
        for holder, child in zip(edges.holders.tolist(), edges.children.tolist(), strict=True):
            if 0 < child < HIGHEST:
                together.setdefault(holder, []).append(child)
        for at, address in enumerate(objects.tolist()):
            alone = [child for child in heap.referents(address) if 0 < child < HIGHEST]
            assert together.get(at, []) == alone, heap.type_of(address)


@pytest.mark.skipif(layout_of(sys.version_info[:2]) is None, reason="this Python is not known")
@pytest.mark.parametrize("kind", [list, dict])
def test_what_was_copied_before_it_moved_into_a_container_is_copied_again(kind: type) -> None:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    containers = [kind((f"{at} {of}", object()) for at in range(5)) for of in range(40)]
    memory = ProcessMemory(os.getpid())
    heap = RemoteHeap(memory, layout, lambda address: address)
    where = (ctypes.c_int64 * 4096)()
    array = (ctypes.addressof(where) + 4095) & ~4095
    memory.words(array, 512)
    offset = layout.list_items if kind is list else layout.dict_keys
    with moved(id(containers[7]) + offset, array, 400):
        objects = np.array([id(each) for each in containers], np.int64)
        rows = ClassRows(heap, lambda address: 1)
        edges = References(heap, rows).of(objects, rows.rows(memory.data[memory.places(objects) + 1]))
    for at, each in enumerate(containers):
        items = list(each.values() if isinstance(each, dict) else each)
        assert sorted(edges.children[edges.holders == at].tolist()) == sorted(map(id, items))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([11, 12, 13, 14]))
def test_hostile_structures(seed: int, pointers: bool, minor: int) -> None:
    chance, heap = hostile_heap(seed, pointers, minor)
    memory = heap.memory
    rows = ClassRows(heap, lambda address: 1)
    objects = START + 8 * np.array([chance.randrange(SIZE >> 3) for _ in range(100)], np.int64)
    edges = References(heap, rows).of(objects, rows.rows(memory.data[memory.places(objects) + 1]))
    assert len(edges.children) == len(edges.holders)
    for reader in (heap_reader for heap_reader in ("_lists", "_tuples", "_sets", "_dicts")):
        read = getattr(References(heap, rows), reader)
        for words_read, holders in read(objects[:4], np.arange(4)):
            assert len(words_read) == len(holders)
