"""What the C library's malloc and Python's own object allocator hold, by their own counters.

CPU tensors of torch and numpy arrays come from malloc; Python's small objects (up to 512 bytes) come from
arenas that Python maps itself, outside malloc.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from memtriage.observe.host import resident
from memtriage.process.stdlib import os


class MallocInfo(msgspec.Struct, frozen=True, gc=False):
    """Counters of glibc's malloc over all arenas, in bytes (virtual: an untouched block counts in full).

    Attributes:
        in_use: handed out to callers, in arenas and as separate mappings (`uordblks + hblkhd`). Chunks in
            per-thread caches count as in use.
        free: free chunks inside arenas, including top chunks (`fordblks`). Pages that `malloc_trim` returned
            still count here: only the kernel knows how much of it is resident.
        mapped: the part of `in_use` in separate mappings, which return to the kernel when freed (`hblkhd`).
        from_kernel: obtained from the kernel: arenas and mappings (`arena + hblkhd`).
    """

    in_use: int
    free: int
    mapped: int
    from_kernel: int


def malloc_info() -> MallocInfo | None:
    """Read `mallinfo2()`. Under 1 us of glibc's time plus a walk over free chunks, 0.1 us each.

    Takes each arena's lock in turn, so it waits for threads inside malloc. None without glibc 2.33 or newer
    (the older `mallinfo` counts in 32 bits and is wrong above 2 GiB), and if malloc is another library's
    (jemalloc, tcmalloc, mimalloc preloaded), because glibc's counters then say nothing.
    """
    read = _mallinfo2()
    if read is None:
        return None
    info = read()
    mapped: int = info.hblkhd
    return MallocInfo(
        in_use=info.uordblks + mapped,
        free=info.fordblks,
        mapped=mapped,
        from_kernel=info.arena + mapped,
    )


def trim() -> bool:
    """Return the free pages of all arenas to the kernel; False if malloc is not glibc's.

    Takes each arena's lock while it walks the arena. Other Python threads run meanwhile.
    """
    if malloc_info() is None:
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def has_own_mapping(address: int, nbytes: int) -> bool | None:
    """Whether a block of memory is a chunk of glibc's malloc with its own mapping; None if unreadable.

    Such a chunk begins at a page's start, or after padding if an alignment was requested; the two words
    before the block are that padding and the chunk's length, with the bit `IS_MMAPPED` (malloc.c). Memory
    that a program maps itself (`mmap`, tensors made over it) has no such words. They are read through
    `/proc/self/mem`, where an address that is no longer mapped is an error, not a crash.
    """
    header_bytes = 2 * _WORD
    header = address - header_bytes
    present = resident(header, header_bytes)
    if not present:  # malloc has written its header; reading an absent page would make it resident
        return None if present is None else False
    words = _read_memory(header, header_bytes)
    if words is None:
        return None
    padding, length = (
        int.from_bytes(words[at : at + _WORD], sys.byteorder) for at in range(0, header_bytes, _WORD)
    )
    return _has_mapping(address, nbytes, padding, length)


def _has_mapping(address: int, nbytes: int, padding: int, length: int) -> bool:
    """Whether the two words before a block say that its chunk fills whole pages."""
    if not length & _IS_MMAPPED:
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    start = address - 2 * _WORD - padding
    whole = (length & ~_CHUNK_FLAGS) + padding
    if whole % page:
        whole += 2 * _WORD  # from glibc 2.43 on the length is without the two words
    return start % page == 0 and whole % page == 0 and start + whole >= address + nbytes


_WORD: Final = ctypes.sizeof(ctypes.c_size_t)
_IS_MMAPPED: Final = 2
_CHUNK_FLAGS: Final = 7


def _read_memory(address: int, count: int) -> bytes | None:
    """Bytes of this process's memory; fewer, or none, if parts are not mapped. None if forbidden."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.pread(memory, count, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(memory)


def python_arenas() -> int | None:
    """Bytes of the arenas that Python's object allocator has mapped; None if it does not say.

    It does not say with `PYTHONMALLOC=malloc` and in free-threaded builds. Arenas are filled from one end, so
    all of it is resident, except the unused part of the newest arena (1 MiB since Python 3.10). Takes about
    0.1 ms; reads the text that `sys._debugmallocstats` prints.
    """
    text = _debug_malloc_stats()
    return None if text is None else parse_arenas(text)


