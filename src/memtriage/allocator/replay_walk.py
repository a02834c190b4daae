"""One pass over a recorded trace, keeping the blocks as the allocator does: the work of `replay`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from memtriage.allocator.recorded_start import Region, StartingState
from memtriage.allocator.settings import AllocatorSettings
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    FreeRange,
    Int64s,
)

MAX_OOMS: Final = 32
"""Out-of-memory events whose free blocks are kept; a loop that catches and retries can make thousands."""
_NEVER: Final = 1 << 62
_CHUNK: Final = 1 << 16
"""Actions turned into Python numbers at a time: bounds the temporary lists."""
_MAX_SEARCHES: Final = 10_000
"""Searches through all free blocks, each for an event that contradicts what is known."""


def rounded(sizes: Int64s, settings: AllocatorSettings) -> Int64s:
    """The allocator's block sizes for a column of requests."""
    distinct, where = np.unique(sizes, return_inverse=True)
    made = np.fromiter((settings.round_size(size) for size in distinct.tolist()), np.int64, len(distinct))
    return made[where.reshape(-1)]


class _FreeBlocks:
    """The free blocks, by their first byte and by the first byte behind them."""

    __slots__ = ("at", "ending", "region")

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        """Size by address."""
        self.ending: dict[int, int] = {}
        """Address by end; may name a block that is gone, which `at` tells."""
        self.region: dict[int, int] = {}
        """Region by address, also of blocks that are gone."""

    def put(self, address: int, size: int, region: int) -> None:
        """Take a free range in, merged with its neighbors in the same region."""
        end = address + size
        behind = self.at.get(end)
        if behind is not None and self.region[end] == region:
            del self.at[end]
            end += behind
        before = self.before(address)
        if before is not None and self.region[before] == region:
            address = before
        self.at[address] = end - address
        self.region[address] = region
        self.ending[end] = address

    def before(self, address: int) -> int | None:
        """The free block that ends at this address."""
        start = self.ending.get(address)
        return start if start is not None and self.at.get(start) == address - start else None

    def drop(self, address: int) -> tuple[int, int]:
        """Take a free block out; returns its size and region."""
        size = self.at.pop(address)
        return size, self.region[address]

    def around(self, address: int) -> int | None:
        """The free block that has this address inside or as its first byte; slow."""
        if address in self.at:
            return address
        return next((begin for begin, size in self.at.items() if begin < address < begin + size), None)


