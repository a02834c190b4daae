"""The steps of a run by their shapes, and the order in which some of them are traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtriage.prediction.drawn import Draws
from memtriage.prediction.many_steps.shapes import Shape, TraceChoice, choose

ROUTED: Final = 8
"""Later steps that are traced where sizes follow from random draws: a line through them is exact or not."""
FIRST_STEPS: Final = 2
"""Steps that come once: the optimizer makes its states in the first, DDP its buckets again in the second."""


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
