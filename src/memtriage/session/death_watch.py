"""What is only known at the instant of a failing allocation, and what the program was doing until then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from msgspec.structs import replace

from memtriage.messages.errors import FrameState, phase_from_frames
from memtriage.model.census import Census
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPhase, TrainingPosition
from memtriage.model.units import size
from memtriage.observe import cuda
from memtriage.observe.cgroup import host_limit
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.hooks import inside_backward
from memtriage.observe.inputs import batch_elements, caller_frames, running_functions
from memtriage.process.limits import lifted_memory_limit
from memtriage.process.stdlib import time
from memtriage.session.death import (
    FailedAllocation,
    device_of,
    died_of_memory,
    error_frames,
    owners_of,
)

_MOST_LOOKED_AT: Final = 3
"""A program that survives failing allocations may have many; torch only counts the later ones."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How often the size of the batch is read.

    Attributes:
        apart_s: least time between two readings: batches of fast steps differ little.
        share: part of the program's time that the readings may take.
    """

    apart_s: float = 0.02
    share: float = 0.002

    def next_s(self, now_s: float, took_s: float) -> float:
        """When the next reading is due, if the one at `now_s` took `took_s`."""
        return now_s + max(self.apart_s, took_s / self.share)


BATCHES: Final = BatchPolicy()


@dataclass(slots=True, weakref_slot=True)
class DeathWatch:
    """Notes what a program does, so that an out-of-memory error can be explained.

    Attributes:
        batch_elements: elements of the batch in work; None where unknown.
        batches_vary: batches of several sizes have been seen; None if no size was seen.
        largest_batch: elements of the largest batch whose backward completed.

    Args:
        position: gives where training stands.
        running: whether this process is still watched.
        failed: notes that a part of the watch failed, by its name.
        look: takes a census with the frames of an error, and makes other marks wait meanwhile.
    """

    position: Callable[[], TrainingPosition]
    running: Callable[[], bool]
    failed: Callable[[str, Exception], None]
    look: Callable[[Sequence[FrameType]], Census]
    _observing: bool = False
    _failed: FailedAllocation | None = None
    _owners: list[tuple[str, int]] = field(default_factory=list)
    batch_elements: int | None = None
    batches_vary: bool | None = None
    largest_batch: int | None = None
    _input_due_s: float = 0.0

    # --- while the program runs -----------------------------------------------------------------------------

    def observe(self) -> None:
        """Have torch report failing allocations, as soon as CUDA is initialized."""
        if not self._observing and cuda.initialized():
            self._observing = cuda.attach_oom_observer(self._out_of_memory)

    def stop(self) -> None:
        """Remove the observer."""
        if self._observing:
            cuda.attach_oom_observer(None)

    def backward_begins(self) -> int | None:
        """Read, now and then, how many elements the batch has, and return them. Called by the session."""
        now = time.perf_counter()
        if now < self._input_due_s:
            return None
        try:
            elements = batch_elements(caller_frames(4))
        except Exception as error:  # foreign objects may do anything when inspected
            if is_programs_exception(error):
                raise
            self.failed("batch size", error)
            return None
        took = time.perf_counter() - now
        self._input_due_s = BATCHES.next_s(now, took)
        if elements is not None:
            self.batches_vary = bool(self.batches_vary) or self.batch_elements not in (None, elements)
            self.batch_elements = elements
        return elements

    def backward_ends(self) -> None:
        """Note the batch of a backward that completed."""
        if self.batch_elements is not None:
            self.largest_batch = max(self.largest_batch or 0, self.batch_elements)

    # --- when memory runs out -------------------------------------------------------------------------------

    def _out_of_memory(self, device: int, requested: int, limit: int, free: int) -> None:
        """Record the state inside the failing allocation, without using the GPU."""
        times = 1 if self._failed is None else self._failed.times + 1
        if not self.running() or times > _MOST_LOOKED_AT:
            return
        grad_enabled = bool(sys.modules["torch"].is_grad_enabled())
        here = self._here()
        phase: TrainingPhase = "backward" if inside_backward() else here.phase
        if phase in ("setup", "forward"):
            state = FrameState(training_begun=here.backwards > 0, grad_enabled=grad_enabled)
            phase = phase_from_frames(running_functions(), state)
        elements = here.batch_elements
        if phase in ("forward", "evaluation"):
            elements = batch_elements(caller_frames(1, depth=None)) or elements
        here = replace(here, phase=phase, grad_enabled=grad_enabled, batch_elements=elements)
        name = f"cuda:{device}"
        self._failed = FailedAllocation(
            name, requested, limit, free, here, cuda.counters(device), times=times
        )
        try:
            self._failed.owners = owners_of(self.look(()).storages, name)
        except Exception as error:  # host memory may be short, too: the counters must be enough
            if is_programs_exception(error):
                raise
            self.failed("census at the out-of-memory error", error)

    def look_at(self, error: BaseException) -> bool:
        """Look at what the program had when an error ended it, if no observer has.

        Args:
            error: the out-of-memory error, with its traceback.

        Returns:
            Whether a census was taken.
        """
        if self._failed is not None:
            return False
        with lifted_memory_limit():
            census = self.look(error_frames(error))
        self._owners = owners_of(census.storages, device_of(error))
        return True

    def finding(self, error: BaseException, leaks: Sequence[Finding]) -> Finding:
        """Return the finding on an out-of-memory error, given the leaks that were found."""
        limit = host_limit()
        source = f"{limit.source}, {size(limit.bytes)}"
        return died_of_memory(error, self._failed, self._here(), self._owners, source, leaks)

    def _here(self) -> TrainingPosition:
        return replace(self.position(), batch_elements=self.batch_elements, largest_batch=self.largest_batch)
