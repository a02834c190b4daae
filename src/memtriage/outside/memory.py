"""Reading the memory of another process, in cached chunks. Never a write, never a signal.

What is not mapped reads as zeros. A stale or hostile pointer so leads to an object without a type, and to no
exception: only a process that is gone, or that must not be read, raises.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHUNK_BITS: Final = 18
CHUNK: Final = 1 << CHUNK_BITS
_CHUNK_MASK: Final = CHUNK - 1
_CHUNKS_AT_ONCE: Final = 64
MOST_CHUNKS: Final = (4 << 30) // CHUNK
"""Chunks that are kept: 4 GiB. Beyond it the cache starts again, which costs time and no rightness."""
LONGEST_READ: Final = 64 << 20
"""Bytes that one question may be about: an array of 8 million references."""
_HIGHEST: Final = 1 << 56
"""Above any address of a user's process, also with five-level page tables."""
_KERNEL_MAPPINGS: Final = ("[vvar", "[vsyscall")
_EMPTY: Final = memoryview(bytes(CHUNK)).cast("Q")


class OutsideError(Exception):
    """A process cannot be read from outside. The text is one line for the user."""


class GoneError(OutsideError):
    """The process ended."""


class ForbiddenError(OutsideError):
    """The kernel does not let this user read the process."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses of a process, as /proc/PID/maps has it.

    Attributes:
        start, end: addresses; `end` is the first one after it.
        readable: the process itself may read it, and no device is behind it.
        shared: other processes may see what is written there.
        path: the file that is mapped; empty for anonymous memory.
    """

    start: int
    end: int
    readable: bool
    shared: bool
    path: str


def parse_maps(text: str) -> list[Mapping]:
    """Return the mappings of a `/proc/PID/maps`, in the order of their addresses."""
    mappings = []
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        path = fields[5] if len(fields) > 5 else ""
        device = path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero"))
        readable = fields[1].startswith("r") and not device and not path.startswith(_KERNEL_MAPPINGS)
        mappings.append(Mapping(start, end, readable, fields[1].endswith("s"), path))
    return sorted(mappings, key=lambda mapping: mapping.start)


