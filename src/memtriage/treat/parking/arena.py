"""Host memory for parked storages: exact, page-locked in large chunks, kept for the next cycle.

Page-locking takes about as long as several copies of the same bytes, so what a cycle has used is kept until
it is released. A storage may be split over chunks, so any free bytes can be used, and none are lost to
fragments.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psutil
from torch import Tensor

from memtriage.model.units import size
from memtriage.observe.cgroup import cgroup_memory
from memtriage.treat.offload.pinned import PinnedMemory

CHUNK: Final = 256 << 20
"""Bytes that one call maps and page-locks: there are enough chunks for all threads, but few calls."""
ALIGNMENT: Final = 512
"""Every piece starts at a multiple of it, like blocks of the CUDA allocator, so copies run at full speed."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_THREADS: Final = 8
"""Threads that touch and page-lock: the driver serializes a part of the work, so more threads gain little."""


@dataclass(frozen=True, slots=True)
class ArenaPiece:
    """A run of bytes in one chunk."""

    chunk: Chunk
    start: int
    length: int

    @property
    def bytes(self) -> Tensor:
        """The bytes, a one-dimensional tensor of `torch.uint8`."""
        return self.chunk.memory.bytes[self.start : self.start + self.length]


Home = tuple[ArenaPiece, ...]
"""Where the values of one storage are on the host, in order."""


class Chunk:
    """One mapping with its free runs, by start; no two are adjacent."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.memory = PinnedMemory(nbytes, pin=pin)
        self.nbytes = nbytes
        self.free: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def unused(self) -> int:
        """Free bytes."""
        return sum(length for _, length in self.free)

    def take(self, wanted: int) -> list[ArenaPiece]:
        """Take up to `wanted` bytes (a multiple of the alignment), from the start of the chunk."""
        taken: list[ArenaPiece] = []
        while wanted and self.free:
            start, length = self.free[0]
            used = min(length, wanted)
            if used == length:
                del self.free[0]
            else:
                self.free[0] = (start + used, length - used)
            taken.append(ArenaPiece(self, start, used))
            wanted -= used
        return taken

    def give(self, piece: ArenaPiece) -> None:
        """Take a piece back, and join it with the free runs next to it."""
        runs = sorted([*self.free, (piece.start, piece.length)])
        joined = [runs[0]]
        for start, length in runs[1:]:
            last, before = joined[-1]
            if last + before == start:
                joined[-1] = (last, before + length)
            else:
                joined.append((start, length))
        self.free = joined


class HostArena:
    """Chunks of host memory for parked storages. Safe to use from several threads."""

    def __init__(self, *, pin: bool, chunk: int = CHUNK) -> None:
        self.pin = pin
        self._chunk = chunk
        self._chunks: list[Chunk] = []
        self._lock = threading.Lock()

    @property
    def owned(self) -> int:
        """Bytes mapped."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def used(self) -> int:
        """Bytes that hold parked storages."""
        return self.owned - sum(chunk.unused for chunk in self._chunks)

    def addresses(self) -> list[int]:
        """Where the chunks are."""
        return [chunk.memory.bytes.data_ptr() for chunk in self._chunks]

    def take(self, sizes: Sequence[int]) -> list[Home]:
        """Take a home for each size in bytes, or none at all.

        Raises:
            MemoryError: the host does not have that much. Then nothing is taken, and nothing new is kept.
        """
        with self._lock:
            rounded = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes]
            missing = sum(rounded) - sum(chunk.unused for chunk in self._chunks)
            if missing > 0:
                self._chunks += self._new_chunks(missing)
            return [self._home(nbytes) for nbytes in rounded]

    def give(self, homes: Iterable[Home]) -> None:
        """Take homes back. Their values must no longer be needed, and no copy may be running."""
        with self._lock:
            for home in homes:
                for piece in home:
                    piece.chunk.give(piece)

    def release(self) -> int:
        """Free empty chunks; return their bytes."""
        with self._lock:
            idle = [chunk for chunk in self._chunks if chunk.unused == chunk.nbytes]
            self._chunks = [chunk for chunk in self._chunks if chunk.unused != chunk.nbytes]
            for chunk in idle:
                chunk.memory.close()
            return sum(chunk.nbytes for chunk in idle)

    def _home(self, wanted: int) -> Home:
        pieces: list[ArenaPiece] = []
        for chunk in self._chunks:
            if not wanted:
                break
            taken = chunk.take(wanted)
            wanted -= sum(piece.length for piece in taken)
            pieces += taken
        return tuple(pieces)

    def _new_chunks(self, missing: int) -> list[Chunk]:
        _check_available(missing)
        whole, rest = divmod(missing, self._chunk)
        sizes = [self._chunk] * whole + ([-(-rest // _PAGE) * _PAGE] if rest else [])
        workers = max(1, min(_THREADS, len(sizes), len(os.sched_getaffinity(0))))
        futures: list[Future[Chunk]] = []
        try:
            with ThreadPoolExecutor(workers, thread_name_prefix="memtriage-pin") as pool:
                futures += [pool.submit(Chunk, nbytes, pin=self.pin) for nbytes in sizes]
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:  # all are done: leaving the pool waits for them
                if not future.cancelled() and future.exception() is None:
                    future.result().memory.close()
            raise


def _check_available(wanted: int) -> None:
    """Refuse too much memory: the kernel would map more than it has, and kill when the pages are written.

    Raises:
        MemoryError: the text says how much is available.
    """
    available = int(psutil.virtual_memory().available)
    source = "available on this machine"
    group = cgroup_memory()
    if group is not None and group.limit is not None and group.usage is not None:
        reclaimable = max(0, (group.file or 0) - (group.shmem or 0))
        left = group.limit - group.usage + reclaimable
        if left < available:
            available, source = left, f"left under the limit of cgroup v{group.version} {group.path}"
    if wanted > available:
        raise MemoryError(
            f"parking needs {size(wanted)} more host memory, and {size(max(0, available))} is {source}: park "
            "less, or raise the limit"
        )
