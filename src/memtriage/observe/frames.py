"""Local variables of running functions, read without leaving a trace in the frame.

Before Python 3.13 `frame.f_locals` of a running function fills a dict that the frame keeps, so every
tensor in it lives on until the function returns; and `gc.get_referents(frame)` of a frame that still runs
is empty (CPython 3.11 `frame_traverse` returns early unless the frame object owns its data). So:

* 3.13 and newer: `frame.f_locals` is a write-through proxy (PEP 667) and keeps nothing.
* 3.12: `PyFrame_GetVar` of the C API reads one variable without the dict.
* 3.11: the interpreter frame's `localsplus` array is read in place; its layout is frozen for 3.11
  (`Include/internal/pycore_frame.h`).

Where none of these can be had (another implementation), no locals are returned: unknown, never wrong.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType
from typing import Any

Wanted = Callable[[str], object]
"""Says of a variable's name whether it is to be read (by truth)."""


def frame_locals(frame: FrameType, wanted: Wanted | None = None) -> list[tuple[str, Any]]:
    """Names and values of the local, cell and free variables that are bound in a running frame.

    Empty for module and class bodies, whose variables live in a namespace dict of their own.

    Args:
        frame: the frame.
        wanted: reads only these variables, which is much cheaper on Python 3.12; None for all.
    """
    code = frame.f_code
    if not code.co_flags & 0x0001:  # CO_OPTIMIZED: only functions have fast locals
        return []
    return _read(frame, code, wanted or _every)


def _every(name: str) -> bool:
    return True


def running_frames(skip_file: Callable[[str], bool]) -> Iterator[tuple[str | None, FrameType]]:
    """(thread name or None for the main thread, frame) of every running function, innermost first.

    Args:
        skip_file: says of a code object's file name whether its frames are left out (memtriage's own).
    """
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    for ident, top in sys._current_frames().items():
        name = None if ident == main else names.get(ident, f"id {ident}")
        frame: FrameType | None = top
        while frame is not None:
            if not skip_file(frame.f_code.co_filename):
                yield name, frame
            frame = frame.f_back


def _variable_names(code: CodeType) -> tuple[str, ...]:
    """Names in `localsplus` order: arguments and locals, cells that are no arguments, free variables."""
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
    found = []
    get = ctypes.pythonapi.PyFrame_GetVar
    get.restype = ctypes.py_object
    get.argtypes = [ctypes.py_object, ctypes.py_object]
    for name in filter(wanted, _variable_names(code)):
        try:
            found.append((name, get(frame, name)))
        except NameError:  # not bound at this point of the function
            continue
    return found


class _InterpreterFrame311(ctypes.Structure):
    _fields_ = [
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
    ]


class _FrameObject311(ctypes.Structure):
    _fields_ = [
        ("ob_refcnt", ctypes.c_ssize_t),
        ("ob_type", ctypes.c_void_p),
        ("f_back", ctypes.c_void_p),
        ("f_frame", ctypes.POINTER(_InterpreterFrame311)),
    ]


def _read_localsplus(frame: FrameType, code: CodeType, wanted: Wanted) -> list[tuple[str, Any]]:
    inner = _FrameObject311.from_address(id(frame)).f_frame
    if not inner or inner.contents.f_code != id(code):
        return []  # not the layout that this reader knows
    names = _variable_names(code)
    base = ctypes.addressof(inner.contents) + ctypes.sizeof(_InterpreterFrame311)
    slots = (ctypes.c_void_p * len(names)).from_address(base)
    found = []
    for name, address in zip(names, list(slots), strict=True):
        if address and wanted(name):
            pair = _unwrapped(name, ctypes.cast(address, ctypes.py_object).value)
            if pair is not None:
                found.append(pair)
    return found


def _reader() -> Callable[[FrameType, CodeType, Wanted], list[tuple[str, Any]]]:
    if sys.implementation.name != "cpython":
        return lambda frame, code, wanted: []
    if sys.version_info >= (3, 13):
        return _read_proxy
    if sys.version_info >= (3, 12):
        return _read_by_api
    return _read_localsplus


_read = _reader()
