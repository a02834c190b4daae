"""Which kernel steps a tile: the compiled one if it exists and knows the types, else torch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import torch

from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.native.library import Crew, CrewJob, Library, takes
from memtriage.treat.offload.pipeline import Job
from memtriage.treat.offload.tiles import ALIGNMENT

SPARE_FROM: Final = 8
"""With this many threads, one fewer keeps the memory bus as busy, and the moving thread needs a core."""


def crew_size(threads: int) -> int:
    """Number of torch's threads that compute.

    >>> crew_size(1), crew_size(7), crew_size(16)
    (1, 7, 15)
    """
    return threads - 1 if threads >= SPARE_FROM else threads


class Arithmetic:
    """Computes the tiles of one optimizer, in other threads than the one that moves them.

    Attributes:
        compiled: whether the compiled kernel is used.
    """

    def __init__(self, scratch: FloatRoom, library: Library | None) -> None:
        """Raises RuntimeError when the system refuses the threads."""
        self._scratch = scratch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memtriage-offload-kernel")
        self._crew = None if library is None else Crew(library, crew_size(torch.get_num_threads()))

    @property
    def compiled(self) -> bool:
        return self._crew is not None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory reserved."""
        return self._scratch.nbytes

    def stepping(self, operands: Operands, hyper: Hyper, scaling: Scaling) -> Job:
        """Return the job of a step for the parts of a tile."""
        if self._crew is None or not takes(operands):
            return self.calling(partial(self._by_torch, operands, hyper, scaling))
        # After the last whole block torch may use scalar code, which rounds differently: torch does that
        # part.
        blocks, rests = operands.cut(ALIGNMENT)
        job = self._crew.job(blocks, hyper, scaling) if blocks.masters else None
        return _Divided(job, partial(self._by_torch, rests, hyper, scaling))

    def calling(self, function: Callable[[], None]) -> Job:
        """Return the job of calling a function."""
        return _Call(self._thread, function)

    def close(self) -> None:
        """End the threads. No job may be running. Repeatable."""
        self._thread.shutdown(wait=False)
        if self._crew is not None:
            self._crew.close()

    def _by_torch(self, operands: Operands, hyper: Hyper, scaling: Scaling) -> None:
        if operands.masters:  # a rank may have none of a small parameter
            adamw(operands, hyper, scaling, self._scratch)


class _Call:
    """A call of torch's kernels in their own thread, one after another."""

    def __init__(self, thread: ThreadPoolExecutor, function: Callable[[], None]) -> None:
        self._thread, self._function = thread, function
        self._future: Future[None] | None = None

    def start(self) -> None:
        self._future = self._thread.submit(self._call)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def _call(self) -> None:
        with torch.no_grad():  # it applies to one thread
            self._function()


class _Divided:
    """Whole blocks go to the crew; the rest, fewer than 64 elements per parameter, is done here at once."""

    def __init__(self, blocks: CrewJob | None, rests: Callable[[], None]) -> None:
        self._blocks, self._rests = blocks, rests

    def start(self) -> None:
        if self._blocks is not None:
            self._blocks.start()
        self._rests()

    def wait(self) -> None:
        if self._blocks is not None:
            self._blocks.wait()
