"""Simulators under a configuration, and what they ask of the driver."""

from __future__ import annotations

from typing import Any, Final

import pytest

from memtriage.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED, SimBlock
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator

MIB: Final = 1 << 20


def simulator(conf: str = "", version: str = "2.11", **options: Any) -> Simulator:
    return Simulator(parse_conf(conf, version), **options)


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


POOL: Final = (0, 7)
_COUNTS: Final = ("retries", "ooms", "synchronizations")
_ACTIONS: Final = {"alloc": "+", "free": "-", "map": "m", "unmap": "u"}


def _bytes(text: str) -> int:
    return int(text[:-1]) if text.endswith("B") else int(float(text) * MIB)


class Played:
    """A program in words, run by a simulator.

    The words before `|` are its configuration, version and options, such as `limit=200`. Sizes are MiB, or
    bytes with a `B`. `a=30` allocates, `a=30@5` on stream 5 and `a=30@p` in a private pool; `!30` must run
    out of memory; `-a` frees, `a>9` is `record_stream` and `done9` its end, `a.` completes a free that waits.
    `events`, `sync`, `empty`, `release` (the pool) and `reset` (the peaks) are calls of the allocator.

    What has a `:` is checked: a counter, the size of a block, the block whose address it has, the `layout`,
    or the `log`: events of segments since the last such check, `+` and `-`, or `m` and `u` for pages.
    """

    def __init__(self, text: str) -> None:
        settings, program = text.split("|")
        conf, version, options = [], "2.11", {}
        for word in settings.split():
            if ":" in word:
                conf.append(word)
            elif "=" in word:
                name, _, size = word.partition("=")
                options[name] = _bytes(size)
            else:
                version = word
        self.events: list[AllocatorEvent] = []
        self.one = simulator(",".join(conf), version, hook=self.events.append, **options)
        self.blocks: dict[str, SimBlock] = {}
        self.addresses: dict[str, int] = {}
        for word in program.split():
            self._do(word)

    def _do(self, word: str) -> None:
        calls = {
            "events": self.one.process_events,
            "sync": self.one.synchronize,
            "empty": self.one.empty_cache,
            "release": lambda: self.one.release_pool(POOL),
            "reset": self.one.reset_peaks,
        }
        if word in calls:
            calls[word]()
        elif ":" in word:
            name, _, expected = word.partition(":")
            assert self._found(name, expected) == expected, word
        elif word[0] == "!":
            with pytest.raises(OutOfMemory):
                self._allocate(word[1:])
        elif word[0] == "-":
            self.one.free(self.blocks[word[1:]])
        elif word.startswith("done"):
            self.one.stream_done(int(word[4:]))
        elif word[-1] == ".":
            self.one.complete(self.blocks[word[:-1]])
        elif "=" in word:
            name, _, size = word.partition("=")
            self.blocks[name] = self._allocate(size)
            self.addresses[name] = self.blocks[name].address
        else:
            name, _, stream = word.partition(">")
            self.one.record_stream(self.blocks[name], int(stream))

    def _allocate(self, text: str) -> SimBlock:
        size, _, place = text.partition("@")
        if place == "p":
            return self.one.malloc(_bytes(size), pool=POOL)
        return self.one.malloc(_bytes(size), int(place or 0))

    def _found(self, name: str, expected: str) -> str:
        """What a check finds, as it is written."""
        if name == "layout":
            return "/".join(layout(self.one)).replace(" ", "_")
        if name == "log":
            made = [event for event in self.events if event.action.startswith(("segment", "oom"))]
            self.events.clear()
            return ",".join(
                f"{_ACTIONS.get(event.action[8:], event.action)}{event.size / MIB:g}" for event in made
            )
        if expected in self.addresses:
            same = self.addresses[name] == self.addresses[expected]
            return expected if same else f"not {expected}"
        value = self.blocks[name].size if name in self.blocks else getattr(self.one, name)
        if name in _COUNTS:
            return str(value)
        return f"{value}B" if expected.endswith("B") else f"{value / MIB:g}"
