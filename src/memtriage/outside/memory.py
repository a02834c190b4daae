"""Read the memory of another process, in cached chunks, without writing to it or sending signals.

Unmapped memory reads as zeros, so a stale or hostile pointer leads to an object without a type, not to an
exception. An exception is only raised if the process is gone or may not be read.
"""

from __future__ import annotations

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

CHUNK_BITS: Final = 18
CHUNK: Final = 1 << CHUNK_BITS
_CHUNK_MASK: Final = CHUNK - 1
TAIL: Final = 4096
"""Bytes after a chunk that are kept with it: so the fields of an object are together wherever it begins."""
_SLOT_BYTES: Final = CHUNK + TAIL
SLOT: Final = _SLOT_BYTES >> 3
"""Words of a chunk and its tail."""
_CHUNKS_AT_ONCE: Final = 64
_LIVE_AT_ONCE: Final = 512
MOST_BYTES: Final = 4 << 30
"""Bytes that are copied. The rest reads as zeros, and `RemoteMemory.full` says so."""
READ_FIRST: Final = 512 << 20
"""Bytes that are copied in one go before they are asked for, so that they are of nearly the same instant."""
LONGEST_READ: Final = 64 << 20
"""Bytes that one question may be about: an array of 8 million references."""
_ADDRESS_BITS: Final = 48
"""Of the user's half of the address space on x86-64 and aarch64; what is above it is not mapped."""
_BLOCK_BITS: Final = 30
_BLOCK_CHUNKS: Final = 1 << _BLOCK_BITS - CHUNK_BITS
_UNKNOWN_BLOCK: Final = 0
_UNMAPPED_BLOCK: Final = 1
_KERNEL_MAPPINGS: Final = ("[vvar", "[vsyscall")

Words = npt.NDArray[np.int64]
"""Words, addresses or places of words. An address above 2^63 is negative, and nothing is there."""


class OutsideError(Exception):
    """A process cannot be read from outside. The text is one line for the user."""


class GoneError(OutsideError):
    """The process, or Python in it, ended or has not begun."""


class OtherBuildError(OutsideError):
    """The process has another build of Python or torch.

    Attributes:
        python: its interpreter; None where that is not known.
    """

    def __init__(self, text: str, python: str | None) -> None:
        super().__init__(text)
        self.python = python


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


