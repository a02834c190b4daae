"""One counter over a run: does it grow, and could it have missed what a holder is said to keep? Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Track
from memtriage.diagnose.growth.trend import GrowthEstimate, estimate, trend_policy

NO_ESTIMATE: Final = GrowthEstimate("too_short")
CODE: Final = "code"
WITNESSES: Final = frozenset({"host", "shared", CODE})
"""Counters that only speak for or against what others show: the resident set, what of it is shared or mapped,
and generated code (`observe.generated_code`)."""
_AS_FAST: Final = 0.5
"""Part of a rate that a rise must have to be the same growth: rates vary with what else the machine does."""


class Counter:
    """A counter's readings on one scale. Asking twice between two readings costs nothing.

    Args:
        name: `cpu` (malloc's), a device's, or one of `WITNESSES`.
    """

    def __init__(self, name: str) -> None:
        self.policy = trend_policy(name)
        self.track = Track(self.policy.warm_up)
        self._estimated = 0
        self._found = NO_ESTIMATE

    def add(self, position: float, value: int) -> None:
        """Add a reading; arguments as `Track.add` has them."""
        self.track.add(position, value)

    def estimate(self) -> GrowthEstimate:
        """Return what it does over the whole run. Takes about a millisecond."""
        if self._estimated != self.track.readings:
            self._found, self._estimated = estimate(self.track.points(), self.policy), self.track.readings
        return self._found

    def confirms(self, rate: float) -> bool:
        """Whether it grows by at least so many bytes a position, up to its last reading."""
        found = self.estimate()
        return found.state == "growing" and found.rate >= rate

    def rose(self, rate: float, start: float, end: float) -> bool:
        """Whether it rose between two positions by at least half of what such a rate makes."""
        points = self.track.points()
        if not len(points.at) or end <= start:
            return False
        first, last = np.interp((start, end), points.at, points.floors)
        return bool(last - first >= _AS_FAST * rate * (end - start))

    def ended(self, rate: float) -> bool:
        """Whether it grew by at least so many bytes a position until some time, and may have stopped then."""
        found = self.estimate()
        return found.until is not None and found.rate >= rate

    def contradicts(self, rate: float, since: float) -> bool:
        """Whether it shows that nothing has grown by `rate` bytes a position since a position.

        It has to be able to: with such a growth added it would be seen to grow.
        """
        points = self.track.points().since(since)
        found = estimate(points, self.policy)
        came = found.rate + sum(nbytes for _, nbytes in found.jumps) / max(1e-9, points.span)
        if came >= rate:
            return False  # a few rises in a short time are jumps
        if found.state == "growing":
            return found.high < rate
        if found.state == "flat" and found.until is not None:
            return True  # it has come to its end
        if found.state != "flat":
            return False
        return estimate(points.steeper(rate), self.policy).state == "growing"
