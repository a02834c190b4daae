"""The steps of a run, and how it ends in the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.prediction.many_steps.course import RunCourse, StepFailed, StepOutcome
from memtriage.prediction.many_steps.shapes import Shape
from memtriage.prediction.many_steps.step_trace import StepTrace


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The allocator's settings, and the memory that it can have.

    Attributes:
        device: bytes of the device.
        free: bytes of the device that the allocator can have.
        limit: bytes that the process may reserve; None if only the settings limit it.
    """

    settings: AllocatorSettings
    device: int
    free: int
    limit: int | None

    @property
    def reservable(self) -> int:
        """The most that can be reserved."""
        limit = self.limit
        if limit is None and self.settings.memory_fraction is not None:
            limit = int(self.settings.memory_fraction * self.device)
        return self.free if limit is None else min(limit, self.free)

    def unlimited(self) -> Simulator:
        settings = msgspec.structs.replace(self.settings, memory_fraction=None)
        return Simulator(settings, device_memory=self.device)

    def limited(self) -> Simulator:
        return Simulator(self.settings, device_memory=self.device, capacity=self.free, limit=self.limit)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ends in the memory that there is.

    Attributes:
        full_at: the step in which an allocation fails, from 1; 0 while building; None where none does.
        flushed_at: the first step in which the cache was flushed for lack of memory.
        failed: what failed.
    """

    full_at: int | None
    flushed_at: int | None = None
    failed: StepFailed | None = None


@dataclass(frozen=True, slots=True)
class LongRun:
    """The steps of a run.

    Attributes:
        before: the building, and the first steps as they came.
        step: the trace of each shape.
        shapes: of every step.
    """

    before: Sequence[StepTrace]
    step: Mapping[Shape, StepTrace]
    shapes: Sequence[Shape]

    def course(self, allocator: Callable[[], Simulator]) -> RunCourse:
        """A course that can run the steps of this run, and those of others with the same traces."""
        return RunCourse(allocator, max(step.oldest for step in (*self.before, *self.step.values())))

    def steps(self) -> list[StepTrace]:
        """The building and all steps."""
        return [*self.before, *(self.step[shape] for shape in self.shapes[len(self.before) - 1 :])]

    def with_later(self, change: Callable[[Sequence[Shape]], Iterable[Shape]]) -> LongRun:
        """The run with other shapes after the first steps."""
        first = len(self.before) - 1
        return LongRun(self.before, self.step, [*self.shapes[:first], *change(self.shapes[first:])])

    def outcomes(self, memory: MemoryLimits) -> list[StepOutcome]:
        """Of the building and of each step, with all the memory that is wanted."""
        return list(self.course(memory.unlimited).run(self.steps()))

    def end(self, memory: MemoryLimits) -> RunEnd:
        """How the run ends in the memory that there is."""
        flushed_at: int | None = None
        done = 0
        try:
            for outcome in self.course(memory.limited).run(self.steps()):
                if outcome.flushes and flushed_at is None:
                    flushed_at = done
                done += 1
        except StepFailed as failed:
            return RunEnd(done, flushed_at, failed)
        return RunEnd(None, flushed_at)
