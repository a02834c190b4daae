"""The interpreter of another process: its modules, its frames, the objects that its collector follows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from memtriage.outside.memory import CHUNK, CHUNK_BITS, GoneError, OutsideError, ProcessMemory, Words
from memtriage.outside.objects import FRAME_OBJECT_OWNS, Frame, RemoteHeap
from memtriage.outside.own_memory import own_words
from memtriage.outside.python_layout import PythonLayout, is_special_build, layout_of, versions
from memtriage.outside.values import Translate

MOST_TRACKED: Final = 20_000_000
_MOST_THREADS: Final = 10_000
_MOST_FRAMES: Final = 20_000
_INTERPRETER_WORDS: Final = 1 << 15
_THREAD_WORDS: Final = 64
_GENERATIONS: Final = 3
_GENERATION_SIZE: Final = 24
_PART: Final = 4096
_TAGS: Final = 3
"""Bits of the collector's pointers that are marks of a running collection."""


@dataclass(frozen=True, slots=True)
class InterpreterLayout:
    """What is measured in this interpreter, beyond the table: offsets in bytes.

    Attributes:
        runtime: address of `_PyRuntime` in this process.
        modules, collector: in the interpreter's state: `sys.modules`, the first generation's list.
        permanent: from that list to that of `gc.freeze`.
        thread_id, native_id: in a thread's state.
    """

    runtime: int
    modules: int
    collector: int
    permanent: int
    thread_id: int
    native_id: int


def own_layout() -> PythonLayout:
    """Return the table of this Python.

    Raises:
        OutsideError: there is none.
    """
    layout = layout_of(sys.version_info[:2])
    if sys.implementation.name != "cpython" or sys.maxsize < 1 << 32 or layout is None or is_special_build():
        special = ", a debug or free-threaded build" if is_special_build() else ""
        raise OutsideError(
            f"reading from outside is not known for this Python ({sys.implementation.name} "
            f"{sys.version_info[0]}.{sys.version_info[1]}{special}): expected a 64-bit release of "
            f"CPython {' or '.join(versions())}; start the job with `memtriage run --listen`"
        )
    return layout


def measure(layout: PythonLayout) -> InterpreterLayout:
    """Find in this interpreter what the table does not have.

    Raises:
        OutsideError: something is not where it is looked for.
    """
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    state = _call("PyInterpreterState_Main")
    if own_words(runtime + layout.runtime_interpreters, 1)[0] != state:
        raise _unlike("_PyRuntime")
    words = own_words(state, _INTERPRETER_WORDS)
    modules = _call("PyImport_GetModuleDict")
    if modules not in words:
        raise _unlike("the modules")
    thread = own_words(_call("PyThreadState_Get"), _THREAD_WORDS)
    ident, native = threading.get_ident(), threading.get_native_id()
    if ident not in thread or native not in thread:
        raise _unlike("a thread")
    collector = _collector_offset(words)
    return InterpreterLayout(
        runtime=runtime,
        modules=8 * words.index(modules),
        collector=collector,
        permanent=_permanent_offset(state + collector),
        thread_id=8 * thread.index(ident),
        native_id=8 * thread.index(native),
    )


def _call(name: str) -> int:
    function = getattr(ctypes.pythonapi, name)
    function.restype = ctypes.c_void_p
    return int(function() or 0)


def _collector_offset(words: list[int]) -> int:
    """Find the three generations by their thresholds, which each has after its two pointers."""
    thresholds = list(gc.get_threshold())
    for at in range(len(words) - 3 * _GENERATIONS):
        part = words[at : at + 3 * _GENERATIONS]
        if [word & 0xFFFFFFFF for word in part[2::3]] == thresholds and all(part[0::3]) and all(part[1::3]):
            return 8 * at
    raise _unlike("the collector's lists")


def _permanent_offset(generations: int) -> int:
    """Find the list that follows the three generations, or a pointer to the first of them."""
    for offset in (_GENERATIONS * _GENERATION_SIZE, _GENERATIONS * _GENERATION_SIZE + 8):
        head = generations + offset
        following, before = own_words(head, 2)
        if before > 4096 and own_words(following & ~_TAGS, 2)[1] & ~_TAGS == head:
            return offset
    raise _unlike("the collector's lists")


def _unlike(what: str) -> OutsideError:
    return OutsideError(
        f"this build of Python {sys.version.split()[0]} keeps {what} elsewhere than the release of CPython: "
        "it cannot be read from outside"
    )