class ReplayWalk:
    """One pass over the events, with the state between them.

    Attributes:
        start: the state before the first event.
        regions: every segment and virtual range there ever was.
        sizes, homes, died, gone: one entry a life, those of before the trace first: bytes, region (-1 for
            none known), and the events that end it. Lives of the trace are in the order of their events.
        late: blocks of the end that no event explains: address, size, requested.
        life: the life of each event.
        released_at, released_by, released_in: events that change what can be released, by how much, and in
            which region.
        at_oom: free blocks at out-of-memory events.
        lost: events that contradict what was known.
        exact_from: the first event from which on all is exact.
        releasable_at_start: bytes, in the default pool and in private ones.
    """

    def __init__(self, trace: Events, start: StartingState, settings: AllocatorSettings) -> None:
        self.trace = trace
        self.settings = settings
        self.start = start
        # blocks of this size or more take all of the free block they are made of
        self.unsplit = settings.max_split_size or _NEVER
        self.free = _FreeBlocks()
        self.regions = list(start.regions)
        self.in_use = [0] * len(self.regions)
        """Blocks in use by region."""
        self.ordinary = {
            region.address: number for number, region in enumerate(self.regions) if not region.page
        }
        self.virtual = [number for number, region in enumerate(self.regions) if region.page]
        asked = trace.size.copy()
        allocs = trace.kind == ALLOC
        asked[allocs] = rounded(asked[allocs], settings)
        self._asked = asked
        self.sizes = [block.size for block in start.blocks] + asked[allocs].tolist()
        self.homes: list[int] = []
        self.died = [-1] * len(self.sizes)
        self.gone = [-1] * len(self.sizes)
        self.late: list[tuple[int, int, int]] = []
        self.live = {block.address: life for life, block in enumerate(start.blocks)}
        self._guessed = {
            block.address + block.size: life for life, block in enumerate(start.blocks) if block.guessed
        }
        self.waiting: dict[int, int] = {}
        self.life = np.full(len(trace), -1, np.int32)
        self.life[allocs] = np.arange(len(start.blocks), len(self.sizes), dtype=np.int32)
        self.released_at: list[int] = []
        self.released_by: list[int] = []
        self.released_in: list[int] = []
        self.at_oom: dict[int, tuple[FreeRange, ...]] = {}
        self.lost = 0
        self.exact_from = start.undone
        self._searches = 0
        self._lay_out(start)
        self.releasable_at_start = self._releasable()

    # --- the state before the first event ---------------------------------------------------------------

    def _lay_out(self, start: StartingState) -> None:
        """Everything that is reserved and not in use becomes free blocks."""
        by_address = sorted(range(len(self.regions)), key=lambda number: self.regions[number].address)
        bases = [self.regions[number].address for number in by_address]
        taken: dict[int, list[tuple[int, int]]] = {number: [] for number in by_address}
        for address, size, counts in [
            *((block.address, block.size, True) for block in start.blocks),
            *((address, size, False) for address, size in start.occupied),
        ]:
            position = bisect_right(bases, address) - 1
            number = by_address[position] if position >= 0 else -1
            inside = number >= 0 and address < self.regions[number].end
            if inside:
                taken[number].append((address, address + size))
                self.in_use[number] += 1
            if counts:
                self.homes.append(number if inside else -1)
        for number in by_address:
            region = self.regions[number]
            ranges = (
                start.mapped.within(region.address, region.end)
                if region.page
                else [(region.address, region.end)]
            )
            for first, end in ranges:
                self._fill_gaps(number, first, end, sorted(taken[number]))

    def _fill_gaps(self, number: int, first: int, end: int, taken: Sequence[tuple[int, int]]) -> None:
        position = first
        for block, behind in taken:
            if block >= end or behind <= first:
                continue
            if block > position:
                self.free.put(position, block - position, number)
            position = max(position, behind)
        if end > position:
            self.free.put(position, end - position, number)

    def _releasable(self) -> tuple[int, int]:
        totals = [0, 0]
        for number, region in enumerate(self.regions):
            if not region.page and not self.in_use[number]:
                totals[region.pool != DEFAULT_POOL] += region.size
        for address, size in self.free.at.items():
            region = self.regions[self.free.region[address]]
            totals[region.pool != DEFAULT_POOL] += _whole_pages(region, address, size)
        return totals[0], totals[1]

    # --- events -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Go through the events."""
        handlers = {
            ALLOC: self._alloc,
            FREE_REQUESTED: self._request,
            FREE_COMPLETED: self._complete,
            SEGMENT_ALLOC: self._new_segment,
            SEGMENT_FREE: self._end_segment,
            SEGMENT_MAP: self._map,
            SEGMENT_UNMAP: self._unmap,
            OOM: self._oom,
        }
        for index, kind, address, size in self._actions():
            handlers[kind](index, address, size)
        died, gone = np.array(self.died, np.int32), np.array(self.gone, np.int32)
        for kind, events in ((FREE_REQUESTED, died), (FREE_COMPLETED, gone), (FREE_COMPLETED, died)):
            lives = np.flatnonzero(events >= 0)
            lives = lives[self.trace.kind[events[lives]] == kind]
            self.life[events[lives]] = lives

    def _actions(self) -> Iterator[tuple[int, int, int, int]]:
        """Index, kind, address and size of what happens."""
        trace = self.trace
        wanted = np.flatnonzero(trace.kind <= OOM)
        for start in range(0, len(wanted), _CHUNK):
            part = wanted[start : start + _CHUNK]
            columns = (part, trace.kind[part], trace.address[part], self._asked[part])
            yield from zip(*(column.tolist() for column in columns), strict=True)

    def _alloc(self, index: int, address: int, size: int) -> None:
        if address in self.live or address in self.waiting:
            self._doubt(index)
            self._complete(index, address, 0)
        life = len(self.homes)
        home = self._home(index, address)
        if home >= 0:
            whole = self.free.at.pop(address)
            region = self.regions[home]
            rest = whole - size
            if rest < 0:
                self._doubt(index)
            elif rest <= region.keeps or (size >= self.unsplit and region.keeps):
                self.sizes[life] = whole
            else:
                self.free.at[address + size] = rest
                self.free.region[address + size] = home
                self.free.ending[address + whole] = address + size
            if region.page:
                kept = _whole_pages(region, address + size, rest) if rest > 0 else 0
                self._release(index, kept - _whole_pages(region, address, whole), home)
            elif not self.in_use[home]:
                self._release(index, -region.size, home)
            self.in_use[home] += 1
        self.live[address] = life
        self.homes.append(home)

    def _home(self, index: int, address: int) -> int:
        """The region of the free block that begins here; -1 when none does, and none can be made to."""
        if address in self.free.at:
            return self.free.region[address]
        self._searches += 1
        # what is lost makes searches; a trace without sense must not make a million slow ones
        around = self.free.around(address) if self._searches <= _MAX_SEARCHES else None
        if around is None:
            self._doubt(index)
            return -1
        whole, home = self.free.drop(around)
        old, tail = self._guessed.get(around), address - around
        if old is not None and self.gone[old] < 0 and tail <= self.regions[home].keeps:
            # what was not split off a block from before the trace is its own
            self.sizes[old] += tail
            self.free.put(address, whole - tail, home)
            return home
        self._doubt(index)
        self.free.put(around, address - around, home)
        self.free.at[address] = around + whole - address
        self.free.region[address] = home
        return home

    def _request(self, index: int, address: int, _size: int) -> None:
        life = self.live.pop(address, None)
        if life is None:
            self._doubt(index)
            return
        self.died[life] = index
        self.waiting[address] = life

    def _complete(self, index: int, address: int, _size: int) -> None:
        life = self.waiting.pop(address, None)
        if life is None:
            # its request came before the trace, or such events were not recorded
            life = self.live.pop(address, None)
            if life is None:
                self._doubt(index)
                return
            self.died[life] = index
        self.gone[life] = index
        home = self.homes[life]
        if home >= 0:
            self.in_use[home] -= 1
            self._put(index, address, self.sizes[life], home)
            if not self.in_use[home] and not self.regions[home].page:
                self._release(index, self.regions[home].size, home)

    def _new_segment(self, index: int, address: int, size: int) -> None:
        if address in self.ordinary:
            self._doubt(index)
            self._end_segment(index, address, self.regions[self.ordinary[address]].size)
        pool = self.start.pools.get(index) or self.trace.pool.get(index, DEFAULT_POOL)
        number = len(self.regions)
        self.ordinary[address] = number
        self.regions.append(Region(address, size, int(self.trace.stream[index]), pool, page=0))
        self.in_use.append(0)
        self.free.put(address, size, number)
        self._release(index, size, number)

    def _end_segment(self, index: int, address: int, size: int) -> None:
        number = self.ordinary.pop(address, None)
        if number is None or self.free.at.get(address) != size:
            self._doubt(index)
            self._clear(index, address, address + size, number)
            return
        self.free.drop(address)
        self._release(index, -size, number)

    def _map(self, index: int, address: int, size: int) -> None:
        self._put(index, address, size, self._range_of(address))

    def _unmap(self, index: int, address: int, size: int) -> None:
        start = self.free.around(address)
        if start is None or start + self.free.at[start] < address + size:
            self._doubt(index)
            return
        whole, home = self.free.drop(start)
        region, end = self.regions[home], start + whole
        change = -_whole_pages(region, start, whole)
        for first, behind in ((start, address), (address + size, end)):
            if behind > first:
                self.free.put(first, behind - first, home)
                change += _whole_pages(region, first, behind - first)
        self._release(index, change, home)

    def _oom(self, index: int, _address: int, _size: int) -> None:
        if len(self.at_oom) >= MAX_OOMS:
            return
        ranges = [
            FreeRange(
                address=address,
                size=size,
                stream=region.stream,
                pool=region.pool,
                segment=region.address,
                whole=not region.page and size == region.size,
            )
            for address, size in self.free.at.items()
            for region in (self.regions[self.free.region[address]],)
        ]
        self.at_oom[index] = tuple(sorted(ranges, key=lambda span: (-span.size, span.address)))

    # --- helpers ----------------------------------------------------------------------------------------

    def _doubt(self, index: int) -> None:
        """Note that an event contradicts what is known: something between is missing."""
        self.lost += 1
        self.exact_from = index + 1

    def _release(self, index: int, change: int, home: int) -> None:
        if change:
            self.released_at.append(index)
            self.released_by.append(change)
            self.released_in.append(home)

    def _put(self, index: int, address: int, size: int, home: int) -> None:
        region = self.regions[home]
        if not region.page:
            self.free.put(address, size, home)
            return
        before = self.free.before(address)
        change = 0
        if before is not None:
            change -= _whole_pages(region, before, address - before)
        behind = self.free.at.get(address + size, 0)
        change -= _whole_pages(region, address + size, behind)
        first = address if before is None else before
        change += _whole_pages(region, first, address + size + behind - first)
        self.free.put(address, size, home)
        self._release(index, change, home)

    def _range_of(self, address: int) -> int:
        """The virtual range an address is in: every address that an event maps is in one."""
        return next(
            number
            for number in self.virtual
            if self.regions[number].address <= address < self.regions[number].end
        )

    def _clear(self, index: int, first: int, end: int, number: int | None) -> None:
        """A segment goes that was not seen to be free: whatever is known of it goes with it."""
        for address in [start for start in self.live if first <= start < end]:
            life = self.live.pop(address)
            self.died[life] = self.gone[life] = index
        for address in [start for start in self.waiting if first <= start < end]:
            self.gone[self.waiting.pop(address)] = index
        for address in [start for start in self.free.at if first <= start < end]:
            self.free.drop(address)
        if number is not None and not self.in_use[number]:
            self._release(index, -self.regions[number].size, number)

    # --- the end ----------------------------------------------------------------------------------------

    def settle(self, segments: Sequence[Segment]) -> None:
        """Make the end agree with the segments, which are exact, and say from when on the rest does."""
        last = len(self.trace) - 1
        blocks = {
            block.address: block for segment in segments for block in segment.blocks if block.state != "free"
        }
        for address, life in self.live.items():
            block = blocks.pop(address, None)
            if block is None or block.state == "awaiting":
                self._doubt(last)
                self.died[life] = last
                self.gone[life] = -1 if block else last
            elif self.sizes[life] != block.size:
                self._doubt(last)
                self.sizes[life] = block.size
        for address, life in self.waiting.items():
            if blocks.pop(address, None) is None:
                self._doubt(last)
                self.gone[life] = last
        for address, block in blocks.items():
            if block.state == "active":
                self._doubt(last)
                self.late.append((address, block.size, block.requested))


def _whole_pages(region: Region, address: int, size: int) -> int:
    """Bytes of the pages that lie wholly inside a range; see `account.gpu_ledger.whole_pages`."""
    if not region.page:
        return 0
    first = -(-(address - region.address) // region.page)
    return max(0, (address + size - region.address) // region.page - first) * region.page
