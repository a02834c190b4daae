"""Records when each storage on the device comes and goes, in program order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

FREE: Final = 0
"""The `size` of an event that frees; allocations are larger (empty storages take no memory)."""
DEFAULT_STREAM: Final = 0
SHARED_POOL: Final = 0
"""The number of the pool of ordinary allocations; those of private pools are larger."""


@dataclass(frozen=True, slots=True)
class LifetimeEvent:
    """An allocation or a free.

    Attributes:
        block: number of the allocation, counted from 0.
        size: bytes asked for; FREE when the block is freed.
    """

    block: int
    size: int


@dataclass(slots=True)
class TracedBlock:
    """What is known of one allocation.

    Attributes:
        size: bytes asked for.
        op: the operator that made it, e.g. `aten::mm`.
        phase: the phase in which it was made.
        recorded: whether autograd was recording when it was made.
        owner: a fixed owner (workspace), or None: inferred from what it becomes.
        stream: number of the stream that was current.
        state_of: number of the optimizer that made it as one of its states; None for none. Those that make
            them apart from the rest of their step are counted from 0, by their first steps.
        pool: number of the private pool it is from; `SHARED_POOL` for none.
    """

    size: int
    op: str
    phase: str
    recorded: bool
    owner: str | None = None
    stream: int = DEFAULT_STREAM
    state_of: int | None = None
    pool: int = SHARED_POOL


@dataclass(frozen=True, slots=True)
class StreamUse:
    """Another stream than a block's own uses it; or a stream has passed what was put on it.

    Attributes:
        event: index of the first event after it.
        stream: number of the stream.
        block: number of the block; None when the stream has passed.
    """

    event: int
    stream: int
    block: int | None


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a private pool is kept, or is put back.

    Attributes:
        event: index of the first event after it.
        pool: number of the pool.
        blocks: those that are live in this state, in order. Where it is put back, events allocate them again.
        kept: index, among all `PoolState`s, of the one that is put back; None where this one is kept.
    """

    event: int
    pool: int
    blocks: tuple[int, ...]
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """A phase begins.

    Attributes:
        event: index of the first event of the phase.
        phase: `build`, `forward`, `backward` or `optimizer`.
        step: the step, counted from 0; -1 while building.
    """

    event: int
    phase: str
    step: int


@dataclass(slots=True)
class AllocationTrace:
    """The whole trace.

    Attributes:
        events: allocations and frees in program order.
        blocks: by number.
        markers: where phases begin.
        releases: indices of the events before which `empty_cache` was called.
        uses: of blocks by other streams than their own, in order.
        pool_states: of private pools, in order.
    """

    events: list[LifetimeEvent] = field(default_factory=list)
    blocks: list[TracedBlock] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    uses: list[StreamUse] = field(default_factory=list)
    pool_states: list[PoolState] = field(default_factory=list)

    def starts(self, steps: int) -> list[int]:
        """Index of the first event of each step."""
        first: dict[int, int] = {}
        for marker in self.markers:
            if marker.step >= 0:
                first.setdefault(marker.step, marker.event)
        return [first[step] for step in range(steps)]


class StorageReference(weakref.ref[Any]):
    """Keeps the identity of a storage for when it is gone."""

    __slots__ = ("identity",)

    def __init__(self, storage: Any, gone: Callable[[Any], None]) -> None:
        super().__init__(storage, gone)  # type: ignore[call-arg]
        self.identity: int = storage._cdata