class RemoteInterpreter:
    """The main interpreter of a process.

    Raises:
        GoneError: Python is not running there (yet).
    """

    def __init__(self, heap: RemoteHeap, found: InterpreterLayout, translate: Translate) -> None:
        self._heap = heap
        self._memory = heap.memory
        self._found = found
        runtime = translate(found.runtime)
        self._state = self._memory.word(runtime + heap.layout.runtime_interpreters) if runtime else 0
        if not self._state or not self._memory.word(self._state + found.modules):
            raise GoneError("Python has not started in the process, or has ended")
        self.cut = False

    def modules(self) -> list[tuple[str, int]]:
        """Return (name, address) of the modules that are loaded."""
        return self._heap.named_items(self._memory.word(self._state + self._found.modules))

    def has_others(self) -> bool:
        """Whether the process has more than one interpreter; only the main one is read."""
        return bool(self._memory.word(self._state + self._heap.layout.interpreter_next))

    def frames(self, main_thread: int) -> tuple[list[tuple[int | None, Frame]], int]:
        """Return what runs, innermost first, and the outermost frame of the oldest thread.

        Args:
            main_thread: the process's number, which is the kernel's number of its main thread.

        Returns:
            (identifier of the thread or None for the main one, frame) of each; and the address of the last
            frame of the oldest thread, 0 if it has none or if frames of a thread break off. A thread that
            called or returned meanwhile may also seem to end early: only an outermost frame that two copies
            have is the real one.
        """
        memory, layout, heap = self._memory, self._heap.layout, self._heap
        frames, whole, outermost = [], True, 0
        thread = memory.word(self._state + layout.interpreter_threads)
        met: set[int] = set()  # threads and frames: lists that change meanwhile may lead back into themselves
        for _ in range(_MOST_THREADS):
            if not thread or thread in met:
                break
            met.add(thread)
            native = memory.word(thread + self._found.native_id)
            ident = None if native == main_thread else memory.word(thread + self._found.thread_id)
            at = memory.word(thread + layout.thread_frame)
            if layout.cframe_frame is not None:
                at = memory.word(at + layout.cframe_frame)
            outermost = 0
            for _ in range(_MOST_FRAMES):
                if not at or at in met:
                    break
                met.add(at)
                if memory.byte(at + layout.frame_owner) <= FRAME_OBJECT_OWNS:  # else it stands for C's stack
                    frame = heap.frame(at)
                    if frame is None:
                        break
                    frames.append((ident, frame))
                    outermost = frame.address
                at = memory.word(at + layout.frame_previous)
            whole = whole and not at
            thread = memory.word(thread + layout.thread_next)
        return frames, outermost if whole else 0

    def tracked(self, *, young: bool = False) -> Words:
        """Return the addresses of the objects that the cyclic collector follows.

        Args:
            young: leave out those that have outlived two collections, which are nearly all.
        """
        self.cut = False
        first = self._state + self._found.collector
        heads = (
            *(first + at * _GENERATION_SIZE for at in range(_GENERATIONS)),
            first + self._found.permanent,
        )
        seen = np.zeros(len(self._memory.data), bool)
        seen[0] = True  # nothing is mapped there
        to_object = self._heap.layout.collector_head
        members = [part for head in heads[: 2 if young else None] for part in self._follow(head, seen)]
        found: Words = np.concatenate([np.zeros(0, np.int64), *members])
        return found + to_object

    def _follow(self, head: int, seen: npt.NDArray[np.bool_]) -> Iterator[Words]:
        """Yield the members of a list of the collector, in parts, up to where it changed meanwhile.

        Args:
            head: address of the list.
            seen: which places were met in this list or others; what is met again ends the list.
        """
        chunks, read, clear, within = self._memory.chunks, self._memory.chunk, ~_TAGS, CHUNK - 1
        at, count = self._memory.word(head) & clear, 0
        while at != head and count < MOST_TRACKED:
            part: list[int] = []
            add = part.append
            for _ in range(_PART):
                add(at)
                try:
                    at = chunks[at >> CHUNK_BITS][(at & within) >> 3] & clear
                except KeyError:
                    at = read(at >> CHUNK_BITS)[(at & within) >> 3] & clear
                if at == head:
                    break
            members = np.array(part, np.uint64).view(np.int64)
            count += len(members)
            places = self._memory.places(members)
            new = ~seen[places]
            seen[places] = True
            if not new.all() or len(np.unique(places)) < len(places):
                self.cut = True
                yield members[: int(new.argmin())] if not new.all() else members[:0]
                return
            yield members
        self.cut = self.cut or at != head


class _WithValues:
    def __init__(self) -> None:
        self.first, self.second = [1], (2, 3)


class _Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = [1]


