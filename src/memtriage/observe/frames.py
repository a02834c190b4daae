"""Read local variables of running functions without leaving a trace in the frame.

Before Python 3.13, `frame.f_locals` of a running function fills a dict that the frame keeps, so every tensor
in it lives until the function returns. And `gc.get_referents(frame)` of a running frame is empty (CPython
3.11 `frame_traverse` returns early unless the frame object owns its data). So:

* 3.13 and newer: `frame.f_locals` is a write-through proxy (PEP 667) and keeps nothing.
* 3.12: `PyFrame_GetVar` of the C API reads one variable without the dict.
* 3.11: the interpreter frame's `localsplus` array is read in place; its layout is frozen for 3.11
  (`Include/internal/pycore_frame.h`).

If none of these is available (another implementation), no locals are returned: unknown, never wrong.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FrameType
from typing import Any, TypeVar

from memtriage.process.collector import collector_paused
from memtriage.process.stdlib import threading

Ident = TypeVar("Ident", int, int | None)
Wanted = Callable[[str], object]
"""Returns, as a truth value, whether to read a variable of this name."""


def frame_locals(frame: FrameType, wanted: Wanted | None = None) -> list[tuple[str, Any]]:
    """Names and values of the bound local, cell and free variables of a running frame.

    Empty for module and class bodies, whose variables are in a namespace dict.

    Args:
        frame: the frame.
        wanted: reads only these variables, which is much cheaper on Python 3.12; None for all.
    """
    code = frame.f_code
    if not code.co_flags & 0x0001:  # CO_OPTIMIZED: only functions have fast locals
        return []
    return _read(frame, code, wanted or (lambda name: True))


def stacks() -> dict[int, list[FrameType]]:
    """Return the frames of each thread, the innermost first, by its identifier.

    Those of the calling thread begin with the caller's caller. Otherwise the caller would have its own frame
    in a variable: a cycle, which keeps the variables of all its callers alive until the next collection.

    Automatic collection is off meanwhile, in which other threads would get their turn. `f_back` may make an
    object of a frame: CPython 3.11 collects just then, and uses the frame afterwards, though its thread may
    have ended, which ends the process. CPython before 3.11.9 and 3.12.3 holds a lock of the interpreter while
    it lists the threads, and would hang forever in one that needs that lock (gh-106883).
    """
    with collector_paused():
        innermost = sys._current_frames()
        asking = sys._getframe(1)
        innermost[threading.get_ident()] = asking.f_back or asking  # a module's body has no caller
        return {ident: list(_outward(frame)) for ident, frame in innermost.items()}


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def alike_named(threads: Mapping[Ident, str]) -> dict[Ident, str]:
    """Names of threads, by identifier; names that only differ in numbers become one, with asterisks.

    Such threads hold the same kind of things.
    """
    patterns = {ident: re.sub(r"\d+", "*", name) for ident, name in threads.items()}
    several = {pattern for pattern, number in Counter(patterns.values()).items() if number > 1}
    return {ident: patterns[ident] if patterns[ident] in several else name for ident, name in threads.items()}


def running_frames(skip_file: Callable[[str], bool]) -> Iterator[tuple[str | None, FrameType]]:
    """(thread name or None, frame) of every running function, innermost first.

    None means the main thread or the calling one: some frameworks (Ray Train) train in a separate thread,
    which then makes the marks and takes the censuses.

    Args:
        skip_file: returns whether to leave out frames of a file (memtriage's own).
    """
    names = alike_named({t.ident: t.name for t in threading.enumerate()})
    programs_own = (threading.main_thread().ident, threading.get_ident())
    for ident, stack in reversed(stacks().items()):  # the oldest thread first
        name = None if ident in programs_own else names.get(ident, f"id {ident}")
        for frame in stack:
            if not skip_file(frame.f_code.co_filename):
                yield name, frame


def _variable_names(code: CodeType) -> tuple[str, ...]:
    """Names in `localsplus` order: arguments and locals, cells that are not arguments, free variables."""
    locals_ = code.co_varnames
    cells = tuple(name for name in code.co_cellvars if name not in locals_)
    return locals_ + cells + code.co_freevars


def _unwrapped(name: str, value: Any) -> tuple[str, Any] | None:
    if type(value) is CellType:
        try:
            return name, value.cell_contents
        except ValueError:  # an empty cell: not yet assigned
            return None
    return name, value


def _read_proxy(frame: FrameType, code: CodeType, wanted: Wanted) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in frame.f_locals.items() if wanted(name)]


def _read_by_api(frame: FrameType, code: CodeType, wanted: Wanted) -> list[tuple[str, Any]]:
    variables = []
    get = ctypes.pythonapi.PyFrame_GetVar
    get.restype = ctypes.py_object
    get.argtypes = [ctypes.py_object, ctypes.py_object]
    for name in filter(wanted, _variable_names(code)):
        try:
            variables.append((name, get(frame, name)))
        except NameError:  # not bound at this point of the function
            continue
    return variables


@functools.cache
def _frame_object_311(variables: int) -> Any:
    """`struct _frame` of CPython 3.11, whose interpreter frame has this many variables."""
    inner_fields = [
        ("f_func", ctypes.c_void_p),
        ("f_globals", ctypes.c_void_p),
        ("f_builtins", ctypes.c_void_p),
        ("f_locals", ctypes.c_void_p),
        ("f_code", ctypes.c_void_p),
        ("frame_obj", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
        ("prev_instr", ctypes.c_void_p),
        ("stacktop", ctypes.c_int),
        ("is_entry", ctypes.c_bool),
        ("owner", ctypes.c_char),
        ("localsplus", ctypes.py_object * variables),
    ]
    inner = type("InterpreterFrame311", (ctypes.Structure,), {"_fields_": inner_fields})
    outer_fields = [
        ("ob_refcnt", ctypes.c_ssize_t),
        ("ob_type", ctypes.c_void_p),
        ("f_back", ctypes.c_void_p),
        ("f_frame", ctypes.POINTER(inner)),
    ]
    return type("FrameObject311", (ctypes.Structure,), {"_fields_": outer_fields})


def _read_localsplus(frame: FrameType, code: CodeType, wanted: Wanted) -> list[tuple[str, Any]]:
    names = _variable_names(code)
    outer = _frame_object_311(len(names)).from_address(id(frame))
    if not outer.f_frame or outer.f_frame.contents.f_code != id(code):
        return []  # the layout is unknown
    variables = []
    for index, name in enumerate(names):
        if not wanted(name):
            continue
        try:
            # One expression without a call or a collection, in which no other thread can run: if the frame is
            # another thread's, its function could end or release the value at any other point.
            with collector_paused():
                value = outer.f_frame.contents.localsplus[index]
        except ValueError:  # not bound at this point of the function
            continue
        pair = _unwrapped(name, value)
        if pair is not None:
            variables.append(pair)
    return variables


def _reader() -> Callable[[FrameType, CodeType, Wanted], list[tuple[str, Any]]]:
    if sys.implementation.name != "cpython":
        return lambda frame, code, wanted: []
    if sys.version_info >= (3, 13):
        return _read_proxy
    if sys.version_info >= (3, 12):
        return _read_by_api
    return _read_localsplus


_read = _reader()
