"""Programs that are traced with one batch of each shape: build functions and scripts."""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from memtriage.prediction.build import Build, BuildError, Built
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.fake_cuda.tensors import is_gpu
from memtriage.prediction.many_steps.shapes import (
    FIRST_STEPS,
    NOTHING,
    ROUTED,
    RunShapes,
    Shape,
    StepInput,
    run_shapes,
    shape_of,
)
from memtriage.prediction.script import Script, ScriptWatch
from memtriage.prediction.trace import BuildFunction
from memtriage.prediction.watch import TraceWatch

WITHOUT_LOADER: Final = FIRST_STEPS + 4
"""Steps that are traced of a script whose batches come from no `DataLoader`: they have to be all the same."""


class ShapedBuild(BuildFunction):
    """A build function whose step function takes the input of a step."""

    varies = True
    draws_again = True

    def __init__(self, build: Build, inputs: Sequence[StepInput]) -> None:
        super().__init__(build)
        self.run_shapes = run_shapes([given.shape for given in inputs])
        self._inputs = {given.shape: given for given in inputs}

    def wanted(self, watch: TraceWatch, steps: int) -> int:
        if watch.draws is None or not self.run_shapes.routed(watch.draws):
            return steps
        return max(steps, self.run_shapes.first + ROUTED)

    def call(self, built: Built, step: int) -> Any:
        traced = self.run_shapes.traced
        arguments = self._inputs[traced[min(step, len(traced) - 1)]].arguments
        try:
            inspect.signature(built.step).bind(*arguments)
        except TypeError as error:
            raise BuildError(
                f"the step function that `build` returned cannot be called with {len(arguments)} argument"
                f"{'s' * (len(arguments) != 1)} ({error}); expected one that takes an entry of lengths, as "
                "in `def step(length):`"
            ) from error
        return built.step(*arguments)


class ShapedScript(Script):
    """A script that gets from its `DataLoader` one batch of each shape.

    The loader is the one that a step took its last batch from. After the first steps it is read to the end of
    the horizon, epoch after epoch, without the model.
    """

    run_shapes: RunShapes | None = None
    draws_again = True

    def __init__(
        self, target: str, arguments: Sequence[str] = (), *, module: bool = False, steps: int
    ) -> None:
        super().__init__(target, arguments, module=module)
        self._steps = steps

    def run(self, watch: ScriptWatch, steps: int) -> int:
        feed = _LoaderFeed(watch, self._steps)
        watch.begun = feed.step_begins
        with feed.between():
            made = super().run(watch, min(self._steps, WITHOUT_LOADER))
        self.run_shapes = feed.run_shapes
        return made


class _LoaderFeed:
    """Between a script and its data loaders."""

    def __init__(self, watch: ScriptWatch, steps: int) -> None:
        self.run_shapes: RunShapes | None = None
        self._watch = watch
        self._steps = steps
        self._loader: DataLoader[Any] | None = None  # that was read last
        self._read: dict[int, list[Shape]] = {}  # by loader
        self._at: dict[int, Counter[int]] = {}  # by step that begins: how many batches each loader has given
        self._next: deque[Any] = deque()
        self._last: Any = None
        self._per_step = 0

    def step_begins(self, step: int) -> None:
        """A step begins, or begins for good: another optimizer may have followed."""
        self._at[step] = Counter({loader: len(read) for loader, read in self._read.items()})
        draws, planned = self._watch.draws, self.run_shapes or run_shapes([NOTHING.shape] * self._steps)
        if draws is not None and planned.routed(draws):
            self._watch.last = max(self._watch.last, planned.first + ROUTED)

    def between(self) -> AbstractContextManager[None]:
        """In the block loaders are read by way of this object."""
        original = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Any:
            if self.run_shapes is not None and loader is self._loader:
                return self._given()
            return self._passed(loader, original(loader), lambda: original(loader))

        return replaced(DataLoader, "__iter__", iterate)

    def _passed(
        self, loader: DataLoader[Any], batches: Iterator[Any], again: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        read = self._read.setdefault(id(loader), [])

        def taken() -> Any:
            batch = next(batches)
            read.append(shape_of(batch))
            return batch

        try:
            while self.run_shapes is not None or not self._is_settled(loader):
                yield taken()  # in no variable: the script alone keeps it
            while len(read) % self._per_step:
                yield taken()
        except StopIteration:
            return
        self._loader = loader
        self._read_ahead(batches, again, read)
        yield from self._given()

    def _is_settled(self, loader: DataLoader[Any]) -> bool:
        """Whether the first steps are done, and the last one took batches from this loader."""
        step = self._watch.step
        if step < FIRST_STEPS:
            return False
        now, before = (self._at.get(each, Counter())[id(loader)] for each in (step, step - 1))
        self._per_step = now - before
        return self._per_step > 0

    def _read_ahead(
        self, batches: Iterator[Any], again: Callable[[], Iterator[Any]], read: list[Shape]
    ) -> None:
        """Read the batches of all steps, and keep one of each shape that will be traced."""
        per_step = self._per_step
        first = len(read) // per_step
        shapes = [_joined(read[step * per_step : (step + 1) * per_step]) for step in range(first)]
        kept: dict[Shape, list[Any]] = {}
        endless = _endless(batches, again)
        while len(shapes) < self._steps:
            group = list(islice(endless, per_step))
            if len(group) < per_step:
                raise BuildError("the script's DataLoader gives no batch the second time that it is read")
            if any(isinstance(leaf, torch.Tensor) and is_gpu(leaf) for leaf in tree_leaves(group)):
                raise BuildError(
                    "the script's DataLoader puts batches on the device, so they cannot be read ahead: send "
                    "them there in the training loop"
                )
            shape = _joined([shape_of(batch) for batch in group])
            kept.setdefault(shape, group)
            shapes.append(shape)
        self.run_shapes = run_shapes(shapes, first)
        order = self.run_shapes.traced[first:]
        self._next.extend(batch for shape in order for batch in kept[shape])
        self._watch.last = first + len(order)

    def _given(self) -> Iterator[Any]:
        """The batches to trace, then the last of them: a script may read ahead."""
        while self._next:
            self._last = self._next.popleft()
            yield self._last
        while True:
            yield self._last


def _endless(batches: Iterator[Any], again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """A loader's batches, epoch after epoch; ends where an epoch has none."""
    while True:
        yield from batches
        batches = again()
        first = next(batches, None)
        if first is None:
            return
        yield first


def _joined(shapes: Sequence[Shape]) -> Shape:
    """The shape of the micro-batches of one step."""
    if len(shapes) == 1:
        return shapes[0]
    texts = [shape.text for shape in shapes]
    return Shape(
        tuple(shape.form for shape in shapes),
        tuple(number for shape in shapes for number in shape.numbers),
        sum(shape.volume for shape in shapes),
        f"{len(texts)} of {texts[0]}" if len(set(texts)) == 1 else " + ".join(texts),
    )
