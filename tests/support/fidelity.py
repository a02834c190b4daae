"""Check the simulator: feed it a recorded trace, and compare every segment event.

The simulator does not see the recording's choices: it decides itself when it needs a segment, how large it
is, which block serves a request and what returns to the driver. Only the driver's decisions come from the
recording: the address of a new segment (which breaks ties between blocks of equal size), and refusals that no
limit of the process explains.

Known limitation: a recording does not say whether a free that awaited a stream completed before the search
for a free block or in a flush after it. If a limit is reached and garbage is collected, too, that is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.allocator.driver import Driver
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.feed import GIVEN_BACK, AwaitingBlock, Feed
from memtriage.allocator.recorded_start import starting_state
from memtriage.allocator.restore import restore
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import Segment
from memtriage.model.recording import (
    ALLOC,
    EVENT_KINDS,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_MAP,
    Events,
)

_TAKEN: Final = (SEGMENT_ALLOC, SEGMENT_MAP)
_COMPARED: Final = (*_TAKEN, *GIVEN_BACK, OOM)


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """What came of it.

    Attributes:
        events: allocations and frees fed, until the first difference.
        difference: the first difference in words; None when there is none.
        peak_reserved: bytes, as simulated.
        guessed: blocks older than the trace whose size nothing in it tells; with any, a difference may be no
            fault of the simulator.
    """

    events: int
    difference: str | None
    peak_reserved: int
    guessed: int


@dataclass(frozen=True, slots=True)
class _Expected:
    """A recorded event that the simulator should make by itself."""

    index: int
    kind: int
    address: int
    size: int
    stream: int

    def __str__(self) -> str:
        return _in_words(EVENT_KINDS[self.kind], self.size, self.address, self.stream)


class _Differs(Exception):
    """The simulation has left the recording."""


class _RecordedDriver(Driver):
    """Gives the recorded addresses; refuses where the recording goes on with giving memory back.

    Args:
        expected: the recorded events, in order.
        may_refuse: False where the process had a limit, so that nothing but that limit may refuse.
    """

    def __init__(self, expected: Sequence[_Expected], *, may_refuse: bool) -> None:
        super().__init__()
        self._expected = expected
        self._may_refuse = may_refuse
        self.passed = 0

    def coming(self) -> _Expected | None:
        """The next event that the simulator should make."""
        return self._expected[self.passed] if self.passed < len(self._expected) else None

    def allocate(self, size: int, stream: int, pool: tuple[int, int]) -> int | None:
        coming = self.coming()
        if self._refuses(coming):
            return None
        if coming is not None and (coming.kind, coming.size) == (SEGMENT_ALLOC, size):
            return coming.address
        return self.place(size)

    def reserve(self, size: int, stream: int, pool: tuple[int, int]) -> int:
        coming = self.coming()
        if coming is not None and coming.kind == SEGMENT_MAP:
            return coming.address
        return self.place(size)

    def map(self, address: int, size: int) -> bool:
        return not self._refuses(self.coming())

    def _refuses(self, coming: _Expected | None) -> bool:
        return self._may_refuse and coming is not None and coming.kind not in _TAKEN


def compare(
    trace: Events,
    segments: Sequence[Segment],
    settings: AllocatorSettings,
    *,
    device_memory: int | None = None,
) -> FidelityReport:
    """Feed a trace to the simulator, up to the first difference.

    Args:
        trace: the events of one device; complete, without skipped actions.
        segments: its segments after the last of them.
        settings: with which it was recorded.
        device_memory: of the device it was recorded on, in bytes; needed where the settings have a fraction.
    """
    run = _Run(trace, segments, settings, device_memory)
    difference = None
    try:
        run.feed_all()
        run.check_end(segments)
    except _Differs as error:
        difference = str(error)
    return FidelityReport(
        events=run.fed,
        difference=difference,
        peak_reserved=run.simulator.peak_reserved,
        guessed=run.guessed,
    )


class _Run:
    """One trace on its way through the simulator."""

    def __init__(
        self,
        trace: Events,
        segments: Sequence[Segment],
        settings: AllocatorSettings,
        device_memory: int | None,
    ) -> None:
        self._kinds: list[int] = trace.kind.tolist()
        self._addresses: list[int] = trace.address.tolist()
        self._sizes: list[int] = trace.size.tolist()
        self._streams: list[int] = trace.stream.tolist()
        self._expected = _expected(trace)
        self._limited = settings.memory_fraction is not None
        self.driver = _RecordedDriver(self._expected, may_refuse=not self._limited)
        self.simulator = Simulator(
            settings, driver=self.driver, device_memory=device_memory, hook=self._check_made
        )
        start = starting_state(trace, segments, settings)
        self._feed = Feed(self.simulator, trace, segments, restore(self.simulator, start))
        self.guessed = sum(block.guessed for block in start.blocks)
        self._put_off: list[AwaitingBlock] = []
        self.fed = 0

    def feed_all(self) -> None:
        """Feed every event.

        Raises:
            _Differs: at the first difference.
        """
        due = 0
        for index, kind in enumerate(self._kinds):
            if kind in GIVEN_BACK and self.driver.passed == due and not self._left_to_malloc(due):
                self._feed.empty_cache(index)
            if kind in _COMPARED:
                due += 1
            if kind == FREE_COMPLETED and self._is_put_off(index, due):
                self._put_off.append(self._feed.waiting.pop(self._addresses[index]))
            elif kind in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
                self._feed_one(index, due)
            elif kind == OOM:
                self._expect_oom(index)
            self.fed += kind in (ALLOC, FREE_REQUESTED, FREE_COMPLETED)
            if kind in (ALLOC, OOM):
                for put_off in self._put_off:
                    self._feed.complete(put_off)
                self._put_off.clear()

    def check_end(self, segments: Sequence[Segment]) -> None:
        """Compare the segments and blocks that are left."""
        simulated = [_layout(segment) for segment in self.simulator.snapshot()]
        recorded = [_layout(segment) for segment in sorted(segments, key=lambda segment: segment.address)]
        for left, right in zip(simulated, recorded, strict=False):
            if left != right:
                raise _Differs(f"at the end simulated {left}, recorded {right}")
        if len(simulated) != len(recorded):
            raise _Differs(f"at the end simulated {len(simulated)} segments, recorded {len(recorded)}")

    def _feed_one(self, index: int, due: int) -> None:
        try:
            block = self._feed.event(index)
        except OutOfMemory as error:
            raise _Differs(f"simulated: {error}; recorded an allocation (event {index})") from None
        if self.driver.passed != due:
            made = self.driver.passed
            raise _Differs(f"up to event {index} simulated {made} segment events, recorded {due}")
        if block is not None and block.address != self._addresses[index]:
            recorded = f"{self._addresses[index]:#x} (event {index})"
            raise _Differs(f"simulated a block at {block.address:#x}, recorded {recorded}")

    def _expect_oom(self, index: int) -> None:
        if self._feed.can_allocate(index):
            raise _Differs(f"recorded out of memory (event {index}), simulated none")

    def _is_put_off(self, index: int, due: int) -> bool:
        """True if a free completed that the next allocation must not see before it has searched."""
        late = self._addresses[index] in self._feed.waiting
        return late and (bool(self._put_off) or self._of_a_flush(index, due))

    def _of_a_flush(self, index: int, due: int) -> bool:
        """True if the frees that complete from here on did so in a flush of the cache under pressure.

        A flush comes after the search for a free block, which must not find them. It waits for everything,
        and happens only when the limit is in the way; then memory is given back, or is out.
        """
        if not self._limited or due == len(self._expected):
            return False
        coming = self._expected[due]
        together = range(index, coming.index)
        if coming.kind in _TAKEN or any(self._kinds[event] != FREE_COMPLETED for event in together):
            return False
        waiting = [self._feed.waiting.get(self._addresses[event]) for event in together]
        if None in waiting or len(waiting) != len(self._feed.waiting):
            return False
        request = self._next_request(coming.index)
        if request is None:
            return False
        settings = self.simulator.settings
        needed = settings.segment_size(settings.round_size(self._sizes[request]))
        return self.simulator.backing.at_limit(needed)

    def _next_request(self, index: int) -> int | None:
        """Index of the next allocation from here on, whether it failed or not."""
        later = range(index, len(self._kinds))
        return next((event for event in later if self._kinds[event] in (ALLOC, OOM)), None)

    def _left_to_malloc(self, due: int) -> bool:
        """True where memory was given back under pressure, and not by `empty_cache()`.

        Without a limit of the process both look alike and come to the same: `empty_cache()` is assumed. With
        one it was pressure if the next thing is an allocation that no cached block serves and that meets the
        limit, or a threshold of it.
        """
        if not self._limited:
            return False
        after = next((event for event in self._expected[due:] if event.kind not in GIVEN_BACK), None)
        if after is None:
            return False
        between = self._kinds[self._expected[due].index : after.index]
        if any(kind in (ALLOC, FREE_REQUESTED) for kind in between):
            return False
        index = self._next_request(after.index)
        if index is None:
            return False
        return self.simulator.pressed_by(self._sizes[index], self._streams[index], self._feed.pool(index))

    def _check_made(self, event: AllocatorEvent) -> None:
        if event.action in ("alloc", "free_requested", "free_completed"):
            return
        coming = self.driver.coming()
        made = _in_words(event.action, event.size, event.address, event.stream)
        if coming is None:
            raise _Differs(f"simulated {made}, recorded nothing more")
        same_place = event.address == coming.address or event.action == "oom"
        if (event.action, event.size) != (EVENT_KINDS[coming.kind], coming.size) or not same_place:
            raise _Differs(f"simulated {made}, recorded {coming} (event {coming.index})")
        self.driver.passed += 1


def _expected(trace: Events) -> list[_Expected]:
    return [
        _Expected(
            index=index,
            kind=int(trace.kind[index]),
            address=int(trace.address[index]),
            size=int(trace.size[index]),
            stream=int(trace.stream[index]),
        )
        for index in np.flatnonzero(np.isin(trace.kind, _COMPARED)).tolist()
    ]


def _layout(segment: Segment) -> tuple[object, ...]:
    blocks = [(block.address, block.size, block.state) for block in segment.blocks]
    return segment.address, segment.stream, segment.pool, blocks


def _in_words(action: str, size: int, address: int, stream: int) -> str:
    return f"{action} of {size} bytes at {address:#x} for stream {stream:#x}"
