"""The shapes of a run's steps: where they come from, which of them are traced, and in which order."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from memtriage.prediction.drawn import Draws

TRACED_AT_MOST: Final = 32
"""Up to so many distinct shapes, each is traced."""
SAMPLED: Final = 16
"""Above, so many are: twice what a polynomial of the second degree in two dimensions needs."""
CHECKED: Final = 5
"""And so many of the derived ones, to see how far off they are."""
ROUTED: Final = 8
"""Later steps that are traced where sizes follow from random draws: a line through them is exact or not."""
FIRST_STEPS: Final = 2
"""Steps that come once: the optimizer makes its states in the first, DDP its buckets again in the second."""
HISTOGRAM_SEED: Final = 0
"""Of the order in which the lengths of a histogram come."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the memory of a step depends on, as far as its input goes.

    Attributes:
        form: everything but the sizes: names, types, how tensors are nested.
        numbers: the sizes of all dimensions, in order.
        volume: elements of all tensors; of lengths their product.
        text: in words, such as `1536`, or `input_ids 8x512`.
    """

    form: Hashable
    numbers: tuple[int, ...]
    volume: int = field(compare=False)
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step gets."""

    shape: Shape
    arguments: tuple[Any, ...]


def shape_of(values: Any) -> Shape:
    """The shape of a batch: tensors and arrays by their sizes and types, all else by its type."""
    numbers: list[int] = []
    words: list[str] = []
    volumes: list[int] = []
    form = _described(values, "", numbers, words, volumes)
    return Shape(form, tuple(numbers), sum(volumes), ", ".join(words) or type(values).__name__)


def _described(value: Any, name: str, numbers: list[int], words: list[str], volumes: list[int]) -> Hashable:
    sizes = getattr(value, "shape", None)
    if isinstance(sizes, tuple) and hasattr(value, "dtype"):
        numbers.extend(int(size) for size in sizes)
        volumes.append(math.prod(sizes))
        words.append(f"{name} {'x'.join(map(str, sizes)) or 'scalar'}".lstrip())
        return "tensor", str(value.dtype), len(sizes)
    if isinstance(value, Mapping):
        return (
            type(value).__name__,
            tuple(
                (str(key), _described(part, str(key), numbers, words, volumes)) for key, part in value.items()
            ),
        )
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(part, (int, float, str, bool)) for part in value):
            numbers.append(len(value))
            return type(value).__name__, type(value[0]).__name__
        return (
            type(value).__name__,
            tuple(_described(part, name, numbers, words, volumes) for part in value),
        )
    members = getattr(value, "__dict__", None)
    if members and not isinstance(value, type):  # a dataclass, a BatchEncoding
        return type(value).__name__, _described(dict(members), name, numbers, words, volumes)
    return type(value).__name__


def input_of(entry: Any) -> StepInput:
    """What a step gets for one entry of `lengths`: a number, a tuple of them, or a batch."""
    numbers = entry if isinstance(entry, tuple) else (entry,)
    if numbers and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        text = " x ".join(map(str, numbers))
        return StepInput(Shape(("lengths", len(numbers)), numbers, math.prod(numbers), text), numbers)
    return StepInput(shape_of(entry), (entry,))


NOTHING: Final = StepInput(Shape("nothing", (), 0, "the same in each step"), ())
"""What a step gets that takes nothing."""


