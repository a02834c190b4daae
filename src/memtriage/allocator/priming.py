"""Simulate priming: allocate and free blocks, then simulate a program's requests.

The allocator takes the smallest free block that fits, and never merges blocks of different segments. So the
first segments determine how well the rest packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from memtriage.allocator.blocks import SIZE_SHIFT
from memtriage.allocator.driver import Driver
from memtriage.allocator.requests import DEFAULT_STREAM, EMPTIED, FREE, Request
from memtriage.allocator.settings import MIN_BLOCK, OWN_SEGMENT, SEGMENT_STEP, AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import DEFAULT_POOL

Blocks = tuple[int, ...]
"""Sizes of the blocks to allocate, the largest first; each gets a separate segment."""
_OUT_OF_REACH: Final = 1 << 62


def prime(simulator: Simulator, blocks: Blocks) -> None:
    """Allocate blocks and free them all.

    Raises:
        memtriage.allocator.events.OutOfMemory: there is not enough memory.
    """
    live = [simulator.malloc(size) for size in blocks]
    for block in live:
        simulator.free(block)


@dataclass(frozen=True, slots=True)
class Circumstance:
    """Unpredictable circumstances of a run that a choice must tolerate.

    Attributes:
        addresses: seed of `OtherAddresses`; None for falling addresses, which were recorded most often.
        unpredicted: bytes of a block that exists from the beginning and was not predicted, such as the
            workspace of a library.
    """

    addresses: int | None = None
    unpredicted: int = 0


class OtherAddresses(Driver):
    """Returns addresses in another order than `Driver`: before torch 2.13 they decide which of two free
    blocks of equal size is taken.

    Args:
        seed: of the order; 0 for rising addresses.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._count = 0
        self._random = Random(seed) if seed else None
        self._given: set[int] = set()

    def place(self, size: int) -> int:
        """Return an address that was not returned before."""
        if self._random is None:
            self._count += 1
            return self._count << _SLOT
        slot = self._random.getrandbits(20)
        while slot in self._given:
            slot = self._random.getrandbits(20)
        self._given.add(slot)
        return slot << _SLOT


_SLOT: Final = 44
"""Bits between such addresses: more than in any segment, fewer than a position has in a block's key."""


class PackingTrial:
    """Primes with blocks, then simulates requests, under the allocator's settings.

    Attributes:
        simulated: requests so far.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.simulated = 0
        self._settings = settings

    def run(
        self,
        requests: Sequence[Request],
        blocks: Blocks,
        limit: int = _OUT_OF_REACH,
        under: Circumstance | None = None,
    ) -> int | None:
        """Peak of reserved bytes with these requests after priming with blocks; None above `limit`."""
        addresses = None if under is None else under.addresses
        simulator = Simulator(self._settings, driver=None if addresses is None else OtherAddresses(addresses))
        prime(simulator, blocks)
        if under is not None and under.unpredicted:
            simulator.malloc(under.unpredicted)
        backing, malloc, free = simulator.backing, simulator.malloc, simulator.free
        keys = simulator.arena(DEFAULT_POOL, DEFAULT_STREAM, small=False).keys
        live = {}
        done = 0
        for block, size in requests:
            if backing.reserved > limit:
                break
            done += 1
            if block >= 0:
                if size:
                    live[block] = malloc(size)
                else:
                    free(live.pop(block))
            elif block == EMPTIED:
                simulator.empty_cache()
            elif not keys or keys[-1] >> SIZE_SHIFT < size:
                free(malloc(size))
        self.simulated += done + len(blocks)
        return None if backing.reserved > limit else backing.peak_reserved


def compressed(requests: Sequence[Request]) -> list[Request]:
    """Replace each allocation that is freed at once by one of `_PASSING`, which only needs room."""
    found: list[Request] = []
    at = 0
    while at < len(requests):
        block, size = requests[at]
        if size and at + 1 < len(requests) and requests[at + 1] == (block, FREE):
            found.append((_PASSING, (size + MIN_BLOCK - 1) & -MIN_BLOCK))
            at += 2
        else:
            found.append((block, size))
            at += 1
    return found


def most_alive(requests: Sequence[Request]) -> dict[int, int]:
    """How many blocks with a separate segment are alive at once at most, by segment size.

    Only blocks whose segment has just their size are counted.
    """
    sizes: dict[int, int] = {}
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for block, size in requests:
        if size >= OWN_SEGMENT:
            own = -(-size // SEGMENT_STEP) * SEGMENT_STEP
            now = alive.get(own, 0) + 1
            most[own] = max(most.get(own, 0), now)
            if block != _PASSING:
                sizes[block] = own
                alive[own] = now
        elif not size and block in sizes:
            alive[sizes.pop(block)] -= 1
    return most


_PASSING: Final = -2
"""The block number of a request that is freed at once."""


def peak_live(requests: Sequence[Request]) -> int:
    """Peak of the live bytes of these requests."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for block, size in requests:
        if block == _PASSING:
            peak = max(peak, live + size)
        elif size:
            sizes[block] = size
            live += size
            peak = max(peak, live)
        elif block >= 0:
            live -= sizes.pop(block)
    return peak
