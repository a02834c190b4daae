"""The state of a simulator as plain data: after two equal states, the same requests have the same results.

Addresses are not part of it, only the order in which segments were made: best fit and expandable segments
depend on nothing else. Known limitations: only the default pool, and no garbage collection of cached blocks,
which depends on their age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, Final

from memtriage.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED, SimBlock, SimSegment, split_front
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import DEFAULT_POOL

UNNAMED: Final = 0
"""The name of blocks that the caller has no use for: nothing that follows frees them."""

_Block = tuple[Any, ...]
_Segment = tuple[int, bool, bool, int, tuple[_Block, ...]]
State = tuple[int, ...]
"""Numbers of `States`: one for each segment, the oldest first, and one for what awaits streams."""


class States:
    """States of one simulator or of several with the same settings.

    What segments hold is kept once, however many states share it.

    Attributes:
        blocks: how many blocks are kept.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._parts: list[Any] = []
        self.blocks = 0

    @staticmethod
    def has(simulator: Simulator) -> bool:
        """Whether the states of a simulator can be compared: see the limitations above."""
        return not simulator.backing.collects and simulator.pools() == (DEFAULT_POOL,)

    def capture(self, simulator: Simulator, names: Mapping[SimBlock, Hashable]) -> State:
        """The state now.

        Args:
            names: of the live blocks that may be freed or used by name later. All others are distinguished by
                nothing but their place.
        """
        number = self._number
        awaiting: dict[SimBlock, int] = {}
        state = []
        for segment in simulator.backing.segments:
            arena = segment.arena
            blocks: list[_Block] = []
            block: SimBlock | None = segment.head
            while block is not None:
                kind = block.state
                if kind == ALLOCATED:
                    streams = tuple(sorted(block.streams)) if block.streams else ()
                    blocks.append((block.size, kind, block.requested, names.get(block, UNNAMED), *streams))
                elif kind == AWAITING:
                    awaiting[block] = len(awaiting)
                    blocks.append((block.size, kind, block.requested, block.events))
                else:
                    blocks.append((block.size, kind))
                block = block.next
            state.append(
                number((arena.stream, arena.small, segment.page is not None, segment.size, tuple(blocks)))
            )
        waiting = (
            (stream, done, tuple(awaiting[block] for block in blocks))
            for stream, done, blocks in simulator.waiting()
        )
        return *state, number(tuple(waiting))

    def restore(self, state: State, simulator: Simulator) -> dict[Any, SimBlock]:
        """Bring a simulator that has handed out nothing into a state; returns the live blocks by name."""
        named: dict[Any, SimBlock] = {}
        awaiting: list[SimBlock] = []
        for number in state[:-1]:
            self._lay_out(self._parts[number], simulator, named, awaiting)
        for stream, done, places in self._parts[state[-1]]:
            simulator.put_off(stream, deque(awaiting[place] for place in places), done)
        simulator.reset_peaks()
        return named

    def _lay_out(
        self,
        part: _Segment,
        simulator: Simulator,
        named: dict[Any, SimBlock],
        awaiting: list[SimBlock],
    ) -> None:
        stream, small, expandable, size, blocks = part
        arena = simulator.arena(DEFAULT_POOL, stream, small=small)
        segment: SimSegment = simulator.backing.again(arena, size, arena.page if expandable else None)
        rest = segment.head
        for described in blocks:
            length, kind, *more = described
            block = split_front(rest, length) if length < rest.size else rest
            if kind == UNMAPPED:
                arena.insert_unmapped(block)
                continue
            if expandable:
                simulator.backing.map_again(length)
            if kind == FREE:
                arena.insert(block)
                continue
            block.state = kind
            block.requested = more[0]
            simulator.requested += more[0]
            if kind == AWAITING:
                block.events = more[1]
                simulator.awaiting += length
                awaiting.append(block)
                continue
            simulator.allocated += length
            if more[1] != UNNAMED:
                named[more[1]] = block
            if more[2:]:
                block.streams = set(more[2:])

    def _number(self, part: tuple[Any, ...]) -> int:
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = len(self._parts)
            self._parts.append(part)
            self.blocks += len(part[-1]) if part else 0
        return number
