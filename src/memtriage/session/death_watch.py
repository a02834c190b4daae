"""What only the instant of a failing allocation can tell, and what the program was at until then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, Protocol

from memtriage.diagnose.leaks import CensusPoint
from memtriage.diagnose.moment import FrameState, Phase, moment_from_frames
from memtriage.model.findings import Finding
from memtriage.model.units import size
from memtriage.observe import cuda
from memtriage.observe.cgroup import host_limit
from memtriage.observe.hooks import inside_backward
from memtriage.observe.inputs import batch_elements, caller_frames, running_functions
from memtriage.session.death import (
    FailedAllocation,
    Progress,
    device_of,
    died_of_memory,
    error_frames,
    lifted_limit,
    owners_of,
)

_INPUT_EVERY_S: Final = 0.02
_INPUT_SHARE: Final = 0.002
_MOST_LOOKED_AT: Final = 3
"""A program that lives through failing allocations may have many; later ones are only counted by torch."""


class Watched(Protocol):
    """What is needed of a session."""

    step_count: int
    backwards: int
    phase: Phase

    @property
    def running(self) -> bool: ...
    @property
    def since_step(self) -> int: ...
    def failed(self, where: str, error: Exception) -> None: ...


class DeathWatch:
    """Waits for memory to run out.

    Attributes:
        input_elements: elements of the batch in work; None where unknown.
        largest_input: elements of the largest batch that had memory enough.

    Args:
        session: the watch that it is a part of.
        look: takes a census, given the frames of an error, and keeps other marks out meanwhile.
    """

    def __init__(self, session: Watched, look: Callable[[Sequence[FrameType]], CensusPoint]) -> None:
        self._session = session
        self._look = look
        self._observing = False
        self._failed: FailedAllocation | None = None
        self._owners: list[tuple[str, int]] = []
        self.input_elements: int | None = None
        self.largest_input: int | None = None
        self._input_due_s = 0.0

    # --- while the program runs -----------------------------------------------------------------------------

    def observe(self) -> None:
        """Has torch tell of failing allocations, from the time on at which CUDA is initialised."""
        if not self._observing and cuda.initialised():
            self._observing = cuda.attach_oom_observer(self._out_of_memory)

    def stop(self) -> None:
        """Takes the observer away."""
        if self._observing:
            cuda.attach_oom_observer(None)

    def backward_begins(self) -> None:
        """Reads, now and then, how large the batch is. Called right below the hook of the backward."""
        now = time.perf_counter()
        if now < self._input_due_s:
            return
        try:
            found = batch_elements(caller_frames(3))
        except Exception as error:  # foreign objects may do anything when looked at
            self._session.failed("batch size", error)
            return
        took = time.perf_counter() - now
        self._input_due_s = now + max(_INPUT_EVERY_S, took / _INPUT_SHARE)
        self.input_elements = found if found is not None else self.input_elements

    def backward_ends(self) -> None:
        """A backward had memory enough."""
        if self.input_elements is not None:
            self.largest_input = max(self.largest_input or 0, self.input_elements)

    # --- when memory runs out -------------------------------------------------------------------------------

    def _out_of_memory(self, device: int, requested: int, limit: int, free: int) -> None:
        """Inside the failing allocation: takes what only this instant can tell. Nothing on the GPU."""
        session = self._session
        times = 1 if self._failed is None else self._failed.times + 1
        if not session.running or times > _MOST_LOOKED_AT:
            return
        grad_enabled = bool(sys.modules["torch"].is_grad_enabled())
        phase: Phase = "backward" if inside_backward() else session.phase
        if phase in ("setup", "forward"):
            state = FrameState(training_begun=session.backwards > 0, grad_enabled=grad_enabled)
            phase = moment_from_frames(running_functions(), state)
        progress = self._progress()
        if phase in ("forward", "evaluation"):
            progress.input_elements = batch_elements(caller_frames(1, depth=None)) or progress.input_elements
        name = f"cuda:{device}"
        self._failed = FailedAllocation(
            name, requested, limit, free, phase, grad_enabled, progress, cuda.counters(device), times=times
        )
        try:
            self._failed.owners = owners_of(self._look(()).census.storages, name)
        except Exception as error:  # short of host memory too, perhaps: the counters must do
            session.failed("census at the out-of-memory error", error)

    def look_at(self, error: BaseException) -> bool:
        """Looks at what the program had when an error ended it, where no observer has.

        Args:
            error: of memory, with its traceback.

        Returns:
            Whether a census was taken.
        """
        if self._failed is not None:
            return False
        with lifted_limit():
            point = self._look(error_frames(error))
        self._owners = owners_of(point.census.storages, device_of(error))
        return True

    def finding(self, error: BaseException, leaks: Sequence[Finding]) -> Finding:
        """What is told of a program that an error of memory has ended, and that was found to leak."""
        limit = host_limit()
        source = f"{limit.source}, {size(limit.bytes)}"
        return died_of_memory(error, self._failed, self._progress(), self._owners, source, leaks)

    def _progress(self) -> Progress:
        session = self._session
        return Progress(
            session.step_count, session.since_step, session.backwards, self.largest_input, self.input_elements
        )
