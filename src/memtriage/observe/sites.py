"""Where things were allocated, recorded only while a suspicion is followed.

Three existing recorders are switched on for a few steps, and then restored:

* the CUDA allocator's history, for device memory;
* `tracemalloc`, for Python objects: a tensor's Python object is made on the line that called the operation,
  and numpy's buffers and Python's own data are recorded, too;
* autograd's anomaly mode without its NaN check, in which every node remembers the stack of its forward call:
  that gives the line of a tensor that only the graph holds.

None of them changes what the program computes, and the program does not see them (`observe.modes`). They slow
down those few steps.
"""

from __future__ import annotations

import ast
import ctypes
import re
import sys
import tracemalloc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from memtriage.observe import cuda
from memtriage.observe.autograd import creation_site, is_node_type
from memtriage.observe.cuda import allocation_site, blamed_frame, is_of_user
from memtriage.observe.malloc import malloc_info
from memtriage.observe.modes import AnomalyMode, Tracing
from memtriage.observe.objects import instances
from memtriage.observe.origin import package_folder
from memtriage.observe.source_files import parse_file
from memtriage.observe.tensors import plain, storage_facts

_FRAMES = 24
_MALLOC_EACH = (1.6, 2.2)
"""Least and most bytes that malloc takes per byte of tracemalloc's tables: 1.73 to 1.97 were measured with
glibc. Outside these bounds, another thread has allocated or freed memory during the measurement."""
_OWN_FOLDER = package_folder()
_STACK_LINE = re.compile(r'File "(?P<filename>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')

SourceLine = tuple[str, int]
"""File and line."""

SiteTrace = Sequence[SourceLine]
"""File and line of each frame, innermost first."""


class SiteRecorder:
    """Switches the recorders on and off, and reads them.

    Args:
        script_root: folder of the user's script; sites below it are named relative to it.
    """

    def __init__(self, script_root: str | None) -> None:
        self._malloc_each = sum(_MALLOC_EACH) / 2
        self._root = script_root
        self._history = cuda.AllocationHistory()
        self._tracing = Tracing()
        self._anomaly = AnomalyMode()
        self._blocks: dict[int, str] | None = None
        self._objects: dict[int, tuple[weakref.ref[Any], SiteTrace]] = {}
        self._live: dict[SourceLine, int] = {}

    @property
    def recording(self) -> bool:
        """Whether a recorder that itself takes host memory is on."""
        return self._tracing.borrowed or self._anomaly.borrowed

    @property
    def on(self) -> bool:
        """Whether any recorder is on."""
        return self.recording or self._history.borrowed

    def tables(self) -> int:
        """Bytes that tracemalloc counts for its own tables; 0 if it is not on for the watch."""
        return tracemalloc.get_tracemalloc_memory() if self._tracing.borrowed else 0

    def in_malloc(self, tables: int) -> int:
        """Bytes that these tables add to malloc's counter, as measured when tables were last freed."""
        return round(tables * self._malloc_each)

    def install(self) -> None:
        """Prepare to record unseen. Called before the program runs."""
        self._tracing.install()

    def remove(self) -> None:
        """Undo `install`, and stop."""
        self.stop()
        self._tracing.remove()

    def start(self) -> None:
        """Have the CUDA allocator remember stacks, unless it already does."""
        self._history.start()

    def trace_objects(self) -> None:
        """Switch tracemalloc on unless it is on: Python objects then have an allocation site."""
        self._tracing.start(_FRAMES)

    def trace_nodes(self) -> None:
        """Note what tracemalloc knows, then make autograd nodes remember where they were made.

        Not at the same time: tracemalloc would follow every string of the stacks.
        """
        self._note_objects()
        self._anomaly.start()

    def in_backward(self, inside: bool) -> None:
        """Switch anomaly mode off while a backward runs: it would make new nodes refer to their origins."""
        self._anomaly.in_backward(inside)

    def collect(self) -> None:
        """Note all sites and stop recording. They stay readable until `forget`.

        A walk of the heap while tracemalloc follows every allocation takes twenty times as long, so what it
        knows is read before one.
        """
        self._note_objects()
        self._block_sites()
        self.stop()

    def _note_objects(self) -> None:
        """Sites of the tensors, nodes and other memory that were made since `trace_objects`."""
        if not self._tracing.borrowed:
            return  # not begun, or the program traces itself by now
        with self._tracing.reading():
            self._read_object_traces()
            snapshot = tracemalloc.take_snapshot()
        self._stop_tracing()  # it would also follow what the lines below allocate
        self._note_lines(snapshot)

    def _read_object_traces(self) -> None:
        tensor = getattr(sys.modules.get("torch"), "Tensor", ())
        # Not by a `KindTable`: tracemalloc follows whatever deciding on thousands of types allocates.
        for obj in instances(lambda kind: issubclass(kind, tensor) or is_node_type(kind)):
            trace = _object_trace(obj)
            if trace:
                with suppress(TypeError):  # nodes of C++ take no weak reference
                    self._objects[id(obj)] = weakref.ref(obj), trace

    def _note_lines(self, snapshot: tracemalloc.Snapshot) -> None:
        for stat in snapshot.statistics("traceback"):
            # No names yet: they are in the source, which takes long to parse, and few are needed.
            frames = _frames([(frame.filename, frame.lineno) for frame in reversed(stat.traceback)])
            own = next((at for at, frame in enumerate(frames) if _OWN_FOLDER in frame["filename"]), None)
            blamed = blamed_frame(frames[:own], self._root)
            # What memtriage calls is its own work, such as an estimate, unless it calls a user's line.
            if blamed is not None and (own is None or is_of_user(blamed, self._root)):
                line = blamed["filename"], blamed["line"]
                self._live[line] = self._live.get(line, 0) + stat.size

    def forget(self) -> None:
        """Drop what `collect` noted."""
        self._objects.clear()
        self._live.clear()
        self._blocks = None

    def stop(self) -> None:
        """Restore everything. May be called twice."""
        self._stop_tracing()
        self._anomaly.stop()
        self._history.stop()

    def _stop_tracing(self) -> None:
        tables, before = self.tables(), malloc_info()
        self._tracing.stop()
        after = malloc_info()
        if tables and before is not None and after is not None:
            least, most = _MALLOC_EACH
            self._malloc_each = min(max(least, (before.in_use - after.in_use) / tables), most)

    def site_of(self, obj: Any) -> str | None:
        """`file.py:line in function` of a tensor's memory, a node's forward call or a Python object."""
        facts = storage_facts(obj) if issubclass(type(obj), sys.modules["torch"].Tensor) else None
        is_older = False
        if facts is not None and facts.device != "cpu":
            blocks = self._block_sites()
            if facts.address in blocks:
                return blocks[facts.address]
            is_older = bool(blocks)
        node = plain(obj).grad_fn if facts is not None else obj
        if node is not None and hasattr(node, "next_functions"):
            stack = creation_site(node)
            if stack:
                return allocation_site(list(reversed(_parsed(stack))), self._root)
        if is_older:
            return None  # the block is older than the recording: the object is a new view of it
        noted = self._objects.get(id(obj))
        # The noted object may be gone by now, and another one may have its address.
        return self.named(noted[1]) if noted is not None and noted[0]() is obj else None

    def live_by_line(self) -> dict[SourceLine, int]:
        """Bytes of Python objects and numpy arrays made while tracemalloc was on, by the user's line."""
        return dict(self._live)

    def named(self, trace: SiteTrace) -> str | None:
        """`file.py:line in function` of the responsible line; None for an object that the census made."""
        return named_line(trace, self._root)

    def _block_sites(self) -> dict[int, str]:
        if self._blocks is None:
            self._blocks = {}
            for segment in cuda.segments(script_root=self._root) or []:
                for block in segment.blocks:
                    if block.site is not None:
                        self._blocks[block.address] = block.site
        return self._blocks


