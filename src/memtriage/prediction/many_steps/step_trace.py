"""The trace of one step, cut out so that it can come after any other.

A step frees what earlier steps have left: the last loss, the batch before, gradients. Such a block is named
by how many steps ago it was made and by what made it, so that it is found again whatever step came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from memtriage.prediction.build import BuildError
from memtriage.prediction.lifetimes import DEFAULT_STREAM, FREE, SHARED_POOL, AllocationTrace

BUILD: Final = -1
"""The step of what was made before the first one."""
Left = tuple[str, str, int]
"""What names a block that a step leaves: phase, operator, and the place among those of the same."""
Reference = int | tuple[int, Left]
"""A block of the step, by its number there; or one that an earlier step left: how many steps ago, which."""


@dataclass(frozen=True, slots=True)
class Other:
    """An operation that is not an allocation on the default stream or the free of a block of the same step.

    Attributes:
        kind: `malloc`, `free`, `use` (by another stream), `passed` (a stream) or `empty` (the cache).
        size: bytes asked for.
        stream: of the allocation, the use, or that has passed.
        block: which is freed or used.
    """

    kind: Literal["malloc", "free", "use", "passed", "empty"]
    size: int = 0
    stream: int = DEFAULT_STREAM
    block: Reference | None = None


@dataclass(slots=True)
class StepTrace:
    """The allocations and frees of one step.

    Attributes:
        operations: in order: bytes to allocate; -1 - N for the free of the step's block N; or another.
        left: the blocks that are live at the end, by name.
        names: operators, by the block that they made.
    """

    operations: list[int | Other] = field(default_factory=list)
    left: dict[Left, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """How many steps ago the oldest block was made that this step frees or uses; 0 for none."""
        return max(map(_age, self.operations), default=0)

    def sizes(self) -> list[int]:
        """Bytes of the allocations, in order."""
        return [size for operation in self.operations if (size := _allocated(operation))]

    def peak(self) -> int:
        """Most bytes that blocks of the step have asked for at once."""
        sizes = self.sizes()
        live = highest = 0
        for operation in self.operations:
            if isinstance(operation, int) and operation < 0:
                live -= sizes[-1 - operation]
            live += _allocated(operation)
            highest = max(highest, live)
        return highest

    def differs(self, other: StepTrace) -> bool:
        """Whether another step does anything else to the allocator."""
        return (self.operations, self.left) != (other.operations, other.left)

    def structure(self) -> tuple[object, ...]:
        """All but the sizes: steps that differ in nothing else can be derived from each other."""
        return (
            tuple(
                replace(operation, size=0) if isinstance(operation, Other) else min(operation, 1)
                for operation in self.operations
            ),
            tuple(self.left.items()),
        )

    def with_sizes(self, sizes: Sequence[int]) -> StepTrace:
        """The same step with other sizes of its allocations."""
        given = iter(sizes)
        operations = list(self.operations)
        for place, operation in enumerate(operations):
            if _allocated(operation):
                size = next(given)
                operations[place] = replace(operation, size=size) if isinstance(operation, Other) else size
        return StepTrace(operations, self.left, self.names)

    def settled(self, step: int) -> StepTrace:
        """The step as it comes again: without what it does to blocks that were made before training."""
        operations = [operation for operation in self.operations if _age(operation) <= step]
        return StepTrace(operations, self.left, self.names)


def _allocated(operation: int | Other) -> int:
    """Bytes that an operation allocates."""
    return operation.size if isinstance(operation, Other) else max(operation, 0)


def _age(operation: int | Other) -> int:
    """How many steps ago the block was made that an operation frees or uses; 0 for one of its own step."""
    block = operation.block if isinstance(operation, Other) else None
    return block[0] if isinstance(block, tuple) else 0


def cut(recording: AllocationTrace, steps: int) -> list[StepTrace]:
    """The building and the steps of a recording, in order: one more than `steps`.

    Raises:
        BuildError: it has memory of CUDA graphs, which the first steps record and later ones replay.
    """
    if any(block.pool != SHARED_POOL for block in recording.blocks):
        raise BuildError(
            "a run of many steps with CUDA graphs (torch.compile with mode='reduce-overhead') cannot be "
            "predicted: only the first steps allocate; predict these alone, without a horizon"
        )
    starts = [0, *recording.starts(steps), len(recording.events)]
    return _Cut(recording).steps(starts)


class _Cut:
    def __init__(self, recording: AllocationTrace) -> None:
        self._recording = recording
        self._made: dict[int, tuple[int, int]] = {}  # by block: the step, and its number there
        self._name: dict[int, Left] = {}  # of blocks that a step left
        self._releases = self._uses = 0

    def steps(self, starts: Sequence[int]) -> list[StepTrace]:
        return [
            self._step(number, starts[number + 1], starts[number + 2])
            for number in range(BUILD, len(starts) - 2)
        ]

    def _step(self, number: int, begins: int, ends: int) -> StepTrace:
        recording = self._recording
        trace = StepTrace()
        blocks: list[int | None] = []
        for position in range(begins, ends):
            self._before(trace, number, position)
            event = recording.events[position]
            if event.size != FREE:
                self._made[event.block] = number, len(blocks)
                blocks.append(event.block)
                made = recording.blocks[event.block]
                trace.names.append(made.op)
                if made.stream == DEFAULT_STREAM:
                    trace.operations.append(event.size)
                else:
                    trace.operations.append(Other("malloc", event.size, made.stream))
                continue
            block = self._reference(event.block, number)
            if isinstance(block, int):
                trace.operations.append(-1 - block)
                blocks[block] = None
            else:
                trace.operations.append(Other("free", block=block))
        counted: Counter[tuple[str, str]] = Counter()
        for place, left in enumerate(blocks):
            if left is not None:
                made = recording.blocks[left]
                kind = made.phase, made.op
                self._name[left] = *kind, counted[kind]
                trace.left[self._name[left]] = place
                counted[kind] += 1
        return trace

    def _before(self, trace: StepTrace, number: int, position: int) -> None:
        """Emptied caches and uses by other streams that come before an event."""
        releases, uses = self._recording.releases, self._recording.uses
        while self._releases < len(releases) and releases[self._releases] <= position:
            self._releases += 1
            trace.operations.append(Other("empty"))
        while self._uses < len(uses) and uses[self._uses].event <= position:
            use = uses[self._uses]
            self._uses += 1
            if use.block is None:
                trace.operations.append(Other("passed", stream=use.stream))
            else:
                block = self._reference(use.block, number)
                trace.operations.append(Other("use", stream=use.stream, block=block))

    def _reference(self, block: int, number: int) -> Reference:
        step, place = self._made[block]
        return place if step == number else (number - step, self._name[block])
