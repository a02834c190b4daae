"""Machine code that the process generates at run time: how much there is. Reads `/proc`, Linux only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_WRITABLE_CODE: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .wx. \S+ \S+ 0\b", re.MULTILINE)
"""Anonymous mappings that may be written and executed. Libraries are mapped from files; the closures of
ctypes are never writable where they are executed."""


def generated_code() -> int | None:
    """Return the address space of generated code in bytes; None where it cannot be read.

    oneDNN's kernels lie there: a primitive for a shape that it has not met takes another mapping. Much of it
    is never touched and is in no resident set. Takes a millisecond.
    """
    try:
        # Not `open`: the program may have put a function of its own there.
        matches = _WRITABLE_CODE.findall(Path("/proc/self/maps").read_bytes())
    except OSError:
        return None
    return sum(int(end, 16) - int(start, 16) for start, end in matches)
