"""Calling a function of the watch unseen by the program's tracer and profiler.

Those of `sys.settrace` and `sys.setprofile` would count the watch's calls and slow it down, and what they
raise would be lost. Code in Python cannot put them away unseen: by then the function that does so has been
entered, and `profile` fails where a call has no return or a return no call. C functions are not traced, and
so the whole of it is made of them.
"""

from __future__ import annotations

from codecs import strict_errors
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import call, itemgetter
from sys import getprofile, gettrace, setprofile, settrace
from typing import Any, Final

_WAYS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]] = (
    (gettrace, settrace),
    (getprofile, setprofile),
)


def untraced(work: Callable[[], object], then: Iterable[Callable[[], object]] = ()) -> Callable[[], bool]:
    """Return a C function that calls `work` once and returns False.

    This thread's tracer and profiler are off meanwhile. A profiler that no Python code can set again
    (`cProfile`) stays on. What `work` raises is raised once they are back.

    Args:
        work: what to call.
        then: what to call after that, with the tracer and the profiler on again. Read at that time.
    """
    failed: list[BaseException | None] = [None]
    attempt = _attempt(work, failed)
    next(attempt)
    taken: list[list[Any]] = [[] for _ in _WAYS]
    find: list[Any] = []
    remove: list[Any] = []
    restore: list[Any] = []
    for found, (get, put) in zip(taken, _WAYS, strict=True):
        find.append(partial(found.extend, filter(callable, map(call, (get,)))))
        remove.append(_each(map(put, map(itemgetter(0), zip(repeat(None), found, strict=False)))))
        restore.append(_each(map(put, found)))
    raise_again: Callable[[Any], object] = strict_errors  # which raises whatever exception it is given
    again = _each(map(raise_again, iter(failed.pop, None)))
    steps: Iterator[Any] = chain(find, remove, [partial(next, attempt, None)], restore, then, [again])
    return _each(map(call, steps))


def _attempt(work: Callable[[], object], failed: list[BaseException | None]) -> Iterator[None]:
    """Begun before the tracer is put away: what another thread raises as this goes on is caught as well."""
    try:
        yield
        work()
    except BaseException as error:
        failed.append(error)


def _each(results: Iterator[object]) -> Callable[[], bool]:
    """Return a C function that goes through an iterator. All that it gives must be false."""
    return partial(any, results)