def python_in_use() -> int | None:
    """Bytes that Python's object allocator has handed out; None as for `python_arenas`.

    That is objects of up to 512 bytes: larger ones are malloc's. Takes 0.5 ms with a million objects.
    """
    text = _debug_malloc_stats()
    match = None if text is None else _HANDED_OUT.search(text)
    return None if match is None else int(match[1].replace(b",", b""))


_HANDED_OUT: Final = re.compile(rb"# bytes in allocated blocks *= *([\d,]+)")


def parse_arenas(text: bytes) -> int | None:
    """The line `82 arenas * 1048576 bytes/arena = ...` of CPython's allocator statistics, in bytes."""
    match = _ARENAS.search(text)
    return int(match[1]) * int(match[2]) if match else None


_ARENAS: Final = re.compile(rb"(\d+) arenas \* (\d+) bytes/arena")


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class _DlInfo(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


_PROBE: Final = 33 << 20
"""Above glibc's highest mmap threshold (32 MiB, `DEFAULT_MMAP_THRESHOLD_MAX`), so freeing it changes none."""


@functools.cache
def _mallinfo2() -> Callable[[], _MallInfo2] | None:
    """glibc's `mallinfo2`; None if it is missing or does not count what this process allocates."""
    if sys.platform != "linux":
        return None
    # PyDLL keeps the GIL: released at every mark, another thread could keep it for a switch interval.
    libc = ctypes.PyDLL(None)
    try:
        function = libc.mallinfo2
        # gperftools' tcmalloc exports its own mallinfo2, in which most fields are 0.
        if _object_of(libc, "mallinfo2") != _object_of(libc, "gnu_get_libc_version"):
            return None
    except AttributeError:  # musl, or glibc before 2.33
        return None
    function.restype = _MallInfo2
    function.argtypes = []
    read: Callable[[], _MallInfo2] = function
    # Another thread may free as much between two readings, but hardly each time.
    return read if any(_counts(libc, read) for _ in range(3)) else None


def _counts(libc: ctypes.PyDLL, read: Callable[[], _MallInfo2]) -> bool:
    """Whether a block from `malloc`, of whatever library, appears in the counters. Touches no page of it.

    The address of the symbol `malloc` does not show that: in a Python that is not position-independent it
    resolves into the program's own jump table.
    """
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    before = read()
    block = libc.malloc(_PROBE)
    after = read()
    libc.free(block)
    return bool(block) and after.uordblks + after.hblkhd - before.uordblks - before.hblkhd >= _PROBE


def _object_of(libc: ctypes.PyDLL, symbol: str) -> int | None:
    """Load address of the shared object in which a symbol of the global scope is defined."""
    info = _DlInfo()
    libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    address = ctypes.cast(libc[symbol], ctypes.c_void_p)
    base: int | None = info.dli_fbase if libc.dladdr(address, ctypes.byref(info)) else None
    return base


def written_text(write: Callable[[ctypes.c_void_p], object]) -> bytes | None:
    """Return what a C function writes to a stream; None without `open_memstream`."""
    libc = ctypes.PyDLL(None)
    try:
        open_memstream, close, free = libc.open_memstream, libc.fclose, libc.free
    except AttributeError:  # not in this C library
        return None
    open_memstream.restype = ctypes.c_void_p
    close.argtypes = free.argtypes = [ctypes.c_void_p]
    close.restype, free.restype = ctypes.c_int, None
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        return None
    try:
        write(ctypes.c_void_p(stream))
    finally:
        close(stream)  # sets `text` and `size`
    try:
        return ctypes.string_at(text, size.value)
    finally:
        free(text)


def _debug_malloc_stats() -> bytes | None:
    """CPython's allocator statistics as text; None if there are none."""
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return None
    try:
        write = ctypes.pythonapi._PyObject_DebugMallocStats
    except AttributeError:  # not exported by this build of Python
        return None
    write.argtypes, write.restype = [ctypes.c_void_p], ctypes.c_int
    return written_text(write)