def read_maps(pid: int) -> list[Mapping]:
    """Return the mappings of a process.

    Raises:
        GoneError: there is no such process.
        ForbiddenError: it may not be read.
    """
    try:
        return parse_maps(Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape"))
    except PermissionError:
        raise ForbiddenError(f"process {pid} may not be read") from None
    except OSError:
        raise GoneError(f"process {pid} ended") from None


class Memory:
    """Words and bytes of an address space, which a subclass reads.

    Args:
        mappings: what may be read; anything else is zeros.
    """

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self.mappings = mappings
        self.bytes_read = 0
        self._readable = [mapping for mapping in mappings if mapping.readable]
        self._starts = [mapping.start for mapping in self._readable]
        self.chunks: dict[int, memoryview[int]] = {}

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return what is in each range (address, bytes): shorter, or empty, where it cannot be read."""
        raise NotImplementedError

    def word(self, address: int) -> int:
        """Return the 8 bytes at an address that is a multiple of 8; the rest of a division is ignored."""
        try:
            return self.chunks[address >> CHUNK_BITS][(address & _CHUNK_MASK) >> 3]
        except KeyError:
            return self._chunk(address >> CHUNK_BITS)[(address & _CHUNK_MASK) >> 3]

    def words(self, address: int, count: int) -> list[int]:
        """Return the words from an address on; of more than `LONGEST_READ` bytes the first ones."""
        count = min(count, LONGEST_READ >> 3)
        if count <= 0 or address < 0:
            return []
        found: list[int] = []
        while len(found) < count:
            chunk = self.chunk(address >> CHUNK_BITS)
            first = (address & _CHUNK_MASK) >> 3
            part = chunk[first : first + count - len(found)].tolist()
            found += part
            address += len(part) << 3
        return found

    def text_bytes(self, address: int, count: int) -> bytes:
        """Return bytes from any address on; of more than `LONGEST_READ` the first ones."""
        count = min(count, LONGEST_READ)
        if count <= 0 or address < 0:
            return b""
        within = address & _CHUNK_MASK
        if within + count <= CHUNK:
            return bytes(self.chunk(address >> CHUNK_BITS).cast("B")[within : within + count])
        start = address & ~7
        words = self.words(start, (address - start + count + 7) >> 3)
        raw = b"".join(word.to_bytes(8, "little") for word in words)
        return raw[address - start : address - start + count]

    def half(self, address: int) -> int:
        """Return the 4 bytes at an address that is a multiple of 4, unsigned."""
        return (self.word(address & ~7) >> ((address & 4) << 3)) & 0xFFFFFFFF

    def byte(self, address: int) -> int:
        """Return one byte."""
        return (self.word(address & ~7) >> ((address & 7) << 3)) & 0xFF

    def signed(self, address: int) -> int:
        """Return a word as a signed number."""
        value = self.word(address)
        return value - (1 << 64) if value >> 63 else value

    def chunk(self, number: int) -> memoryview[int]:
        """Return a chunk by its number (address divided by `CHUNK`), as words."""
        known = self.chunks.get(number)
        return self._chunk(number) if known is None else known

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Read many chunks with few calls of the kernel."""
        wanted = [number for number in numbers if number not in self.chunks]
        for first in range(0, len(wanted), _CHUNKS_AT_ONCE):
            self._fill(wanted[first : first + _CHUNKS_AT_ONCE])

    def _chunk(self, number: int) -> memoryview[int]:
        if not 0 <= number < _HIGHEST >> CHUNK_BITS:
            return _EMPTY
        self._fill([number])
        return self.chunks[number]

    def _fill(self, numbers: Sequence[int]) -> None:
        if len(self.chunks) + len(numbers) > MOST_CHUNKS:
            self.chunks.clear()
        parts = [(number, *part) for number in numbers for part in self._mapped(number << CHUNK_BITS)]
        buffers: dict[int, bytearray] = {}
        for (number, address, _), data in zip(
            parts, self._read([(address, size) for _, address, size in parts]), strict=True
        ):
            self.bytes_read += len(data)
            buffer = buffers.setdefault(number, bytearray(CHUNK))
            at = address - (number << CHUNK_BITS)
            buffer[at : at + len(data)] = data
        for number in numbers:
            filled = buffers.get(number)
            self.chunks[number] = _EMPTY if filled is None else memoryview(filled).cast("Q")

    def _mapped(self, start: int) -> list[tuple[int, int]]:
        """Return the readable ranges (address, bytes) of the chunk that starts at an address."""
        end = start + CHUNK
        at = max(0, bisect_right(self._starts, start) - 1)
        parts = []
        while at < len(self._readable) and self._readable[at].start < end:
            mapping = self._readable[at]
            first, last = max(start, mapping.start), min(end, mapping.end)
            if first < last:
                parts.append((first, last - first))
            at += 1
        return parts

    def mapping_at(self, address: int) -> Mapping | None:
        """Return the readable mapping that has an address."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._readable[at].end:
            return None
        return self._readable[at]


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory(Memory):
    """The memory of a running process.

    Args:
        pid: the process.

    Raises:
        GoneError: there is no such process; also raised by every later read, once it has ended.
        ForbiddenError: it may not be read.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(read_maps(pid))
        self.pid = pid
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self._at_once(ranges)
        if data is not None:
            return data
        return [self._one(address, size) for address, size in ranges]

    def _at_once(self, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Return all ranges, read with one call; None where not all of it can be read."""
        total = sum(size for _, size in ranges)
        buffer = bytearray(total)
        if self._call(buffer, ranges) != total:
            return None
        view, parts, at = memoryview(buffer), [], 0
        for _, size in ranges:
            parts.append(bytes(view[at : at + size]))
            at += size
        return parts

    def _one(self, address: int, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self._call(buffer, [(address, size)])])

    def _call(self, buffer: bytearray, ranges: Sequence[tuple[int, int]]) -> int:
        if not buffer:
            return 0
        own = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        local = _IoVector(ctypes.addressof(own), len(buffer))
        remote = (_IoVector * len(ranges))(*(_IoVector(address, size) for address, size in ranges))
        count = self._readv(self.pid, ctypes.byref(local), 1, ctypes.byref(remote), len(ranges), 0)
        if count >= 0:
            return int(count)
        error = ctypes.get_errno()
        if error == errno.ESRCH or (error == errno.EFAULT and not os.path.exists(f"/proc/{self.pid}")):
            raise GoneError(f"process {self.pid} ended while it was read")
        if error == errno.EPERM:
            raise ForbiddenError(f"process {self.pid} may not be read")
        return 0  # unmapped meanwhile
