"""glibc's malloc arena by arena: what is free, what a trim would return."""

from __future__ import annotations

import ctypes
import re
import xml.etree.ElementTree as ElementTree
from typing import Final

import msgspec

from memtriage.observe.malloc import malloc_info, written_text
from memtriage.process.stdlib import os


class MallocArena(msgspec.Struct, frozen=True, gc=False):
    """One arena of malloc: the main one (number 0, the brk heap) or one of the threads'. Sizes in bytes.

    Attributes:
        free: bytes in free chunks, including the top one.
        trimmable: whole pages inside free chunks: what `malloc_trim(0)` returns, unless already returned.
    """

    free: int
    trimmable: int


def malloc_arenas() -> tuple[MallocArena, ...]:
    """Every arena, from `malloc_info(3)`; empty if malloc is not glibc's.

    It walks all free chunks, as `mallinfo2` does, and takes each arena's lock in turn.
    """
    if malloc_info() is None:
        return ()
    libc = ctypes.PyDLL(None)
    libc.malloc_info.argtypes, libc.malloc_info.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    text = written_text(lambda stream: libc.malloc_info(0, stream))
    return () if text is None else parse_arenas(text, os.sysconf("SC_PAGE_SIZE"))


def parse_arenas(text: bytes, page: int) -> tuple[MallocArena, ...]:
    """Read the XML of `malloc_info(3)`; empty if it is something else.

    On average, a free chunk of `n` bytes at an unknown address contains `n - page` bytes in whole pages (none
    below a page). Bins of large chunks are described by their smallest, largest, number and sum.
    """
    try:
        root = ElementTree.fromstring(_CONTROL.sub(b"", text))
    except ElementTree.ParseError:
        return ()
    return tuple(_arena(heap, page) for heap in root.iter("heap"))


_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_MINIMUM_TOP: Final = 32
"""`MINSIZE` of malloc.c on 64-bit machines: a trim leaves this many bytes at the top."""


def _arena(heap: ElementTree.Element, page: int) -> MallocArena:
    totals = {element.get("type"): element for element in heap.findall("total")}
    rest, fast = totals.get("rest"), totals.get("fast")
    binned = [*heap.findall("sizes/size"), *heap.findall("sizes/unsorted")]
    # `rest` counts the bins and the top chunk; `sizes` also has the fast bins, whose chunks stay small.
    in_bins = sum(_number(element, "total") for element in binned) - _number(fast, "size")
    top = max(_number(rest, "size") - in_bins, 0)
    pages = sum(max(_number(element, "total") - page * _number(element, "count"), 0) for element in binned)
    return MallocArena(
        free=_number(rest, "size") + _number(fast, "size"),
        trimmable=pages + max(top - page - _MINIMUM_TOP, 0),
    )


def _number(element: ElementTree.Element | None, name: str) -> int:
    return 0 if element is None else int(element.get(name) or 0)
