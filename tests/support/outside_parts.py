"""Parts of this process, read from outside as if it were another one."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from memtriage.observe.classes import variables_of
from memtriage.observe.loaded_modules import modules
from memtriage.outside.interpreter import InterpreterLayout, RemoteInterpreter, measure, own_layout
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import ProcessMemory, Words
from memtriage.outside.objects import Frame, RemoteHeap
from memtriage.outside.python_layout import PythonLayout, layout_of
from memtriage.outside.tensors import TorchReader
from memtriage.outside.torch_layout import TorchLayout, calibrate
from memtriage.outside.walk import RemoteWalk
from memtriage.outside.walker import RemoteWalker

known_python = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


@functools.cache
def own_build() -> tuple[PythonLayout, InterpreterLayout, TorchLayout]:
    """Where this process has what is read."""
    layout = own_layout()
    return layout, measure(layout), calibrate()


def same(address: int) -> int:
    """Where this process has what is at an address here."""
    return address


def heap_now() -> RemoteHeap:
    """The objects of this process as they are now."""
    return RemoteHeap(ProcessMemory(os.getpid()), own_build()[0], same)


class Part(RemoteInterpreter):
    """This process's interpreter as if it had only some modules, and followed only some objects.

    Args:
        heap: its objects.
        names: of the modules that it has. The others go by names of memtriage's, which no walk enters.
        tracked: addresses of what its collector follows.
    """

    def __init__(self, heap: RemoteHeap, names: Collection[str], tracked: Sequence[int] = ()) -> None:
        super().__init__(heap, own_build()[1], same)
        self._names = names
        self._tracked = tracked

    def modules(self) -> list[tuple[str, int]]:
        named = super().modules()
        return [(name if name in self._names else f"memtriage.{name}", at) for name, at in named]

    def tracked(self, *, young: bool = False) -> Words:
        return np.array(self._tracked, np.int64)


def never() -> bool:
    """A time that is not over."""
    return False


def walk_of(
    names: Collection[str],
    tracked: Sequence[int] = (),
    threads: Sequence[threading.Thread] = (),
    idents: Sequence[int] = (),
    is_late: Callable[[], bool] = never,
) -> RemoteWalk:
    """A walk over some modules of this process, some threads that wait, and what else is tracked.

    Args:
        names, tracked: as `Part` has them.
        threads: of these the first one is taken for the main thread.
        idents: of threads that `threading` did not start.
        is_late: whether the time for the walk is over.
    """
    heap = heap_now()
    part = Part(heap, names, tracked)
    frames: list[tuple[int | None, Frame]] = []
    if threads:
        wanted = {None, *idents, *(thread.ident for thread in threads[1:])}
        frames = [pair for pair in part.frames(threads[0].native_id or 0)[0] if pair[0] in wanted]
    torch = TorchReader(heap, own_build()[2])
    return RemoteWalk(heap, torch, part, RemoteModules(heap), same, frames, is_late)


def walker_now(is_late: Callable[[], bool] = never) -> RemoteWalker:
    """A walker over this process as it is now, which has entered nothing, and no module from elsewhere."""
    heap = heap_now()
    torch = TorchReader(heap, own_build()[2])
    walker = RemoteWalker(heap, torch, RemoteModules(heap), same, is_late)
    for module in modules():
        walker.modules.by_name[module.__name__] = id(module)
        walker.graph.index.fence(id(variables_of(module)))
    return walker


@contextmanager
def moved(head: int, array: int, nbytes: int) -> Iterator[None]:
    """Within the block, a container of this process has its array elsewhere, as if it had just grown.

    Args:
        head: where the address of its array is.
        array: where to copy it.
        nbytes: of it.
    """
    word = ctypes.c_int64.from_address(head)
    before = word.value
    try:
        ctypes.memmove(array, before, nbytes)
        word.value = array
        yield
    finally:
        word.value = before
