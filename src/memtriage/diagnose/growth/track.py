"""Keep a counter's readings over a run of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BLOCKS: Final = 512
"""Blocks kept: 1/256 of the run can still be resolved, and an estimate takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class Points:
    """A counter's readings, or blocks of equally many successive readings, oldest first.

    Attributes:
        at: positions; for a block, the mean position of its readings.
        means: bytes; for a block, the mean of its readings.
        floors: bytes; for a block, its smallest reading.
    """

    at: Floats
    means: Floats
    floors: Floats

    @property
    def span(self) -> float:
        """Positions from the first point to the last."""
        return float(self.at[-1] - self.at[0]) if len(self.at) else 0.0

    def since(self, position: float) -> Points:
        """Return the points from a position on."""
        first = int(np.searchsorted(self.at, position))
        return Points(self.at[first:], self.means[first:], self.floors[first:])

    def plus(self, added: Floats) -> Points:
        """Return these points with bytes added to each."""
        return Points(self.at, self.means + added, self.floors + added)


class Track:
    """Keeps one counter at one kind of mark. Adding a reading costs about a microsecond.

    The first readings are kept one by one. Each time there are 512 blocks, neighbors are merged: a block
    keeps its mean, which averages out noise, and its smallest reading, which a brief spike cannot move.

    Its memory is allocated at once, so it does not add to the growth that it measures.

    Args:
        warm_up: first readings to leave out.

    Attributes:
        readings: number of readings so far, including the warm-up.
        last: position and bytes of the last one; None before the first.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self.readings = 0
        self.last: tuple[float, int] | None = None
        self._warm_up = warm_up
        self._width = 1
        self._unwritten: list[tuple[int, Floats]] = []
        self._written = 0
        self._blocks = np.zeros((_BLOCKS, 3))  # of each its position, mean and smallest reading
        self._length = 0
        self._open: tuple[int, float, int, int] = (0, 0.0, 0, 0)

    def add(self, position: float, value: int) -> None:
        """Add a reading, unless its position is no further than the last one's.

        If two training threads complete two steps before either makes its mark, both marks have the same
        position, and there is no rate between them.
        """
        if self.last is not None and position <= self.last[0]:
            return
        self.last = (position, value)
        self.readings += 1
        if self.readings <= self._warm_up:
            return
        count, positions, values, least = self._open
        count, positions, values = count + 1, positions + position, values + value
        least = value if count == 1 else min(least, value)
        if count < self._width:
            self._open = (count, positions, values, least)
            return
        self._open = (0, 0.0, 0, 0)
        self._append((positions / count, values / count, least))

    def points(self) -> Points:
        """Return the readings so far; the block that is being filled counts once it is half full."""
        at, means, floors = np.vstack((self._blocks[: self._length], self._filling())).T
        return Points(at, means, floors)

    def extend(self, width: int, blocks: Floats) -> None:
        """Add blocks that another track has made of its readings.

        Args:
            width: readings per block: as many as those before, or more; fewer in a last one, which was being
                filled.
            blocks: position, mean and smallest reading of each.
        """
        while self._width < width:
            self._merge()
        if width < self._width:
            ((position, value, least),) = blocks
            self._open = (width, width * position, width * value, least)
        else:
            for block in blocks:
                self._append(block)
        if len(blocks):
            self.readings = max(self.readings, self._warm_up) + width * len(blocks)
            self.last = (float(blocks[-1][0]), int(blocks[-1][1]))

    def new_blocks(self, *, last: bool = False) -> list[tuple[int, Floats]]:
        """Return the blocks that are complete since the last call, and how many readings each has.

        Args:
            last: no reading will follow: the block that is being filled counts, too, where `points` has it.
        """
        new = [*self._unwritten, (self._width, self._blocks[self._written : self._length].copy())]
        self._unwritten, self._written = [], self._length
        if last:
            new.append((self._open[0], self._filling()))
        return [(width, blocks) for width, blocks in new if len(blocks)]

    def _filling(self) -> Floats:
        """Return the block that is being filled, where it is half full; else none."""
        count, positions, values, least = self._open
        full = 2 * count > self._width
        return np.array([[positions / count, values / count, least]]) if full else np.empty((0, 3))

    def _append(self, block: Sequence[float] | Floats) -> None:
        self._blocks[self._length] = block
        self._length += 1
        if self._length == _BLOCKS:
            self._merge()

    def _merge(self) -> None:
        self._unwritten.append((self._width, self._blocks[self._written : self._length].copy()))
        even = self._length - self._length % 2
        left, right = self._blocks[0:even:2], self._blocks[1:even:2]
        merged = (left + right) / 2
        merged[:, 2] = np.minimum(left[:, 2], right[:, 2])
        self._length, self._width = len(merged), self._width * 2
        self._blocks[: self._length] = merged
        self._written = self._length