def named_line(trace: SiteTrace, root: str | None) -> str | None:
    """Return `file.py:line in function` of the responsible line; `root` is the folder of the script."""
    return allocation_site(_frames(trace), root)


def _frames(trace: SiteTrace) -> list[dict[str, Any]]:
    """Frames of a trace; none of an object that the census itself made."""
    if trace and _OWN_FOLDER in trace[0][0]:
        return []
    return [_LineFrame(filename=filename, line=line) for filename, line in trace]


class _LineFrame(dict[str, Any]):
    """A frame of tracemalloc, which has no function names: they are looked up in the source when needed."""

    def __missing__(self, key: str) -> str:
        if key != "name":
            raise KeyError(key)
        return enclosing_function(self["filename"], self["line"])

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self or key == "name" else default


def _object_trace(obj: Any) -> SiteTrace | None:
    """tracemalloc's trace of an object.

    `tracemalloc.get_object_traceback` of CPython 3.11 looks 16 bytes before the object. But the memory of an
    object with a managed `__dict__`, such as a tensor, begins 32 bytes before. The C function that it calls
    takes the address itself.
    """
    object_traceback = tracemalloc.get_object_traceback(obj)
    if object_traceback is not None:
        return [(frame.filename, frame.lineno) for frame in reversed(object_traceback)]
    if type(obj).__flags__ & _MANAGED_DICT and _get_traceback is not None:
        raw: SiteTrace | None = _get_traceback(0, id(obj) - _MANAGED_PREFIX)
        return raw
    return None


_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT
_MANAGED_PREFIX = 32  # the collector's header and the two words of a managed dict
_get_traceback = getattr(ctypes.pythonapi, "_PyTraceMalloc_GetTraceback", None)
if _get_traceback is not None:
    _get_traceback.restype = ctypes.py_object
    _get_traceback.argtypes = [ctypes.c_uint, ctypes.c_size_t]


def _parsed(stack: list[str]) -> list[dict[str, Any]]:
    """Frames, outermost first, of what `traceback.format_stack` made."""
    frames = []
    for entry in stack:
        match = _STACK_LINE.search(entry)
        if match:
            frame: dict[str, Any] = dict(match.groupdict())
            frames.append({**frame, "line": int(frame["line"])})
    return frames


@lru_cache(maxsize=4096)
def enclosing_function(filename: str, line: int) -> str:
    """Name of the innermost function around a line (`<module>` outside any)."""
    best, start = "<module>", 0
    for first, last, name in _functions(filename):
        if first <= line <= last and first > start:
            best, start = name, first
    return best


@lru_cache(maxsize=64)
def _functions(filename: str) -> list[tuple[int, int, str]]:
    tree = parse_file(filename)
    return [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
