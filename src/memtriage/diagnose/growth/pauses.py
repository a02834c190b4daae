"""Decide whether a program makes up for the pauses that censuses cause. Pure.

A program that computes all the time loses a pause: its growth is even over time without pauses. A server, or
a program that follows a schedule, does afterwards what it missed: its growth is even over all of the time.
Each has the rate without a watch over its own kind of time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Floats, Points


@dataclass(frozen=True, slots=True)
class PausePolicy:
    """When pauses make a difference.

    Attributes:
        share: part of the time since the first that pauses must take.
        points: readings needed since then.
        evener: distance of readings from a line over all of the time, as part of that without pauses, below
            which the program makes up for them.
    """

    share: float = 0.05
    points: int = 9
    evener: float = 0.5


POLICY: Final = PausePolicy()


class Pauses:
    """The pauses of a program, by their place in its time without them."""

    def __init__(self) -> None:
        self._places: list[float] = []
        self._seconds: list[float] = [0.0]  # of all before each

    def add(self, place: float, seconds: float) -> None:
        """Add a pause that is later than those before."""
        self._places.append(place)
        self._seconds.append(self._seconds[-1] + seconds)

    def included(self, place: float) -> float:
        """Return a place in time without pauses as one in all of the time."""
        return place + self._seconds[bisect_left(self._places, place)]

    def made_up_for(self, points: Points, policy: PausePolicy = POLICY) -> bool:
        """Return whether a counter grows more evenly over all of the time.

        Args:
            points: its readings, over time without pauses.
            policy: thresholds.
        """
        if not self._places:
            return False
        points = points.since(self._places[0])
        if len(points.at) < policy.points:
            return False
        every = np.array([self.included(place) for place in points.at])
        span = float(every[-1] - every[0])
        if span - points.span < policy.share * span:
            return False
        return _off_a_line(every, points.floors) < policy.evener * _off_a_line(points.at, points.floors)


def _off_a_line(at: Floats, values: Floats) -> float:
    """Return the usual distance of values from the line that fits them best."""
    line = np.polyfit(at - at[0], values, 1)
    return float(np.std(values - np.polyval(line, at - at[0])))
