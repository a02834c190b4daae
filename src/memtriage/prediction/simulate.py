"""From lifetimes to the allocator's counters, and to the owners of the peak instant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.checkpoints import PoolCheckpoint, checkpoint, restore
from memtriage.allocator.events import Hook
from memtriage.allocator.priming import Blocks, prime
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.prediction.lifetimes import FREE, AllocationTrace, PoolState


@dataclass(frozen=True, slots=True)
class StepCounters:
    """The counters of one step, in bytes, and the index of the event after which `allocated` was highest."""

    peak_allocated: int
    peak_reserved: int
    end_allocated: int
    peak_event: int


class Replay:
    """Feeds a recording to the simulated allocator, part by part; it may grow meanwhile.

    Args:
        limit: bytes that the process may reserve; None for no limit.
        hook: called with every event of the allocator.
        primed: sizes of the blocks that are allocated and freed first.
        pools: by number of an optimizer (`TracedBlock.state_of`), the size of the block that a pool for its
            states is primed with.

    Attributes:
        simulator: the allocator.
        position: index of the next event.
        peak, peak_event: most bytes of live blocks since `reset_peaks`, and the event after which they were.
    """

    def __init__(
        self,
        recording: AllocationTrace,
        settings: AllocatorSettings,
        device_memory: int,
        limit: int | None = None,
        hook: Hook | None = None,
        primed: Blocks = (),
        pools: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._pools = pools
        self.simulator = Simulator(settings, device_memory=device_memory, limit=limit, hook=hook)
        prime(self.simulator, primed)
        self.position = self.peak = self.peak_event = 0
        self._recording = recording
        self._live: dict[int, SimBlock] = {}
        self._released = self._used = self._states = 0  # of the recording's lists
        self._kept: dict[int, tuple[PoolCheckpoint, list[int]]] = {}
        self._put_back: dict[int, SimBlock] = {}

    def reset_peaks(self) -> None:
        """Highest are the bytes that there are now."""
        self.simulator.reset_peaks()
        self.peak, self.peak_event = self.simulator.allocated, self.position

    def advance(self, end: int) -> None:
        """Feed the events up to this index.

        Raises:
            memtriage.allocator.events.OutOfMemory: the limit is too small, even after the cache was flushed.
        """
        recording, simulator, live = self._recording, self.simulator, self._live
        while self.position < end:
            self.settle()
            event = recording.events[self.position]
            if event.size == FREE:
                simulator.free(live.pop(event.block))
            elif event.block in self._put_back:
                live[event.block] = self._put_back.pop(event.block)
            else:
                block = recording.blocks[event.block]
                pool = self._pool(block.state_of) if block.state_of in self._pools else (block.pool, 0)
                live[event.block] = simulator.malloc(event.size, block.stream, pool)
                self._note_peak(simulator.allocated)
            self.position += 1

    def _note_peak(self, allocated: int) -> None:
        if allocated > self.peak:
            self.peak, self.peak_event = allocated, self.position

    def _pool(self, optimizer: int | None) -> tuple[int, int]:
        """The pool for its states, primed where it is new. Nobody uses it for anything else."""
        assert optimizer is not None, "only optimizers have such pools"
        pool = (0, optimizer + 1)
        if pool not in self.simulator.pools():
            self.simulator.free(self.simulator.malloc(self._pools[optimizer], pool=pool))
            self.simulator.release_pool(pool)
        return pool

    def settle(self) -> None:
        """Do what comes before the next event: emptied caches, uses by other streams, states of pools."""
        states = self._recording.pool_states
        while self._states < len(states) and states[self._states].event <= self.position:
            self._follow_pool(states[self._states])
            self._states += 1
        releases, uses = self._recording.releases, self._recording.uses
        while self._released < len(releases) and releases[self._released] <= self.position:
            self._released += 1
            self.simulator.empty_cache()
        while self._used < len(uses) and uses[self._used].event <= self.position:
            use = uses[self._used]
            self._used += 1
            if use.block is None:
                self.simulator.stream_done(use.stream)
            else:
                self.simulator.record_stream(self._live[use.block], use.stream)

    def _follow_pool(self, state: PoolState) -> None:
        """Keep the state of a pool, or put it back."""
        if state.kept is None:
            addresses = [self._live[block].address for block in state.blocks]
            self._kept[self._states] = checkpoint(self.simulator, (state.pool, 0)), addresses
            return
        kept, addresses = self._kept[state.kept]
        made = restore(self.simulator, kept)
        self._note_peak(self.simulator.peak_allocated)
        self._put_back = {
            block: made[address] for block, address in zip(state.blocks, addresses, strict=True)
        }


_STATISTICS: Final = (
    *(
        f"{what}.{pool}.{value}"
        for what, pool, value in product(
            (
                *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"),
                *("active_bytes", "inactive_split_bytes", "requested_bytes"),
            ),
            ("all", "small_pool", "large_pool"),
            ("current", "peak", "allocated", "freed"),
        )
    ),
    *(
        f"oversize_{what}.{value}"
        for what, value in product(("allocations", "segments"), ("current", "peak", "allocated", "freed"))
    ),
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "max_split_size",
)
"""Keys of `torch.cuda.memory_stats`."""


class LiveReplay:
    """What a program that is being traced may ask the allocator. Nothing is simulated until it does."""

    def __init__(
        self, recording: AllocationTrace, settings: Callable[[], AllocatorSettings], device_memory: int
    ) -> None:
        self._recording = recording
        self._settings = settings
        self._device_memory = device_memory
        self._replay: Replay | None = None

    def reset_peaks(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        self._now().reset_peaks()

    def reserved(self) -> int:
        """Bytes of segments."""
        return self._now().reserved

    def stats(self) -> dict[str, int]:
        """`torch.cuda.memory_stats`: current and highest bytes of live blocks and segments; others are 0."""
        simulator = self._now()
        statistics = dict.fromkeys(_STATISTICS, 0)
        for name, current, peak in (
            ("allocated_bytes", simulator.allocated, simulator.peak_allocated),
            ("active_bytes", simulator.active, max(simulator.active, simulator.peak_allocated)),
            ("reserved_bytes", simulator.reserved, simulator.peak_reserved),
        ):
            statistics[f"{name}.all.current"] = current
            statistics[f"{name}.all.peak"] = peak
        statistics["requested_bytes.all.current"] = simulator.requested
        return statistics

    def _now(self) -> Simulator:
        if self._replay is None:
            self._replay = Replay(self._recording, self._settings(), self._device_memory)
        self._replay.advance(len(self._recording.events))
        self._replay.settle()
        return self._replay.simulator


def replay(
    recording: AllocationTrace,
    settings: AllocatorSettings,
    device_memory: int,
    steps: int,
    limit: int | None = None,
    primed: Blocks = (),
    pools: Mapping[int, int] = MappingProxyType({}),
) -> list[StepCounters]:
    """The counters of each step of a recording.

    Args:
        limit: bytes that the process may reserve; None for no limit.
        primed: sizes of the blocks that are allocated and freed first.
        pools: as in `Replay`.

    Raises:
        memtriage.allocator.events.OutOfMemory: the limit is too small, even after the cache was flushed.
    """
    fed = Replay(recording, settings, device_memory, limit, primed=primed, pools=pools)
    simulator = fed.simulator
    built, *ends = [*recording.starts(steps), len(recording.events)]
    fed.advance(built)
    counters: list[StepCounters] = []
    for end in ends:
        fed.reset_peaks()
        fed.advance(end)
        counters.append(StepCounters(fed.peak, simulator.peak_reserved, simulator.allocated, fed.peak_event))
    return counters


def phase_peaks(
    recording: AllocationTrace, settings: AllocatorSettings, device_memory: int, step: int, steps: int
) -> dict[str, tuple[int, int]]:
    """The highest allocated bytes in each phase of a step, and the event after which they were.

    Args:
        step: counted from 0, of so many `steps`.
    """
    fed = Replay(recording, settings, device_memory)
    begin, end = [*recording.starts(steps), len(recording.events)][step : step + 2]
    fed.advance(begin)
    peaks: dict[str, tuple[int, int]] = {}
    markers = [marker for marker in recording.markers if begin <= marker.event < end]
    for marker, until in zip(markers, [*(each.event for each in markers[1:]), end], strict=False):
        fed.reset_peaks()
        fed.advance(until)
        if fed.peak > peaks.get(marker.phase, (0, 0))[0]:
            peaks[marker.phase] = fed.peak, fed.peak_event
    return peaks


def phase_at(recording: AllocationTrace, event: int) -> str:
    """The phase that an event belongs to."""
    phase = recording.markers[0].phase
    for marker in recording.markers:
        if marker.event > event:
            break
        phase = marker.phase
    return phase
