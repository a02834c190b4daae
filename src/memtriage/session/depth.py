"""The recursion limit as the program sees it: without the frames that are below its own."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from memtriage.process.replaced import Replaced

_ENOUGH: Final = 1000
"""CPython's default limit, which is enough for the watch's work at the end of a program."""
_BUILT_IN_COUNTS: Final = int(sys.version_info < (3, 12))
"""What a call of a built-in function counts for the limit; a call of a Python function counts 1."""


class RecursionRoom:
    """Raises the recursion limit by the frames of the watch, and hides that.

    In its main thread, a program that recurses until `RecursionError` gets as deep as without a watch. In
    other threads it gets deeper by those frames.
    """

    def __init__(self) -> None:
        self._functions = Replaced(sys)
        self._get, self._set = sys.getrecursionlimit, sys.setrecursionlimit
        self._below = 0

    def make(self, *, by_exec: bool) -> None:
        """Make room for the frames up to the caller's, which calls the program.

        Args:
            by_exec: the program begins with the built-in `exec`; else with a Python function.
        """
        self._below = self._depth() + by_exec * _BUILT_IN_COUNTS

        @functools.wraps(self._get)
        def get() -> int:
            return self._get() - self._below

        @functools.wraps(self._set)
        def set_limit(limit: int, /) -> None:
            wanted = operator.index(limit)
            self._set(wanted + self._below if wanted > 0 else wanted)

        self._set(self._get() + self._below)
        self._functions.put(getrecursionlimit=get, setrecursionlimit=set_limit)

    def remove(self) -> None:
        """Restore the functions, and the limit that the program sees. May be called before `make`."""
        self._functions.restore()
        if self._below:
            self._set(self._get() - self._below)
            self._below = 0

    def _depth(self) -> int:
        """Depth of the frame that called `make`, as the interpreter counts; 0 if it does not say."""
        try:
            self._set(1)
        except RecursionError as refused:
            match = re.search(r"recursion depth (\d+)", str(refused))
            inside = 2 + _BUILT_IN_COUNTS  # this function, `make`, and what is called here
            return int(match[1]) - inside if match is not None else 0
        return 0


@contextmanager
def enough_depth() -> Iterator[None]:
    """Have at least the usual recursion limit in the block, whatever limit the program has set."""
    left = sys.getrecursionlimit()
    sys.setrecursionlimit(max(left, _ENOUGH))
    try:
        yield
    finally:
        sys.setrecursionlimit(left)