def inputs_of(lengths: Iterable[Any] | Mapping[Any, int] | None, steps: int | None) -> list[StepInput]:
    """What each step gets, in order.

    Args:
        lengths: entries in order, or how often each comes; None where steps take nothing. Where they are
            fewer than `steps` they begin again.
        steps: how many; None for as many as there are.

    Raises:
        ValueError: there are none, or `steps` is missing where `lengths` is.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}; expected at least 1")
    if lengths is None:
        if steps is None:
            raise ValueError(
                "neither lengths nor steps; expected one of them, as in horizon(build, steps=1000)"
            )
        return [NOTHING] * steps
    if isinstance(lengths, Mapping):
        entries = [entry for entry, count in lengths.items() for _ in range(count)]
        random.Random(HISTOGRAM_SEED).shuffle(entries)
        lengths = entries
    known: dict[Shape, StepInput] = {}  # one batch of each shape is kept
    inputs: list[StepInput] = []
    wanted = math.inf if steps is None else steps
    while len(inputs) < wanted:
        before = len(inputs)
        for entry in islice(lengths, None if steps is None else steps - len(inputs)):
            given = input_of(entry)
            inputs.append(known.setdefault(given.shape, given))
        if len(inputs) == before:
            raise ValueError(f"lengths has {before} entries; expected one for each step, or some to repeat")
        if steps is None:
            break
    return inputs


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """Which shapes are traced.

    Attributes:
        traced: each once, the largest first: what grows with the largest input has grown then.
        checked: also traced, only to see how far off the derived ones are.
        derived: not traced.
    """

    traced: tuple[Shape, ...]
    checked: tuple[Shape, ...]
    derived: tuple[Shape, ...]


def choose(shapes: Iterable[Shape], most: int = TRACED_AT_MOST, sampled: int = SAMPLED) -> TraceChoice:
    """Choose what to trace of the shapes of a run.

    Raises:
        ValueError: inputs have more different forms than could be traced.
    """
    distinct = sorted(set(shapes), key=lambda shape: (-shape.volume, shape.numbers))
    if len(distinct) <= most:
        return TraceChoice(tuple(distinct), (), ())
    forms: dict[Hashable, list[Shape]] = {}
    for shape in distinct:
        forms.setdefault(shape.form, []).append(shape)
    if len(forms) > most // 2:
        raise ValueError(
            f"the inputs of the steps have {len(forms)} different forms (names, types, how many tensors); "
            f"expected at most {most // 2}, which differ in sizes alone"
        )
    chosen: set[Shape] = set()
    for members in forms.values():
        share = max(2, sampled * len(members) // len(distinct))
        chosen.update(_spread(members, share))
    rest = [shape for shape in distinct if shape not in chosen]
    checked = set(_spread(rest, CHECKED + 2)[1:-1])
    return TraceChoice(
        tuple(shape for shape in distinct if shape in chosen),
        tuple(shape for shape in rest if shape in checked),
        tuple(shape for shape in rest if shape not in checked),
    )


def _spread(members: Sequence[Shape], count: int) -> list[Shape]:
    """So many of these, evenly over their volumes, with the extremes of each dimension."""
    if len(members) <= count:
        return list(members)
    ends = members[0].volume, members[-1].volume
    wanted = [ends[0] + (ends[1] - ends[0]) * place / (count - 1) for place in range(count)]
    spread: dict[Shape, None] = {}
    for volume in wanted:
        rest = [shape for shape in members if shape not in spread]
        spread[min(rest, key=lambda shape: abs(shape.volume - volume))] = None
    for dimension in varying(members)[: count // 2]:
        for end in (min, max):
            spread[end(members, key=lambda shape: shape.numbers[dimension])] = None
    return sorted(spread, key=lambda shape: -shape.volume)


def varying(shapes: Sequence[Shape]) -> list[int]:
    """The positions of the numbers that differ, one for all that are equal in every shape."""
    columns = list(zip(*(shape.numbers for shape in shapes), strict=True))
    seen: dict[tuple[int, ...], int] = {}
    for position, column in enumerate(columns):
        if len(set(column)) > 1:
            seen.setdefault(column, position)
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class RunShapes:
    """What is known of a run.

    Attributes:
        shapes: of every step.
        first: how many steps are traced as they come; the others come after those.
        choice: which shapes of the others are traced.
    """

    shapes: Sequence[Shape]
    first: int
    choice: TraceChoice

    @property
    def traced(self) -> tuple[Shape, ...]:
        """The shapes of the traced steps, in order.

        The largest comes again at the end: at first it may have made what stays, such as a table of positions
        that is as long as the longest input.
        """
        choice = self.choice
        return (*self.shapes[: self.first], *choice.traced, *choice.checked, *choice.traced[:1])

    def routed(self, draws: Draws) -> bool:
        """Whether the steps are drawn again: all later ones have one shape, and sizes follow from draws."""
        longer = len(self.shapes) > self.first + ROUTED
        return longer and len(self.choice.traced) == 1 and bool(draws.numbers(self.first - 1))


def run_shapes(shapes: Sequence[Shape], first: int = FIRST_STEPS) -> RunShapes:
    """Plan the traces of a run.

    Raises:
        ValueError: its inputs are too different.
    """
    first = min(first, len(shapes))
    planned = RunShapes(shapes, first, choose(shapes[first:]))
    if len(planned.traced) > len(shapes):  # the program may have no step more: all are traced as they come
        return RunShapes(shapes, len(shapes), choose(()))
    return planned
