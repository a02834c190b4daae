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
"""Counters that only confirm or contradict others: the resident set, its shared or mapped part, and generated
code (`observe.generated_code`)."""
_AS_FAST: Final = 0.5
"""A rise of at least this part of a rate is the same growth: rates vary with the load of the machine."""


class WatchedCounter:
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
        """Add a reading; arguments as for `Track.add`."""
        self.track.add(position, value)

    def move(self, to: Callable[[float], float]) -> None:
        """Replace the position of each reading, as `Track.move` does."""
        self.track.move(to)
        self._estimated_at = 0

    def estimate(self) -> GrowthEstimate:
        """Return its growth over the whole run. Takes about a millisecond."""
        if self._estimated_at != self.track.readings:
            self._growth = estimate(self.track.points(), self.policy)
            self._estimated_at = self.track.readings
        return self._growth

    def confirms(self, rate: float) -> bool:
        """Whether it grows by at least `rate` bytes per position, up to its last reading."""
        growth = self.estimate()
        return growth.state == "growing" and growth.rate >= rate

    def steady(self, rate: float) -> bool:
        """Whether it grows by at least `rate` bytes per position, and does not seem to slow down."""
        return self.confirms(rate) and not self.estimate().slows

    def rise(self, start: float, end: float) -> float | None:
        """Return the bytes by which it rose between two positions; None without readings that far apart."""
        points = self.track.points()
        if not len(points.at) or end <= start:
            return None
        first, last = np.interp((start, end), points.at, points.floors)
        return float(last - first)

    def rose(self, rate: float, start: float, end: float) -> bool:
        """Whether it rose between two positions by at least half of what growth at `rate` adds."""
        rise = self.rise(start, end)
        return rise is not None and rise >= _AS_FAST * rate * (end - start)

    def ended(self, rate: float) -> bool:
        """Whether it seems to have grown by at least `rate` bytes per position and then stopped."""
        growth = self.estimate()
        return growth.until is not None and growth.rate >= rate

    def flat(self, rate: float, since: float) -> bool:
        """Whether it certainly rises by less than `rate` bytes per position since a position."""
        growth = estimate(self.track.points().since(since), self.policy)
        return growth.state == "flat" and growth.high < rate

    def contradicts(self, rate: float, since: float) -> bool:
        """Whether it shows that nothing has grown by `rate` bytes per position since a position.

        It can only show that if growth at this rate, added to its readings, would be detected.
        """
        points = self.track.points().since(since)
        growth = estimate(points, self.policy)
        observed_rate = growth.rate + sum(nbytes for _, nbytes in growth.jumps) / max(1e-9, points.span)
        if observed_rate >= rate:
            return False  # a few rises in a short time are jumps
        if growth.state == "growing":
            return growth.high < rate
        if growth.state == "flat" and growth.until is not None:
            return True  # its growth has ended
        if growth.state != "flat":
            return False
        return estimate(points.steeper(rate), self.policy).state == "growing"


class Counters(dict[str, WatchedCounter]):
    """Counters by name; for a counter that does not exist, every answer is False."""

    def contradicts(self, name: str, rate: float, since: float) -> bool:
        """As `WatchedCounter.contradicts`."""
        counter = self.get(name)
        return counter is not None and counter.contradicts(rate, since)

    def confirms(self, name: str, rate: float) -> bool:
        """As `WatchedCounter.confirms`."""
        counter = self.get(name)
        return counter is not None and counter.confirms(rate)

    def steady(self, name: str, rate: float) -> bool:
        """As `WatchedCounter.steady`."""
        counter = self.get(name)
        return counter is not None and counter.steady(rate)

    def ended(self, name: str, rate: float) -> bool:
        """As `WatchedCounter.ended`."""
        counter = self.get(name)
        return counter is not None and counter.ended(rate)

    def flat(self, name: str, rate: float, since: float) -> bool:
        """As `WatchedCounter.flat`."""
        counter = self.get(name)
        return counter is not None and counter.flat(rate, since)

    def rose(self, name: str, rate: float, start: float, end: float) -> bool:
        """As `WatchedCounter.rose`."""
        counter = self.get(name)
        return counter is not None and counter.rose(rate, start, end)