@contextlib.contextmanager
def _waiting_function() -> Iterator[int]:
    """A thread inside the function `_wait`: only what stands still can be compared."""
    arrived, gate = threading.Event(), threading.Lock()

    def _wait() -> None:
        arrived.set()
        gate.acquire()

    gate.acquire()
    thread = threading.Thread(target=_wait, daemon=True)
    thread.start()
    arrived.wait()
    try:
        yield int(thread.ident or 0)
    finally:
        gate.release()
        thread.join()


def check_self(layout: PythonLayout, found: InterpreterLayout) -> None:
    """Read objects of this process as if they were another's, and compare them with what Python says.

    Raises:
        OutsideError: something differs: this build is not read.
    """
    inside = "a cell's value"

    def function(argument: int, other: object = (4, 5), *, named: str = "n") -> str:
        return inside

    def generate() -> Iterator[int]:
        kept = plain
        yield len(str(kept))

    cached = functools.lru_cache(maxsize=5)(function)
    plain, slotted, generator = _WithValues(), _Slotted(), generate()
    next(generator)
    with_dict = _WithValues()
    own = vars(with_dict)
    values = [plain, slotted, "text"]
    table, mixed = {"one": plain, "two": slotted}, {1: plain, (2,): slotted}
    left, unbounded = deque(values * 30, maxlen=70), deque(values)
    some = {1, "two", inside}
    ident = threading.get_ident()
    # From here on: what is made after its chunk was copied would not be in the copy.
    memory = ProcessMemory(os.getpid())
    heap = RemoteHeap(memory, layout, lambda address: address)
    klass, plain_type = heap.type_of(id(plain)), heap.type_of(id(slotted))
    if klass is None or plain_type is None:
        raise _unlike("classes")
    frame = heap.frame(heap.generator_frame(id(generator)))
    held_names = dict(frame.variables) if frame is not None else {}
    function_words = heap.referents(id(function))
    checks: dict[str, bool] = {
        "lists": heap.list_items(id(values)) == [id(value) for value in values],
        "tuples": heap.tuple_items(id(_WithValues.__mro__)) == [id(base) for base in _WithValues.__mro__],
        "dicts": heap.dict_items(id(table)) == [(id(k), id(v)) for k, v in table.items()]
        and heap.dict_items(id(mixed)) == [(id(k), id(v)) for k, v in mixed.items()],
        "bounds": [
            heap.bound(id(one), of) for one in (left, unbounded, cached) if (of := heap.type_of(id(one)))
        ]
        == [70, None, 5],
        "sets": set(heap.set_items(id(some))) >= {id(value) for value in some},
        "deques": heap.deque_items(id(left)) == [id(value) for value in left],
        "strings": [heap.text(id(text)) for text in ("abc", "äöü", "€uro", "😀")]
        == ["abc", "äöü", "€uro", "😀"],
        "numbers": heap.number(id(ident)) == ident,
        "classes": (klass.name, klass.module) == (_WithValues.__name__, __name__)
        and klass.size == _WithValues.__basicsize__
        and list(klass.lineage) == [id(base) for base in _WithValues.__mro__],
        "attributes": heap.attributes(id(plain), klass)
        == [("first", id(plain.first)), ("second", id(plain.second))],
        "instances": heap.instance_dict(id(with_dict), klass) == id(own)
        and dict(heap.named_items(id(own))) == {name: id(value) for name, value in own.items()},
        "slots": heap.slot_name(id(slotted), plain_type, id(slotted.kept)) == "kept",
        "functions": {id(function.__closure__), id(function.__defaults__), id(function.__kwdefaults__)}
        <= set(function_words),
        "frames": frame is not None and frame.name == "generate" and held_names.get("kept") == id(plain),
        "modules": id(sys.modules) == memory.word(_call("PyInterpreterState_Main") + found.modules),
        "type sizes": (set.__basicsize__, deque.__basicsize__, list.__basicsize__, dict.__basicsize__)
        == (layout.set_size, layout.deque_size, layout.list_size, layout.dict_size),
    }
    memory.release()
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise _unlike(" and ".join(wrong))
    with _waiting_function() as ident:
        gc.collect()  # what was made here joins the oldest generation, whose list stands still
        memory = ProcessMemory(os.getpid())  # the thread's stack is new
        heap = RemoteHeap(memory, layout, lambda address: address)
        interpreter = RemoteInterpreter(heap, found, lambda address: address)
        threads, _ = interpreter.frames(threading.get_native_id())
        followed = set(interpreter.tracked().tolist())
        memory.release()
    if not any(thread == ident and frame.name == "_wait" for thread, frame in threads):
        raise _unlike("running functions")
    if not {id(values), id(table), id(plain.first)} <= followed:
        raise _unlike("the collector's lists")
