"""Simulators under a configuration, and what they ask of the driver."""

from __future__ import annotations

from typing import Any, Final

from memtriage.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator

MIB: Final = 1 << 20


def simulator(conf: str = "", version: str = "2.11", **options: Any) -> Simulator:
    return Simulator(parse_conf(conf, version), **options)


class SegmentLog(list[tuple[str, int]]):
    """Segment events as (action, size)."""

    def __call__(self, event: AllocatorEvent) -> None:
        if event.action.startswith(("segment", "oom")):
            self.append((event.action, event.size))


_LETTERS: Final = {ALLOCATED: "A", FREE: "F", AWAITING: "W", UNMAPPED: "U"}


def layout(one: Simulator) -> list[str]:
    """Each segment's blocks as MiB and state, like `30A 10F 140U`; they are linked and in its arena."""
    for segment in one.backing.segments:
        blocks = list(segment)
        assert [block.prev for block in blocks] == [None, *blocks[:-1]]
        assert [block.address for block in blocks] == [
            segment.address + sum(block.size for block in blocks[:place]) for place in range(len(blocks))
        ]
        assert all((block in block.arena.blocks) == (block.state == FREE) for block in blocks)
        assert all((block in block.arena.unmapped) == (block.state == UNMAPPED) for block in blocks)
    return [
        " ".join(f"{block.size / MIB:g}{_LETTERS[block.state]}" for block in segment)
        for segment in one.backing.segments
    ]
