"""Make the states of optimizers in separate pools, so that they do not pin segments of temporary memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from memtriage.model.priming import StatePool
from memtriage.observe.states import Around, StateMaking, parameter_bytes

DROPPED: Final[set[tuple[int, int]]] = set()
"""Ids of pools from which nothing allocates any more: freed segments of theirs can return to the driver."""


class CudaPools:
    """Pools of PyTorch's allocator on a device.

    Only states are in such a pool. When it is dropped, they stay where they are, and their segment is
    returned once they are freed and the cache is emptied.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def make(self, size: int) -> Any:
        """A pool with one free segment of this size; None if it cannot be made now."""
        import torch

        cuda = torch.cuda
        if (
            cuda.current_device() != self._device
            or cuda.is_current_stream_capturing()
            or cuda.current_stream() != cuda.default_stream()
        ):
            return None
        pool = cuda.MemPool()
        try:
            with self.inside(pool):
                cuda.caching_allocator_delete(cuda.caching_allocator_alloc(size, self._device, 0))
        except RuntimeError:  # also torch.OutOfMemoryError: nothing is flushed for a pool
            return None
        DROPPED.add(pool.id)
        return pool

    def inside(self, pool: Any) -> AbstractContextManager[object]:
        """A context in which this thread allocates from the pool."""
        import torch

        context: AbstractContextManager[object] = torch.cuda.use_mem_pool(pool, self._device)
        return context


def pools_possible() -> bool:
    """Whether this torch can let a single thread allocate from a pool."""
    import torch

    return hasattr(torch.cuda, "use_mem_pool") and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


class StatePools:
    """Makes the states of the predicted optimizers in separate pools.

    An optimizer is recognized by the bytes of its parameters, because states of others might not fit. If its
    pool cannot be made, its states are made as usual. The hook is removed when the last of them has states.
    """

    def __init__(self, pools: Sequence[StatePool], source: CudaPools) -> None:
        self._wanted = list(pools)
        self._source = source
        self._pool: Any = None
        self._making = StateMaking(self._begins, self._ends)

    def install(self) -> None:
        """Wait for the optimizers."""
        self._making.install()

    def remove(self) -> None:
        """Stop waiting. Do not call this in a hook of a step."""
        self._making.remove()

    def _begins(self, optimizer: Any) -> Around | None:
        parameters = parameter_bytes(optimizer)
        wanted = next((pool for pool in self._wanted if pool.parameters == parameters), None)
        if wanted is None:
            return None
        self._wanted.remove(wanted)
        self._pool = self._source.make(wanted.size)
        return nullcontext if self._pool is None else partial(self._source.inside, self._pool)

    def _ends(self) -> None:
        self._pool = None
        if not self._wanted:
            self.remove()
