"""The pipeline between device and host: a ring of pinned tiles, a stream per direction, one worker thread."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from memtriage.treat.offload.pinned import PinnedMemory
from memtriage.treat.offload.tiles import room


class Lane:
    """Copies from and to a CPU "device": done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> torch.cuda.Event | None:
        """Record the work on this thread's current stream so far."""
        return None

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Make both directions wait for that work; the host does not wait."""

    def settle(self) -> None:
        """Make the current stream of this thread wait for both directions; the host does not wait."""

    def down(self) -> AbstractContextManager[Any]:
        """Copies inside the block go to the host."""
        return nullcontext()

    def up(self) -> AbstractContextManager[Any]:
        """Copies inside the block go to the device."""
        return nullcontext()


class CudaLane(Lane):
    """Copies from and to a CUDA device, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def record_event(self) -> torch.cuda.Event | None:
        # A thread waits for it asleep: spinning would take a core from the kernel.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._down.wait_event(event)
            self._up.wait_event(event)

    def settle(self) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._down)
        current.wait_stream(self._up)

    def down(self) -> AbstractContextManager[Any]:
        way: AbstractContextManager[Any] = torch.cuda.stream(self._down)
        return way

    def up(self) -> AbstractContextManager[Any]:
        way: AbstractContextManager[Any] = torch.cuda.stream(self._up)
        return way


def lane_to(device: torch.device) -> Lane:
    """Return the lane for a device of type `cuda` or `cpu`."""
    return CudaLane(device) if device.type == "cuda" else Lane(device)


class Worker:
    """Runs jobs in order, each after the work on the caller's streams at its submission."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memtriage-offload")
        self._owner_pid = os.getpid()
        self._under_way: list[Future[None]] = []

    def submit(self, lanes: Iterable[Lane], job: Callable[[], None]) -> Future[None]:
        """Queue a job; its copies begin when the current streams have done their work so far.

        Raises:
            RuntimeError: this is a forked child, which has no such thread.
        """
        if os.getpid() != self._owner_pid:
            raise RuntimeError("this OffloadedAdamW belongs to the parent process; make one in this process")
        recorded = [(lane, lane.record_event()) for lane in lanes]
        future = self._executor.submit(_after, recorded, job)
        self._under_way = [earlier for earlier in self._under_way if not earlier.done()] + [future]
        return future

    def run(self, lanes: Iterable[Lane], job: Callable[[], None]) -> None:
        """Run a job and wait until its end, even if the caller is interrupted meanwhile.

        The caller's current streams wait for the copies; the host need not.
        """
        lanes = list(lanes)
        future = self.submit(lanes, job)
        try:
            future.result()
        finally:
            # Ctrl-C while waiting: no half step may remain.
            wait([future])
            for lane in lanes:
                lane.settle()

    def close(self, then: Callable[[], None]) -> None:
        """Take no more jobs, drop waiting ones, and call `then` when no job is running: now or later."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has nothing to free, and locks that are never released
        self._executor.shutdown(wait=False, cancel_futures=True)
        # An optimizer may be collected, in any thread, while backward's work is still running.
        for earlier in self._under_way:
            if earlier.running():
                earlier.add_done_callback(lambda _: then())
                return
        then()


def _after(before: list[tuple[Lane, torch.cuda.Event | None]], job: Callable[[], None]) -> None:
    for lane, event in before:
        lane.follow(event)
    with torch.no_grad():
        job()


def weak_callback(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook that does not keep the method's object alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def hook(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return hook


_JOBS_AHEAD: Final = 2  # one that is being computed, and the next one

Item = TypeVar("Item")


class Job(Protocol):
    """The computation of a tile, in another thread; jobs are done in the order of their starts."""

    def start(self) -> None:
        """Begin it; once."""

    def wait(self) -> None:
        """Wait until it has ended, if it was started; raise its error, if any."""


class TileSlot:
    """Room for one tile in each direction, and the copies that are running in it."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self._down, self._up = down, up
        self._arrived: torch.cuda.Event | None = None
        self._left: torch.cuda.Event | None = None

    def down(self, dtype: torch.dtype) -> Tensor:
        """The tile on its way down, as elements of `dtype`."""
        return self._down.view(dtype)

    def up(self, dtype: torch.dtype) -> Tensor:
        """The tile on its way up, as elements of `dtype`."""
        return self._up.view(dtype)

    def fetch(self, lane: Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copies from the device into parts of this slot's `down`."""
        with lane.down():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._arrived = lane.record_event()

    def send(self, lane: Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copies from parts of this slot's `up` to the device."""
        with lane.up():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._left = lane.record_event()

    def arrived(self) -> None:
        """Wait until what was fetched has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def vacated(self) -> None:
        """Wait until what was sent has been copied, so that `up` can be written again."""
        if self._left is not None:
            self._left.synchronize()
            self._left = None


class Ring:
    """A few slots of pinned memory.

    Attributes:
        slots: the room for tiles.
        pin_asked: whether page-locking was wanted.
        pinned: whether the slots are page-locked.
    """

    def __init__(self, elements: int, depth: int, *, pin: bool) -> None:
        """Allocate tiles of `elements` elements of two bytes, or half as many of four.

        Raises:
            MemoryError: the system refuses the memory.
        """
        run = room(elements)
        self.pin_asked = pin
        self._memory = PinnedMemory(2 * depth * run, pin=pin)
        runs = self._memory.bytes.split(run)
        self.slots = [TileSlot(runs[2 * index], runs[2 * index + 1]) for index in range(depth)]

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return int(self._memory.bytes.nbytes)

    def run(
        self,
        tiles: Iterable[Item],
        fetch: Callable[[Item, TileSlot], None],
        prepare: Callable[[Item, TileSlot], Job],
        finish: Callable[[Item, TileSlot], None],
    ) -> None:
        """Take every tile through the ring: fetches run ahead as far as there are slots.

        This thread only moves tiles: launching copies takes a good part of the time of a tile's job.

        Args:
            tiles: in the order in which they are taken.
            fetch: starts the copies down into the slot.
            prepare: called when they have arrived and the slot's `up` is free; returns the job to compute.
            finish: starts the copies up; called when the job is done.
        """
        arriving: deque[tuple[Item, TileSlot]] = deque()
        computing: deque[tuple[Item, TileSlot, Job]] = deque()
        free = deque(self.slots)

        def advance() -> None:
            """Pass jobs on, finish the oldest."""
            while arriving and len(computing) < _JOBS_AHEAD:
                tile, slot = arriving.popleft()
                slot.arrived()
                slot.vacated()
                job = prepare(tile, slot)
                computing.append((tile, slot, job))
                job.start()
            tile, slot, job = computing[0]
            job.wait()
            computing.popleft()
            finish(tile, slot)
            free.append(slot)

        try:
            for tile in tiles:
                if not free:
                    advance()
                slot = free.popleft()
                fetch(tile, slot)
                arriving.append((tile, slot))
            while arriving or computing:
                advance()
        finally:
            # No job may still run when the caller gets the error.
            for *_, job in computing:
                with suppress(Exception):
                    job.wait()

    def close(self) -> None:
        """Wait for all copies, then release the page locks. Repeatable."""
        for slot in self.slots:
            slot.arrived()
            slot.vacated()
        self._memory.close()
