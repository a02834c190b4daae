"""What the allocator reports as it works: the same events as a memory history of torch, and its one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memtriage.model.recording import Action
from memtriage.model.units import size as in_words


class AllocatorEvent(NamedTuple):
    """One event.

    Attributes:
        action: what happened; the names are those of torch's memory history.
        address: first byte concerned; 0 for `oom`.
        size: of blocks the bytes asked for, of segments and pages their size, of `oom` the rounded request.
        stream: handle of the stream.
        pool: id of the pool.
    """

    action: Action
    address: int
    size: int
    stream: int
    pool: tuple[int, int]


Hook = Callable[[AllocatorEvent], None]
"""Called with every event, in order. It must not call the allocator."""


class OutOfMemory(MemoryError):
    """A simulated allocation failed where torch would raise `torch.cuda.OutOfMemoryError`.

    Live blocks are untouched.

    Attributes:
        requested: bytes asked for.
        segment: bytes that the driver, or the process's limit, would have had to give.
        allocated, reserved: as they stand.
    """

    def __init__(self, requested: int, segment: int, allocated: int, reserved: int) -> None:
        super().__init__(
            f"out of memory: {in_words(requested)} asked for, {in_words(segment)} needed from the driver; "
            f"{in_words(allocated)} allocated, {in_words(reserved)} reserved"
        )
        self.requested = requested
        self.segment = segment
        self.allocated = allocated
        self.reserved = reserved
