"""Calling a function of the watch unseen by the program's tracer and profilers.

They would count the watch's calls and slow it down, and what they raise would be lost. Code in Python cannot
put them away unseen: by then the function that does so has been entered, and `profile` fails where a call has
no return or a return no call. C functions are not traced, and so the whole of it is made of them.
"""

from __future__ import annotations

import ctypes
import sys
from codecs import strict_errors
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, filterfalse, repeat, starmap
from operator import attrgetter, call, is_not, itemgetter
from sys import getprofile, gettrace, setprofile, settrace
from typing import Any, Final, NamedTuple


def untraced(work: Callable[[], object], then: Iterable[Callable[[], object]] = ()) -> Callable[[], bool]:
    """Return a C function that calls `work` once and returns False.

    This thread's tracer and profilers are off meanwhile. What `work` raises is raised once they are back.

    Args:
        work: what to call.
        then: what to call after that, with the tracer and the profilers on again. Read at that time.
    """
    failed: list[BaseException | None] = [None]
    attempt = _attempt(work, failed)
    next(attempt)
    find: list[Any] = []
    switch_off: list[Any] = []
    switch_on: list[Any] = []
    for tool in _TOOLS:
        tools: list[Any] = []
        find.append(partial(tools.extend, tool.installed()))
        switch_off.append(_each(map(call, map(itemgetter(0), zip(repeat(tool.remove), tools, strict=False)))))
        switch_on.append(_each(starmap(tool.install, tools)))
    raise_again: Callable[[Any], object] = strict_errors  # which raises whatever exception it is given
    again = _each(map(raise_again, iter(failed.pop, None)))
    steps: Iterator[Any] = chain(find, switch_off, [partial(next, attempt, None)], switch_on, then, [again])
    return _each(map(call, steps))


def call_untraced(work: Callable[[], object], then: Iterable[Callable[[], object]] = ()) -> None:
    """Call `work` as `untraced` does, at hardly any cost where this thread has no tracer and no profiler."""
    if gettrace() is not None or getprofile() is not None or _monitoring_profiler() is not None:
        untraced(work, then)()
        return
    try:
        work()
    finally:
        for each in then:
            each()


def _attempt(work: Callable[[], object], failed: list[BaseException | None]) -> Iterator[None]:
    """Begun before the tracer is put away: what another thread raises as this goes on is caught as well.

    Of work that is dropped before its turn nothing is kept: the traceback would lead to the frames of the
    program in which it was dropped, and `failed` would lead from it back to itself.
    """
    begun = False
    try:
        yield
        begun = True
        work()
    except BaseException as error:
        if begun or not isinstance(error, GeneratorExit):
            failed.append(error)


def _each(results: Iterator[object]) -> Callable[[], bool]:
    """Return a C function that goes through an iterator. All that it gives must be false."""
    return partial(any, results)


class _Tool(NamedTuple):
    """A tracer or profiler of the calling thread. All fields are C functions, or give what C functions need.

    Attributes:
        installed: gives an iterator of what to call `install` with; empty where there is none.
        remove: switches it off.
        install: switches it on again.
    """

    installed: Callable[[], Iterator[tuple[Any, ...]]]
    remove: Callable[[], object]
    install: Callable[..., object]


def _called(get: Callable[[], Any]) -> Iterator[Any]:
    """Iterate over the one result of a function, which is called when it is asked for."""
    return map(call, (get,))


_is_some: Final = partial(is_not, None)


def _monitoring_profiler() -> str | None:
    """Return the name of the profiler of `sys.monitoring`, such as `cProfile` from Python 3.12 on."""
    if sys.version_info < (3, 12):
        return None
    name: str | None = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
    return name


def _c_profiler() -> _Tool:
    """Return a profiler that is C code (`cProfile`), which `sys.setprofile` can remove but not install."""
    if sys.version_info >= (3, 12):  # a tool of `sys.monitoring`
        monitoring: Any = sys.monitoring
        tool = monitoring.PROFILER_ID
        names, events = partial(monitoring.get_tool, tool), partial(monitoring.get_events, tool)
        set_events = partial(monitoring.set_events, tool)
        events_alone = itemgetter(slice(1, None))
        return _Tool(
            lambda: map(events_alone, zip(filter(_is_some, _called(names)), _called(events), strict=False)),
            partial(set_events, 0),
            set_events,
        )
    # Prototypes of their own: the attributes of `ctypes.pythonapi` are the program's, too.
    state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    install = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.py_object)(
        ("PyEval_SetProfile", ctypes.pythonapi)
    )
    function = attrgetter("c_profilefunc")
    return _Tool(
        lambda: zip(
            map(function, map(_ThreadState311.from_address, _called(state))),
            map(ctypes.py_object, filterfalse(callable, filter(_is_some, _called(getprofile)))),
            strict=False,
        ),
        partial(setprofile, None),
        install,
    )


class _ThreadState311(ctypes.Structure):
    """The beginning of `PyThreadState` of CPython 3.11 (cpython/pystate.h)."""

    _fields_ = (
        ("prev", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("interp", ctypes.c_void_p),
        ("_initialized", ctypes.c_int),
        ("_static", ctypes.c_int),
        ("recursion_remaining", ctypes.c_int),
        ("recursion_limit", ctypes.c_int),
        ("recursion_headroom", ctypes.c_int),
        ("tracing", ctypes.c_int),
        ("tracing_what", ctypes.c_int),
        ("cframe", ctypes.c_void_p),
        ("c_profilefunc", ctypes.c_void_p),
    )


_TOOLS: Final = (
    _Tool(lambda: zip(filter(callable, _called(gettrace)), strict=False), partial(settrace, None), settrace),
    _Tool(
        lambda: zip(filter(callable, _called(getprofile)), strict=False),
        partial(setprofile, None),
        setprofile,
    ),
    _c_profiler(),
)