class Lifetimes:
    """Notes storages at first sight and their frees when the last reference goes.

    Attributes:
        recording: what was recorded.
        phase, step: where the program is.
        stream: number of the current stream.
        pool: number of the private pool that allocations are made in now; `SHARED_POOL` for none.
        owner: the owner of what is allocated now, where it is fixed; None: inferred from what it becomes.
        state_of: number of the optimizer that makes its states now; None while none does.
        live: bytes asked for and not freed.
        highest: the most that `live` has been.
        over: called before each operator that makes a tensor from or on the device, once the last step is
            done; None until then.
        freed: called with the identity of each storage that goes.
        allocated: called with the number of each new block.
        begun: called before the first block.
        written: blocks that operators have written to in place, since whoever asks has cleared it.
        overwritten: by identity of a storage whose memory is another's by now, what the program is told if it
            uses it.
    """

    def __init__(self, is_recording_grad: Callable[[], bool]) -> None:
        self.recording = AllocationTrace()
        self.phase = "build"
        self.step = -1
        self.stream = DEFAULT_STREAM
        self.pool = SHARED_POOL
        self.owner: str | None = None
        self.state_of: int | None = None
        self._used_beside: set[int] = set()
        self.freed: Callable[[int], None] = lambda identity: None
        self.allocated: Callable[[int], None] = lambda block: None
        self.begun: Callable[[], object] = lambda: None
        self._blocks: dict[int, tuple[int, StorageReference]] = {}
        self.written: set[int] = set()
        self.overwritten: dict[int, str] = {}
        self._borrowed: set[int] = set()
        self._in_pools: dict[int, dict[int, None]] = {}
        self._grad_on = is_recording_grad
        self._open = True
        self.live = self.highest = 0
        self.over: Callable[[], None] | None = None
        self.recording.markers.append(Marker(0, self.phase, self.step))

    def enter(self, phase: str, step: int) -> None:
        """The phase changes now."""
        if (phase, step) == (self.phase, self.step):
            return
        self.phase, self.step = phase, step
        for stream in sorted(self._used_beside):
            self.stream_passed(stream)
        self.recording.markers.append(Marker(len(self.recording.events), phase, step))

    def block_of(self, storage: Any) -> int | None:
        """The number of the live block of this storage; None when it is not on the device."""
        entry = self._blocks.get(storage._cdata)
        return None if entry is None else entry[0]

    def adopt(self, storage: Any, block: int) -> None:
        """A storage of the memory of a block, which frees nothing."""
        self._blocks[storage._cdata] = (block, StorageReference(storage, self._gone))
        self._borrowed.add(storage._cdata)

    def disown(self, identity: int) -> None:
        """Free the block of a storage that is still referred to."""
        if identity in self._blocks and identity not in self._borrowed:
            self._borrowed.add(identity)
            self.free_block(self._blocks[identity][0])

    def check_intact(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise what torch raises where a tensor is used whose memory is another's by now."""
        for tensor in tensors:
            message = self.overwritten.get(tensor.untyped_storage()._cdata)
            if message is not None:
                raise RuntimeError(message)

    def keep_pool(self, pool: int) -> int:
        """Keep the state of a private pool; returns its number for `put_back`."""
        live = tuple(self._in_pools.get(pool, ()))
        return self._pool_state(PoolState(len(self.recording.events), pool, live))

    def put_back(self, number: int, identities: list[int]) -> None:
        """Put a private pool back into a state that was kept.

        Args:
            identities: of the storages that own blocks of that state from now on.
        """
        state = self.recording.pool_states[number]
        self._borrowed.update(
            identity
            for identity, (block, _) in self._blocks.items()
            if self.recording.blocks[block].pool == state.pool
        )
        for block in list(self._in_pools.get(state.pool, ())):
            self.free_block(block)
        self._pool_state(replace(state, event=len(self.recording.events), kept=number))
        for block in state.blocks:
            self._made(block)
        self._borrowed.difference_update(identities)

    def _pool_state(self, state: PoolState) -> int:
        if self._open:
            self.recording.pool_states.append(state)
        return len(self.recording.pool_states) - 1

    def is_newest(self, storage: Any, made_by: str) -> bool:
        """Whether the latest allocation is this storage, made by an operator with this in its name."""
        block = self.block_of(storage)
        return block == len(self.recording.blocks) - 1 and made_by in self.recording.blocks[block].op

    def see(self, storage: Any, op: str) -> bool:
        """A storage on the device that an operator returned; returns whether it is new."""
        identity: int = storage._cdata
        if identity in self._blocks:
            return False
        size: int = storage.nbytes()
        block = self._allocate(size, op, self.owner)
        self._blocks[identity] = (block, StorageReference(storage, self._gone))
        return True

    def resized(self, storage: Any, op: str) -> None:
        """The storage may have got another size: a new block replaces the old one, as on the device."""
        entry = self._blocks.get(storage._cdata)
        if entry is None or self.recording.blocks[entry[0]].size == storage.nbytes():
            return
        block, reference = entry
        # CUDA allocates the new data, copies, then frees the old.
        self._blocks[storage._cdata] = (self._allocate(storage.nbytes(), op, self.owner), reference)
        self.free_block(block)

    def scratch(self, sizes: list[int], op: str) -> list[int]:
        """Buffers inside an operator; returns their numbers for `release`."""
        return [self._allocate(size, op, "workspace") for size in sizes if size > 0]

    def release(self, blocks: list[int]) -> None:
        """The operator releases its buffers, the last one first."""
        for block in reversed(blocks):
            self.free_block(block)

    def used_on(self, storage: Any, stream: int) -> None:
        """Work that was put on a stream uses a storage (`Tensor.record_stream`)."""
        block = self.block_of(storage)
        if block is None or not self._open or not self.recording.blocks[block].size:
            return
        if self.recording.blocks[block].stream != stream:
            self._used_beside.add(stream)
            self.recording.uses.append(StreamUse(len(self.recording.events), stream, block))

    def stream_passed(self, stream: int) -> None:
        """Everything that was put on a stream is done."""
        if stream in self._used_beside and self._open:
            self.recording.uses.append(StreamUse(len(self.recording.events), stream, None))

    def cache_emptied(self) -> None:
        """`torch.cuda.empty_cache()` was called."""
        self.recording.releases.append(len(self.recording.events))

    def close(self) -> None:
        """Nothing is recorded from now on: what is torn down after the last step is none of it."""
        self._open = False

    def _allocate(self, size: int, op: str, owner: str | None) -> int:
        block = len(self.recording.blocks)
        if not block:
            self.begun()
        self.recording.blocks.append(
            TracedBlock(size, op, self.phase, self._grad_on(), owner, self.stream, self.state_of, self.pool)
        )
        self._made(block)
        self.allocated(block)
        return block

    def _made(self, block: int) -> None:
        size, pool = self.recording.blocks[block].size, self.recording.blocks[block].pool
        if size and self._open:
            self.recording.events.append(LifetimeEvent(block, size))
            self.live += size
            self.highest = max(self.highest, self.live)
            if pool != SHARED_POOL:
                self._in_pools.setdefault(pool, {})[block] = None

    def _gone(self, reference: StorageReference) -> None:
        block, _ = self._blocks.pop(reference.identity)
        self.freed(reference.identity)
        self.overwritten.pop(reference.identity, None)
        if reference.identity in self._borrowed:
            self._borrowed.discard(reference.identity)
        else:
            self.free_block(block)

    def free_block(self, block: int) -> None:
        """Free a block, whichever storage owned it."""
        freed = self.recording.blocks[block]
        if freed.size and self._open:
            self.recording.events.append(LifetimeEvent(block, FREE))
            self.live -= freed.size
            if freed.pool != SHARED_POOL:
                del self._in_pools[freed.pool][block]
