"""The allocator over a run of many steps, exact to the byte.

What a step does to the allocator depends on nothing but its trace and the state in which it begins. States
recur: most of what a step makes it frees. So each pair of state and step is simulated once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.state import State, States
from memtriage.prediction.many_steps.step_trace import Left, Other, Reference, StepTrace

MOST_BLOCKS: Final = 4_000_000
"""If the states that are kept have more blocks, all are forgotten. A block takes 100 bytes."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The allocator during one step. Sizes in bytes.

    Attributes:
        peak_allocated, peak_reserved: highest values.
        end_allocated: after the step.
        stranded: free bytes after the step that could not be given back.
        flushes: how often the cache was flushed for lack of memory.
    """

    peak_allocated: int
    peak_reserved: int
    end_allocated: int
    stranded: int
    flushes: int


class StepFailed(Exception):
    """Memory ran out in a step."""

    def __init__(self, error: OutOfMemory, operator: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.operator = operator


class RunCourse:
    """Runs steps one after the other.

    Args:
        allocator: makes a simulator that has handed out nothing.
        oldest: how many steps ago the oldest block was made that any of the steps frees.
        most_blocks: of the states that are kept.

    Attributes:
        simulated: events that went through the simulator.
        stood_for: events of all steps, with those whose outcome was known.
    """

    def __init__(
        self, allocator: Callable[[], Simulator], oldest: int, most_blocks: int = MOST_BLOCKS
    ) -> None:
        self._new = allocator
        self._oldest = oldest
        self._most_blocks = most_blocks
        self._simulator = allocator()
        self._recent: deque[dict[Left, SimBlock]] = deque(maxlen=oldest + 1)
        self._compares = True
        self._states = States()
        self._known: dict[tuple[State, int], tuple[StepOutcome, State]] = {}
        self._here: State | None = None  # of the simulator
        self.simulated = self.stood_for = 0

    def run(self, steps: Iterable[StepTrace]) -> Iterator[StepOutcome]:
        """The outcome of each step, from an empty allocator on. The traces must live as long as this object.

        Raises:
            StepFailed: memory runs out in the step whose outcome was asked for.
        """
        here: State | None = None
        for step in steps:
            self.stood_for += len(step.operations)
            known = None if here is None else self._known.get((here, id(step)))
            if known is not None:
                outcome, here = known
                yield outcome
                continue
            if here is not None and here != self._here:
                self._restore(here)
            outcome = self._step(step)
            if self._states.blocks > self._most_blocks:
                self._states, here = States(), None
                self._known.clear()
            before, here = here, self._capture()
            self._here = here
            if before is not None and here is not None:
                self._known[before, id(step)] = outcome, here
            yield outcome

    def _step(self, step: StepTrace) -> StepOutcome:
        simulator = self._simulator
        retries = simulator.retries
        simulator.reset_peaks()
        made: list[SimBlock] = []
        malloc, free, append = simulator.malloc, simulator.free, made.append
        self.simulated += len(step.operations)
        try:
            for operation in step.operations:
                if isinstance(operation, Other):
                    self._do(operation, made)
                elif operation > 0:
                    append(malloc(operation))
                else:
                    free(made[-1 - operation])
        except OutOfMemory as error:
            raise StepFailed(error, step.names[len(made)]) from error
        self._recent.appendleft({name: made[place] for name, place in step.left.items()})
        return StepOutcome(
            simulator.peak_allocated,
            simulator.peak_reserved,
            simulator.allocated,
            simulator.stranded,
            simulator.retries - retries,
        )

    def _do(self, other: Other, made: list[SimBlock]) -> None:
        simulator = self._simulator
        if other.kind == "malloc":
            made.append(simulator.malloc(other.size, other.stream))
        elif other.kind == "passed":
            simulator.stream_done(other.stream)
        elif other.kind == "empty":
            simulator.empty_cache()
        elif other.block is not None:
            block = self._block(other.block, made, other.kind == "free")
            if block is not None and other.kind == "free":
                simulator.free(block)
            elif block is not None:
                simulator.record_stream(block, other.stream)

    def _block(self, reference: Reference, made: list[SimBlock], taken: bool) -> SimBlock | None:
        """The block of a reference; None where the steps before have left no such block."""
        if isinstance(reference, int):
            return made[reference]
        age, name = reference
        if age > len(self._recent):
            return None
        left = self._recent[age - 1]
        return left.pop(name, None) if taken else left.get(name)

    def _capture(self) -> State | None:
        """The state after a step; None where it cannot be compared with others."""
        if not self._compares or not States.has(self._simulator):
            self._compares = False
            return None
        names: dict[SimBlock, Hashable] = {
            block: (age, name)
            for age, left in zip(range(self._oldest), self._recent, strict=False)
            for name, block in left.items()
        }
        return self._states.capture(self._simulator, names)

    def _restore(self, state: State) -> None:
        self._simulator = self._new()
        self._recent = deque([{} for _ in range(self._oldest)], maxlen=self._oldest + 1)
        for named, block in self._states.restore(state, self._simulator).items():
            age, name = named
            self._recent[age][name] = block
