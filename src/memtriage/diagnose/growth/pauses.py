"""Decide whether a program makes up for the pauses that censuses cause. Pure.

A program that computes all the time loses the time of a pause: its usual rate is that over time without
pauses. A server, or a program with a schedule, catches up after a pause, faster than usual: its usual rate is
that over all of the time. The usual rate is the one it would have without a watch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Points


@dataclass(frozen=True, slots=True)
class PausePolicy:
    """When pauses make a difference.

    Attributes:
        share: part of the time since the first that pauses must take.
        points: readings needed since then.
        windows: parts of the time without pauses, at most one per reading; the usual rate is their median.
        nearer: the program makes up for pauses if its rate with pauses included is nearer to the usual rate
            than its rate without them: at most this part of that distance.
    """

    share: float = 0.05
    points: int = 9
    windows: int = 48
    nearer: float = 0.5


POLICY: Final = PausePolicy()


class Pauses:
    """The pauses of a program, by their place in the time without pauses."""

    def __init__(self) -> None:
        self._places: list[float] = []
        self._seconds: list[float] = [0.0]  # sum of the pauses before each

    def add(self, place: float, seconds: float) -> None:
        """Add a pause that is later than those before."""
        self._places.append(place)
        self._seconds.append(self._seconds[-1] + seconds)

    def included(self, place: float) -> float:
        """Convert a place in the time without pauses to one in all of the time."""
        return place + self._seconds[bisect_left(self._places, place)]

    def made_up_for(self, points: Points, policy: PausePolicy = POLICY) -> bool:
        """Return whether a counter's usual rate is that over all of the time.

        Args:
            points: its readings, over time without pauses.
            policy: thresholds.
        """
        if not self._places:
            return False
        points = _up_to_the_highest(points.since(self._places[0]))
        if len(points.at) < policy.points:
            return False
        span = self.included(float(points.at[-1])) - self.included(float(points.at[0]))
        if span - points.span < policy.share * span:
            return False
        at = np.linspace(points.at[0], points.at[-1], min(policy.windows, len(points.at)) + 1)
        values = np.interp(at, points.at, points.floors)
        usual = float(np.median(np.diff(values) / np.diff(at)))
        grown = float(values[-1] - values[0])
        return usual > 0 and abs(grown / span - usual) < policy.nearer * abs(grown / points.span - usual)


def _up_to_the_highest(points: Points) -> Points:
    """Return the points up to the highest: at its end a program frees its memory."""
    end = int(np.argmax(points.floors)) + 1 if len(points.at) else 0
    return Points(points.at[:end], points.means[:end], points.floors[:end])
