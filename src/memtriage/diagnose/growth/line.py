"""Fit robust lines through a counter's readings. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Floats


@dataclass(frozen=True, slots=True)
class LinePolicy:
    """Constants of a fit.

    Attributes:
        level: quantile of a window's readings that is its level. It is below the middle, because collections
            make a counter a saw-tooth whose lowest points are what is kept.
        together: residuals may correlate over up to 1/6 of the levels.
        independent: the variance is at least this part of that of independent noise: if swings cancel out by
            chance, the sum may be near 0.
        wider: factor of the error, because Newey and West's error of few levels is too small.
        for_tests: with this many levels a test against 0 is twice as strict: an error from few levels is
            uncertain.
        for_intervals: the same for the interval of a rate.
        quarters: standard error of the rise between two neighboring quarters, as a multiple of the line's:
            8 * sqrt(2) over sqrt(12), for independent noise.
        deviation: standard deviation of normal noise, as a multiple of its median absolute value.
    """

    level: float = 0.25
    together: int = 6
    independent: float = 0.5
    wider: float = 1.2
    for_tests: float = 5.0
    for_intervals: float = 3.0
    quarters: float = 3.3
    deviation: float = 1.48


POLICY: Final = LinePolicy()


@dataclass(frozen=True, slots=True)
class Line:
    """A line through levels `(at, values)`: its slope and the slope's standard error."""

    rate: float
    error: float
    at: Floats
    values: Floats

    @property
    def uncertainty(self) -> float:
        """The standard error that a test against 0 uses, larger where there are few levels."""
        return (1 + POLICY.for_tests / len(self.at)) * self.error

    @property
    def reach(self) -> float:
        """The standard error that the interval of the rate uses, larger where there are few levels."""
        return (1 + POLICY.for_intervals / len(self.at)) * self.error

    @property
    def quarter_error(self) -> float:
        """Standard error of a rate between two neighboring quarters."""
        return POLICY.quarters * self.error

    def difference_of_quarters(self) -> float:
        """Standard error of the difference between the first and the last quarter's rate.

        The larger one of two: from the noise around a parabola (growth may seem to slow down by chance), and
        from how far rises differ (growth may come in random sizes).
        """
        centered = self.at - self.at.mean()
        powers = np.polynomial.polynomial.polyvander(centered / np.ptp(centered), 2)
        left = self.values - powers @ np.linalg.lstsq(powers, self.values, rcond=None)[0]
        return max(POLICY.quarters * _error(centered, left), self._spread_of_quarters())

    def _spread_of_quarters(self) -> float:
        rates = np.diff(self.values) / np.diff(self.at)
        quarter = len(rates) // 4
        if quarter < 2:
            return 0.0
        # From one to the next, so that growth which slows down steadily does not count.
        squares = [np.square(np.diff(part)).mean() / 2 for part in (rates[:quarter], rates[-quarter:])]
        return float(np.sqrt(sum(squares) / quarter))


def fit(at: Floats, values: Floats, windows: int, quantile: float = POLICY.level) -> Line:
    """Fit a line through levels: the median slope of all pairs, with an error that allows for swings.

    The error is Newey and West's: correlated neighboring residuals make it larger.
    """
    x, y = levels(at, values, windows, quantile)
    i, j = _pairs(len(x))
    apart = x[j] - x[i]
    slopes = (y[j] - y[i])[apart > 0] / apart[apart > 0]
    rate = float(np.median(slopes))
    residuals = y - rate * x
    return Line(rate, _error(x - x.mean(), residuals - residuals.mean()), x, y)


@cache
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _error(x: Floats, residuals: Floats) -> float:
    """Standard error of a slope, from the residuals of the fit."""
    scores = x * residuals
    lags = max(2, len(x) // POLICY.together)
    variance = float(scores @ scores)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    spread = float(x @ x)
    variance = max(variance, POLICY.independent * float(residuals @ residuals) / len(x) * spread)
    return POLICY.wider * float(np.sqrt(variance * len(x) / (len(x) - 2))) / spread


def levels(at: Floats, values: Floats, windows: int, quantile: float = POLICY.level) -> tuple[Floats, Floats]:
    """Return the point at a quantile of each of `windows` equal spans; the points themselves if they are few.

    A quantile stays at one side of a jump, so that one jump makes one difference between levels. If less than
    half of the spans have points, because of a long pause, spans with equal numbers of points are taken
    instead: two levels would say nothing about the noise.
    """
    if len(at) < 2 * windows:
        return at, values
    spans = _windows(at, windows)
    if 2 * len(spans) < windows:
        spans = _of_equally_many(at, windows)
    chosen = [a + int(values[a:b].argsort()[int(quantile * (b - a - 1))]) for a, b in spans]
    return at[chosen], values[chosen]


def _windows(at: Floats, count: int) -> list[tuple[int, int]]:
    """Where to cut points into `count` equal spans; spans without a point are left out."""
    edges = np.linspace(at[0], at[-1], count + 1)[1:-1]
    bounds = [0, *np.searchsorted(at, edges).tolist(), len(at)]
    return [(a, b) for a, b in pairwise(bounds) if b > a]


def _of_equally_many(at: Floats, count: int) -> list[tuple[int, int]]:
    """Where to cut points into `count` spans with equal numbers of points."""
    return list(pairwise(np.linspace(0, len(at), count + 1).astype(int).tolist()))


def quarter_rates(at: Floats, values: Floats, quantile: float) -> Floats:
    """Return the rates from each quarter of the time to the next, or of the readings if one is empty."""
    windows = _windows(at, 4)
    if len(windows) < 4:
        windows = _of_equally_many(at, 4)
    # If a series rises steadily, the quantile of a quarter is the reading at that part of it.
    ranks = [int(quantile * (b - a - 1)) for a, b in windows]
    lowest = [np.sort(values[a:b])[rank] for (a, b), rank in zip(windows, ranks, strict=True)]
    when = [at[a + rank] for (a, b), rank in zip(windows, ranks, strict=True)]
    rates: Floats = np.diff(lowest) / np.diff(when)
    return rates


def slopes(at: Floats, values: Floats, count: int) -> Floats | None:
    """Return least-squares slopes within `count` equal spans; None if one has under three readings."""
    edges = np.searchsorted(at, np.linspace(at[0], at[-1], count + 1)[1:-1])
    starts = np.concatenate(([0], edges))
    sizes = np.diff(np.concatenate((starts, [len(at)])))
    if sizes.min() < 3:
        return None
    x = at - np.repeat(np.add.reduceat(at, starts) / sizes, sizes)
    rates: Floats = np.add.reduceat(x * values, starts) / np.add.reduceat(x * x, starts)
    return rates


def misfit(x: Floats, y: Floats) -> float:
    """Return the sum of squared residuals of a least-squares line."""
    dx, dy = x - x.mean(), y - y.mean()
    across = float(dx @ dx)
    return float(dy @ dy) - (float(dx @ dy) ** 2 / across if across else 0.0)


def noise(deviations: Floats) -> float:
    """Return the standard deviation, estimated by the median so that jumps do not count."""
    return POLICY.deviation * float(np.median(np.abs(deviations)))