class RemoteMemory(ABC):
    """Words and bytes of an address space, which a subclass reads.

    A chunk is copied when something in it is asked for. Questions about many addresses are arrays. A *place*
    is the position of a word in the copy (`data`), 0 where nothing is mapped.

    Args:
        mappings: what may be read; anything else is zeros.

    Attributes:
        data: the copy, as words.
        full: there was more to read than `MOST_BYTES`.
        failed: ranges that could not be read, because they were unmapped meanwhile.
        steady: the copy is of one instant, so nothing in it is to be copied again.
        bytes_read: that were copied.
    """

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self._take_mappings(mappings)
        self.bytes_read = 0
        self.full = self.steady = False
        self.failed = 0
        chunks = sum(2 + (mapping.end - mapping.start >> CHUNK_BITS) for mapping in self._readable)
        self._slots = min(1 + 2 * chunks, MOST_BYTES // _SLOT_BYTES)  # it may map more meanwhile
        self._used = 1
        copied = np.zeros((self._slots + 1) * SLOT, np.uint64)  # the kernel gives pages as they are written
        self.data: Words = copied.view(np.int64)
        self._flat: memoryview[int] = copied.data
        self.raw: memoryview[int] = copied.view(np.uint8).data
        self.chunks: dict[int, memoryview[int]] = {}
        self._first: dict[int, int] = {}  # place of a chunk's first word
        self._blocks = np.zeros(1 << _ADDRESS_BITS - _BLOCK_BITS, np.int32)
        self._slot_of = np.zeros((64, _BLOCK_CHUNKS), np.int32)
        self._slot_of[_UNKNOWN_BLOCK] = -1
        self._blocks_used = 2
        self._number_of = np.zeros(self._slots, np.int64)
        self._asked = np.zeros(self._slots, bool)
        self._put: list[tuple[Words, Words]] = []

    def _take_mappings(self, mappings: Sequence[Mapping]) -> None:
        self.mappings = mappings
        self._readable = [mapping for mapping in mappings if mapping.readable]
        self._starts = [mapping.start for mapping in self._readable]

    def map_again(self) -> None:
        """Look up again what is mapped: what was not may be asked for again."""
        self._blocks[self._blocks == _UNMAPPED_BLOCK] = _UNKNOWN_BLOCK
        known = self._slot_of[_UNMAPPED_BLOCK + 1 : self._blocks_used]
        known[known == 0] = -1

    def release(self) -> None:
        """Release the copy. Its readers refer to themselves, so they would keep it until a collection."""
        nothing = np.zeros(0, np.uint64)
        self.data, self._flat, self.raw = nothing.view(np.int64), nothing.data, nothing.view(np.uint8).data
        self.chunks.clear()
        self._blocks, self._slot_of = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)

    @abstractmethod
    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """Copy ranges (address, bytes, offset in `raw`); return how many bytes could be copied."""

    # --- one word ---

    def word(self, address: int) -> int:
        """Return the 8 bytes at an address that is a multiple of 8; the rest of a division is ignored."""
        try:
            return self.chunks[address >> CHUNK_BITS][(address & _CHUNK_MASK) >> 3]
        except KeyError:
            return self.chunk(address >> CHUNK_BITS)[(address & _CHUNK_MASK) >> 3]

    def words(self, address: int, count: int) -> list[int]:
        """Return the words from an address on; of more than `LONGEST_READ` bytes the first ones."""
        count = min(count, LONGEST_READ >> 3)
        if count <= 0 or address < 0:
            return []
        first = (address & _CHUNK_MASK) >> 3
        if first + count <= SLOT:
            return self.chunk(address >> CHUNK_BITS)[first : first + count].tolist()
        found: list[int] = []
        while len(found) < count:
            chunk = self.chunk(address >> CHUNK_BITS)
            first = (address & _CHUNK_MASK) >> 3
            part = chunk[first : min(first + count - len(found), CHUNK >> 3)].tolist()
            found += part
            address += len(part) << 3
        return found

    def text_bytes(self, address: int, count: int) -> bytes:
        """Return bytes from any address on; of more than `LONGEST_READ` the first ones."""
        count = min(count, LONGEST_READ)
        if count <= 0 or address < 0:
            return b""
        within = address & _CHUNK_MASK
        if within + count <= _SLOT_BYTES:
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

    def place(self, address: int) -> int:
        """Return the place of a word; 0 where nothing is mapped."""
        number = address >> CHUNK_BITS
        try:
            return self._first[number] + ((address & _CHUNK_MASK) >> 3)
        except KeyError:
            pass
        if not 0 <= number < 1 << _ADDRESS_BITS - CHUNK_BITS:
            return 0
        slot = int(self._slot_of[self._blocks[number >> _BLOCK_BITS - CHUNK_BITS], number % _BLOCK_CHUNKS])
        if slot < 0:
            self._fill([number])
            return self.place(address)
        if not slot:
            return 0
        self._first[number] = slot * SLOT
        self._asked[slot] = True
        return slot * SLOT + ((address & _CHUNK_MASK) >> 3)

    # --- many words ---

    def places(self, addresses: Words) -> Words:
        """Return the place of each address; 0 where nothing is mapped."""
        if not len(addresses):
            return addresses
        inside = (addresses >= 0) & (addresses < 1 << _ADDRESS_BITS)
        safe = addresses if inside.all() else np.where(inside, addresses, 0)
        slots = self._slots_at(safe)
        if (slots < 0).any():
            self._fill(np.unique(safe[slots < 0] >> CHUNK_BITS).tolist())
            slots = self._slots_at(safe)
        self._asked[slots] = True
        found: Words = slots * SLOT + ((safe & _CHUNK_MASK) >> 3)
        found[slots == 0] = 0
        return found

    def _slots_at(self, addresses: Words) -> Words:
        chunks = addresses >> CHUNK_BITS
        blocks = self._blocks[addresses >> _BLOCK_BITS]
        slots: Words = self._slot_of[blocks, chunks & _BLOCK_CHUNKS - 1].astype(np.int64)
        return slots

    def spans(self, starts: Words, counts: Words, step: int = 8) -> tuple[Words, Words]:
        """Return (words, which span each is of) of several spans of words, one after the other.

        Args:
            starts: the address of each span's first word.
            counts: words of each.
            step: bytes from one word to the next; may be negative.
        """
        total = int(counts.sum())
        which = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        if step == 8:
            places = self.places(starts)
            short = (starts & _CHUNK_MASK) + 8 * counts <= _SLOT_BYTES
            if short.all():
                where = places[which]
                found = self.data[np.where(where > 0, where + within, 0)]
                return found, which
        found = self.data[self.places(starts[which] + within * step)]
        return found, which

    # --- chunks ---

    def chunk(self, number: int) -> memoryview[int]:
        """Return a chunk and its tail by its number (address divided by `CHUNK`), as words."""
        known = self.chunks.get(number)
        if known is None:
            slot = self.place(number << CHUNK_BITS) // SLOT
            known = self._flat[slot * SLOT : (slot + 1) * SLOT]
            if slot:
                self.chunks[number] = known
        return known

    def asked(self) -> list[int]:
        """Return the numbers of the chunks that something was asked for in."""
        found: list[int] = self._number_of[1:][self._asked[1:]].tolist()
        return found

    def own_chunks(self) -> list[int]:
        """Return the numbers of the chunks where a process has its own data, up to `READ_FIRST` bytes.

        Large mappings, such as those of tensors, come last.
        """
        own = [mapping for mapping in self._readable if mapping.path in ("", "[heap]") and not mapping.shared]
        found: dict[int, None] = {}
        for mapping in sorted(own, key=lambda mapping: mapping.end - mapping.start):
            found |= dict.fromkeys(range(mapping.start >> CHUNK_BITS, (mapping.end - 1 >> CHUNK_BITS) + 1))
            if len(found) > READ_FIRST >> CHUNK_BITS:
                break
        return list(found)[: READ_FIRST >> CHUNK_BITS]

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Read many chunks, with few calls of the kernel."""
        starts = np.array(numbers, np.int64) << CHUNK_BITS
        self._fill((starts[self._slots_at(starts) < 0] >> CHUNK_BITS).tolist())

    def make_room(self, count: int) -> None:
        """Have the pages for so many chunks ready, so that copying them takes less time."""
        self.data[self._used * SLOT : (self._used + count) * SLOT] = 0

    def live(self, addresses: Words, count: int) -> Words:
        """Return words as they are now, beside the copy.

        Args:
            addresses: where to read.
            count: words at each; the rows of the answer.
        """
        found = np.zeros((len(addresses), count), np.int64)
        scratch = self._slots * SLOT
        for first in range(0, len(addresses), _LIVE_AT_ONCE):
            part = addresses[first : first + _LIVE_AT_ONCE].tolist()
            self.data[scratch : scratch + len(part) * count] = 0
            self._copy(
                [
                    (address, 8 * count, 8 * (scratch + at * count))
                    for at, address in enumerate(part)
                    if self.place(address)
                ]
            )
            words = self.data[scratch : scratch + len(part) * count]
            found[first : first + len(part)] = words.reshape(len(part), count)
        return found

    def agrees(self, other: RemoteMemory, number: int) -> bool:
        """Whether two copies of a chunk are the same."""
        return bool(np.array_equal(self.chunk(number), other.chunk(number)))

    def adopt(self, other: RemoteMemory) -> None:
        """Take the chunks that another copy has, and this one has not."""
        for slot in range(1, other._used):
            number = int(other._number_of[slot])
            starts = np.array([number], np.int64) << CHUNK_BITS
            if self._slots_at(starts)[0] < 0 and (own := self._take_slot()):
                self._register(number, own)
                self.data[own * SLOT : (own + 1) * SLOT] = other.data[slot * SLOT : (slot + 1) * SLOT]

    def put(self, addresses: Words, words: Words) -> None:
        """Have the copy contain words, a row of them at each address, whatever is copied again."""
        places = self.places(addresses)
        there = places > 0
        self._put.append((places[there, None] + np.arange(words.shape[1]), words[there]))
        self._put_again()

    def _put_again(self) -> None:
        for places, words in self._put:
            self.data[places] = words

    def copy_again(self, starts: Words, sizes: Words) -> None:
        """Copy some ranges once more, and nothing around them."""
        for start, size in zip(starts.tolist(), np.minimum(sizes, LONGEST_READ).tolist(), strict=True):
            if not 0 < start < 1 << _ADDRESS_BITS or size <= 0:
                continue
            for number in range(start >> CHUNK_BITS, (start + size - 1 >> CHUNK_BITS) + 1):
                first = number << CHUNK_BITS
                place = self.place(first)
                for address, length in self._mapped(first) if place else ():
                    begin, end = max(address, start), min(address + length, start + size)
                    if begin < end:
                        self._copy([(begin, end - begin, 8 * place + begin - first)])
        self._put_again()

    def _fill(self, numbers: Sequence[int]) -> None:
        for first in range(0, len(numbers), _CHUNKS_AT_ONCE):
            parts = []
            for number in numbers[first : first + _CHUNKS_AT_ONCE]:
                mapped = self._mapped(number << CHUNK_BITS)
                slot = self._take_slot() if mapped else 0
                self._register(number, slot)
                if slot:
                    start = slot * _SLOT_BYTES - (number << CHUNK_BITS)
                    parts += [(address, size, start + address) for address, size in mapped]
            if parts:
                self.bytes_read += self._copy(parts)

    def _take_slot(self) -> int:
        if self._used >= self._slots:
            self.full = True
            return 0
        self._used += 1
        return self._used - 1

    def _register(self, number: int, slot: int) -> None:
        at = number >> _BLOCK_BITS - CHUNK_BITS
        block = int(self._blocks[at])
        if block == _UNKNOWN_BLOCK:
            if not slot and not self._has_mapping(at << _BLOCK_BITS, (at + 1) << _BLOCK_BITS):
                self._blocks[at] = _UNMAPPED_BLOCK
                return
            block = self._blocks_used
            if block == len(self._slot_of):
                more = np.zeros((2 * block, _BLOCK_CHUNKS), np.int32)
                more[:block] = self._slot_of
                self._slot_of = more
            self._slot_of[block] = -1
            self._blocks_used += 1
            self._blocks[at] = block
        self._number_of[slot] = number
        if block != _UNMAPPED_BLOCK:
            self._slot_of[block, number % _BLOCK_CHUNKS] = slot

    def _has_mapping(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, end - 1) - 1
        return at >= 0 and self._readable[at].end > start

    def _mapped(self, start: int) -> list[tuple[int, int]]:
        """Return the readable ranges (address, bytes) of a chunk and its tail, by its start."""
        at = max(0, bisect_right(self._starts, start) - 1)
        parts = []
        inside = False
        while at < len(self._readable) and self._readable[at].start < start + _SLOT_BYTES:
            mapping = self._readable[at]
            first, last = max(start, mapping.start), min(start + _SLOT_BYTES, mapping.end)
            if first < last:
                parts.append((first, last - first))
                inside = inside or first < start + CHUNK
            at += 1
        return parts if inside else []

    def mapping_at(self, address: int) -> Mapping | None:
        """Return the readable mapping that has an address."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._readable[at].end:
            return None
        return self._readable[at]


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory(RemoteMemory):
    """The memory of a running process.

    Args:
        pid: the process.
        opened: a descriptor of its `/proc/PID/mem`, from a process that may read it where this one may not;
            None: the kernel is asked for each copy whether this process may.

    Raises:
        GoneError: there is no such process; also raised by every later read, once it has ended.
        ForbiddenError: it may not be read.
    """

    def __init__(self, pid: int, opened: int | None = None) -> None:
        super().__init__(read_maps(pid))
        self.pid, self.opened = pid, opened
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)

    def map_again(self) -> None:
        self._take_mappings(read_maps(self.pid))
        super().map_again()

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        total = sum(size for _, size, _ in parts)
        if self._call(parts) == total:
            return total
        copied = [self._call([part]) for part in parts]  # unmapped meanwhile: each for itself
        self.failed += sum(got < size for got, (_, size, _) in zip(copied, parts, strict=True))
        return sum(copied)

    def _call(self, parts: Sequence[tuple[int, int, int]]) -> int:
        if self.opened is not None:
            return sum(self._read(self.opened, *part) for part in parts)
        base = self.data.ctypes.data
        own = (_IoVector * len(parts))(*(_IoVector(base + at, size) for _, size, at in parts))
        remote = (_IoVector * len(parts))(*(_IoVector(address, size) for address, size, _ in parts))
        count = self._readv(self.pid, own, len(parts), remote, len(parts), 0)
        if count >= 0:
            return int(count)
        error = ctypes.get_errno()
        if error == errno.ESRCH or (error == errno.EFAULT and not os.path.exists(f"/proc/{self.pid}")):
            raise GoneError(f"process {self.pid} ended while it was read")
        if error == errno.EPERM:
            raise ForbiddenError(f"process {self.pid} may not be read")
        return 0  # unmapped meanwhile

    def _read(self, opened: int, address: int, size: int, at: int) -> int:
        try:
            count = os.preadv(opened, [self.raw[at : at + size]], address)
        except OSError:
            return 0  # unmapped meanwhile
        if not count and size:
            raise GoneError(f"process {self.pid} ended while it was read")
        return count
