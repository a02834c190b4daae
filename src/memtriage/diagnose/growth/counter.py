"""One counter over a run: whether it grows, and whether it contradicts the growth of a holder. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Track
from memtriage.diagnose.growth.trend import GrowthEstimate, estimate, trend_policy

NO_ESTIMATE: Final = GrowthEstimate("too_short")
CODE: Final = "code"
CONFIRMING: Final = frozenset({"host", "shared", CODE})
"""Counters that only speak for or against what others show: the resident set, what of it is shared or mapped,
and generated code (`observe.generated_code`)."""
_AS_FAST: Final = 0.5
"""Part of a rate that a rise must have to be the same growth: rates vary with what else the machine does."""


class Counter:
    """A counter's readings on one scale, with an estimate that is computed once per reading.

    Args:
        name: `cpu` (malloc's), a device's, or one of `CONFIRMING`.
    """

    def __init__(self, name: str) -> None:
        self.policy = trend_policy(name)
        self.track = Track(self.policy.warm_up)
        self._growth = NO_ESTIMATE
        self._estimated_at = 0

    def add(self, position: float, value: int) -> None:
        """Add a reading; arguments as `Track.add` has them."""
        self.track.add(position, value)

    def move(self, to: Callable[[float], float]) -> None:
        """Give each reading another position, as `Track.move` does."""
        self.track.move(to)
        self._estimated_at = 0

    def estimate(self) -> GrowthEstimate:
        """Return its growth over the whole run. Takes about a millisecond."""
        if self._estimated_at != self.track.readings:
            self._growth = estimate(self.track.points(), self.policy)
            self._estimated_at = self.track.readings
        return self._growth

    def confirms(self, rate: float) -> bool:
        """Whether it grows by at least so many bytes per position, up to its last reading."""
        growth = self.estimate()
        return growth.state == "growing" and growth.rate >= rate

    def steady(self, rate: float) -> bool:
        """Whether it grows by at least so many bytes per position, and does not seem to slow down."""
        return self.confirms(rate) and not self.estimate().slows

    def rise(self, start: float, end: float) -> float | None:
        """Return the bytes by which it rose between two positions; None without readings or distance."""
        points = self.track.points()
        if not len(points.at) or end <= start:
            return None
        first, last = np.interp((start, end), points.at, points.floors)
        return float(last - first)

    def rose(self, rate: float, start: float, end: float) -> bool:
        """Whether it rose between two positions by at least half of what such a rate makes."""
        rise = self.rise(start, end)
        return rise is not None and rise >= _AS_FAST * rate * (end - start)

    def ended(self, rate: float) -> bool:
        """Whether it grew by at least so many bytes per position and then stopped, as far as it shows."""
        growth = self.estimate()
        return growth.until is not None and growth.rate >= rate

    def flat(self, rate: float, since: float) -> bool:
        """Whether it surely rises by less than so many bytes per position since a position."""
        growth = estimate(self.track.points().since(since), self.policy)
        return growth.state == "flat" and growth.high < rate

    def contradicts(self, rate: float, since: float) -> bool:
        """Whether it shows that nothing has grown by `rate` bytes per position since a position.

        It can show that only if it would be seen to grow with such growth added.
        """
        points = self.track.points().since(since)
        growth = estimate(points, self.policy)
        observed_rate = growth.rate + sum(nbytes for _, nbytes in growth.jumps) / max(1e-9, points.span)
        if observed_rate >= rate:
            return False  # a few rises in a short time are jumps
        if growth.state == "growing":
            return growth.high < rate
        if growth.state == "flat" and growth.until is not None:
            return True  # it has come to its end
        if growth.state != "flat":
            return False
        return estimate(points.steeper(rate), self.policy).state == "growing"


class Counters(dict[str, Counter]):
    """Counters by name; the questions to one of them are answered False where there is none."""

    def contradicts(self, name: str, rate: float, since: float) -> bool:
        """As `Counter.contradicts`."""
        counter = self.get(name)
        return counter is not None and counter.contradicts(rate, since)

    def confirms(self, name: str, rate: float) -> bool:
        """As `Counter.confirms`."""
        counter = self.get(name)
        return counter is not None and counter.confirms(rate)

    def steady(self, name: str, rate: float) -> bool:
        """As `Counter.steady`."""
        counter = self.get(name)
        return counter is not None and counter.steady(rate)

    def ended(self, name: str, rate: float) -> bool:
        """As `Counter.ended`."""
        counter = self.get(name)
        return counter is not None and counter.ended(rate)

    def flat(self, name: str, rate: float, since: float) -> bool:
        """As `Counter.flat`."""
        counter = self.get(name)
        return counter is not None and counter.flat(rate, since)

    def rose(self, name: str, rate: float, start: float, end: float) -> bool:
        """As `Counter.rose`."""
        counter = self.get(name)
        return counter is not None and counter.rose(rate, start, end)
