"""How much machine code the process has generated at run time. Reads `/proc`, Linux only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_WRITABLE_CODE: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .wx. \S+ \S+ 0\b", re.MULTILINE)
"""Anonymous mappings that may be written and executed. Libraries are mapped from files; closures of ctypes
are executed in mappings that are not writable."""


def generated_code() -> int | None:
    """Return the address space of generated code in bytes; None if it cannot be read.

    It includes oneDNN's kernels: a primitive for a new shape takes another mapping. Much of it is never
    touched and so not resident. Takes a millisecond.
    """
    try:
        # Not `open`: the program may have replaced it.
        matches = _WRITABLE_CODE.findall(Path("/proc/self/maps").read_bytes())
    except OSError:
        return None
    return sum(int(end, 16) - int(start, 16) for start, end in matches)
