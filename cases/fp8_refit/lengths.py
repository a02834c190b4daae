"""Micro-batches of varied lengths, as dynamic batching of generated answers makes them. Pure: no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one length.

    Attributes:
        sequences: how many.
        length: tokens of each, padded.
        seed: of their tokens.
    """

    sequences: int
    length: int
    seed: int

    @property
    def tokens(self) -> int:
        """All of its tokens."""
        return self.sequences * self.length


def micro_batches(count: int, budget: int, longest: int, multiple: int, seed: int) -> list[MicroBatch]:
    """Return micro-batches of at most `budget` tokens each, whose lengths follow those of generated answers.

    Answers are short for the most part with a long tail (log-normal, half of them below a quarter of the
    longest), and are padded to a multiple; sequences of the same padded length go together.

    Args:
        count: micro-batches.
        budget: tokens of one, at most.
        longest: longest sequence, not above the budget.
        multiple: lengths are multiples of it.
        seed: two calls with one seed return the same.
    """
    chance = random.Random(seed)
    batches = []
    for index in range(count):
        drawn = chance.lognormvariate(0.0, 0.7) * longest / 4
        length = min(longest, max(multiple, -(-int(drawn) // multiple) * multiple))
        batches.append(MicroBatch(max(1, budget // length), length, seed * 100_003 + index))
    return batches
