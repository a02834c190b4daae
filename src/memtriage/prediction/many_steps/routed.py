"""Steps whose sizes follow from random draws, such as how many tokens a router sends to each expert.

Each allocation's size is a line over one of the numbers that follow from the draws: the tokens of an expert.
Which one, and which line, is found from a few traced steps. Then numbers are drawn for any number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from memtriage.prediction.drawn import ChangedError, Draws
from memtriage.prediction.many_steps.shapes import ROUTED
from memtriage.prediction.many_steps.step_trace import StepTrace

SEED: Final = 1
"""Of the draws: other ones than the traced."""


class NotRoutedError(Exception):
    """The steps of other draws cannot be derived; the text says why."""


class RoutedSteps:
    """Steps with other draws than the traced ones.

    Attributes:
        error: the largest relative difference between the derived and the traced bytes of a step's peak.
        drawn: how many numbers the sizes follow from.

    Raises:
        NotRoutedError: too few steps do the same.
    """

    def __init__(self, steps: dict[int, StepTrace], draws: Draws) -> None:
        last = max(steps)
        self._step = steps[last]
        self._draws = draws.last
        structure, asked = self._step.structure(), len(draws.numbers(last))
        alike = [
            number
            for number, step in steps.items()
            if step.structure() == structure and len(draws.numbers(number)) == asked
        ]
        if len(alike) < ROUTED // 2:
            raise NotRoutedError(f"only {len(alike)} of {len(steps)} traced steps have the same allocations")
        numbers = np.array([draws.numbers(number) for number in alike], dtype=np.float64)
        sizes = np.array([steps[number].sizes() for number in alike], dtype=np.float64)
        self._numbers, self._sizes = numbers[-1], self._step.sizes()
        self._place, self._slope = _lines(numbers, sizes)
        self._varying = np.flatnonzero(self._slope).tolist()
        self._wanted = set(self._place[self._varying].tolist())
        self.drawn = len(self._wanted)
        self.error = max(
            abs(self.step(drawn).peak() - steps[number].peak()) / steps[number].peak()
            for drawn, number in zip(numbers, alike, strict=True)
        )

    def drawn_again(self, count: int) -> Iterator[StepTrace]:
        """So many steps, each with its own draws.

        Raises:
            NotRoutedError: a draw changes more than sizes, such as which experts have tokens at all.
        """
        generator = torch.Generator().manual_seed(SEED)
        draw = self._draws.again(self._wanted)
        for _ in range(count):
            try:
                numbers = draw(generator)
            except (ChangedError, RuntimeError, IndexError) as error:
                raise NotRoutedError("another draw changes more than sizes") from error
            yield self.step(numbers)

    def step(self, numbers: Sequence[int]) -> StepTrace:
        """The step in which these numbers follow from what is drawn."""
        sizes = list(self._sizes)
        changed = self._slope * (np.array(numbers) - self._numbers)[self._place]
        for place in self._varying:
            sizes[place] = max(sizes[place] + round(changed[place]), 1)
        return self._step.with_sizes(sizes)


def _lines(numbers: Any, sizes: Any) -> tuple[Any, Any]:
    """For each size, the number that it follows from and by how much it grows with it.

    Args:
        numbers, sizes: of each step a row.
    """
    numbers = numbers - numbers[-1]
    sizes = sizes - sizes[-1]
    place = np.zeros(sizes.shape[1], dtype=np.int64)
    slope = np.zeros(sizes.shape[1])
    squares = (numbers**2).sum(axis=0)
    known: dict[bytes, int] = {}
    for column in np.flatnonzero(sizes.any(axis=0)):
        size = sizes[:, column]
        key = np.round(size / np.abs(size).max(), 9).tobytes()
        if key not in known:
            slopes = np.divide(size @ numbers, squares, out=np.zeros_like(squares), where=squares > 0)
            known[key] = int(np.abs(size[:, None] - slopes * numbers).max(axis=0).argmin())
        place[column] = known[key]
        slope[column] = size @ numbers[:, known[key]] / squares[known[key]]
    return place, slope
