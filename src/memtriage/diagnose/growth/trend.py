"""Estimate whether a counter grows, since when and how fast, and the smallest leak that would be seen. Pure.

A leak grows during all of the time that it is followed. A cache that fills, a jump and a swing do not. So
growth must exceed the noise, show in each quarter of the time since its onset, and go on up to the last
reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from memtriage.diagnose.growth.track import Floats, Points

TrendState = Literal["too_short", "flat", "undecided", "growing"]
"""Whether a counter grows: `undecided` growth has slowed down, or came in a few irregular jumps."""


@dataclass(frozen=True, slots=True)
class TrendPolicy:
    """Thresholds of growth detection.

    Attributes:
        warm_up: first readings to leave out: optimizer state, workspaces, compilation.
        points: readings needed after these: with the warm-up, 12 positions.
        least: bytes a position below which growth is the program's own bookkeeping: a loss kept as a
            number, a line of a log.
        settles: bytes that caches of libraries and of malloc take altogether until they are full. A GPT-2
            with batches of varying lengths took 0.1 MiB in 400 steps, half of that in the first 50.
        suspicion: standard errors by which growth must exceed 0 to be suspected.
        certainty: standard errors by which growth must exceed 0. At 4, 24 of 10,000 healthy series were
            called growing, at 6 still 5. It costs little power: a rate within 20 % takes more.
        always: levels in a row, each higher than the one before, that make growth as certain: noise does that
            once in a million times.
        interval: standard errors to either side of a rate in which the truth lies, 99 times in 100.
        share: part of the rate that each quarter of the time must show. One or two jumps leave a quarter
            with nothing.
        slows: growth in the last quarter, as part of that in the first, below which it may come to an end:
            what approaches a bound exponentially falls below it when it is half full.
        accuracy: error of the rate within which a leak counts as found.
        margin: how much larger than the smallest leak that would have been found the stated limit is: with
            other noise of the same size, 99 in 100 are found.
        windows: levels that a rate is taken from.
        troughs: windows whose lowest points are compared where collections make the counter a saw-tooth.
        late: part of the time after which an onset leaves too little to judge.
        jump: part of the whole rise that one or two jumps must have to be set apart from a trend.
        released: part of the rise before it, and of that after it, up to which a fall is a release of what
            does not grow.
        regular: spread of the distances between rises, as part of their mean, up to which they are periodic.
        stops: slope of the end, as a part of the smallest in any other stretch as long, below which growth
            has come to an end; and how many times further from the middle than that one it must be.
        waits: longest distance between two rises, times so much: without a rise for longer, they may be over.
    """

    warm_up: int = 3
    points: int = 9
    least: float = 1024
    settles: float = 512 * 1024
    suspicion: float = 6.0
    certainty: float = 8.0
    always: int = 20
    interval: float = 2.6
    share: float = 0.3
    slows: float = 0.7
    accuracy: float = 0.2
    margin: float = 1.3
    windows: int = 24
    troughs: int = 6
    late: float = 0.8
    jump: float = 0.25
    released: float = 0.4
    regular: float = 0.25
    stops: tuple[float, float] = (0.25, 3.0)
    waits: float = 1.6

    @property
    def readings(self) -> int:
        """Readings needed in all."""
        return self.warm_up + self.points


_POLICIES: Final = {
    "cpu": TrendPolicy(),
    "shared": TrendPolicy(least=16 * 1024, settles=4 * 1024**2),
    "host": TrendPolicy(least=16 * 1024, settles=16 * 1024**2),
}
_ALLOCATOR: Final = TrendPolicy(least=256, settles=8 * 1024)


def trend_policy(counter: str) -> TrendPolicy:
    """Return the policy for a counter: `cpu` (malloc's), `shared`, `host` (resident set) or a device's.

    An allocator of a device counts blocks of 512 bytes and nothing else, so that it has hardly any noise.
    """
    return _POLICIES.get(counter, _ALLOCATOR)


@dataclass(frozen=True, slots=True)
class GrowthEstimate:
    """Whether a counter grows, and how fast, in bytes per position (a step, a micro-batch, a second).

    Attributes:
        state: whether it grows.
        rate: growth since the onset.
        low, high: interval that contains the true rate 99 times in 100.
        onset: position at which growth began; the series' first one where it always grew.
        period: positions from one rise to the next, where rises are regular and none comes between.
        jumps: one or two single rises that are no growth: `(position, bytes)`.
        until: position at which growth ended, where it did; `rate` is then the rate before it.
    """

    state: TrendState
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    onset: float | None = None
    period: float | None = None
    jumps: tuple[tuple[float, float], ...] = ()
    until: float | None = None

    def is_growth_of(self, rate: float, accuracy: float) -> bool:
        """Whether the counter grows by `rate`, within `accuracy` (a part of that rate)."""
        return (
            self.state == "growing"
            and self.low >= (1 - accuracy) * rate
            and self.high <= (1 + accuracy) * rate
        )


def estimate(points: Points, policy: TrendPolicy = TrendPolicy()) -> GrowthEstimate:
    """Judge a series as a whole; where it does not grow, judge what came after its last change.

    Args:
        points: a track's.
        policy: its counter's.
    """
    if len(points.at) < policy.points or points.span <= 0:
        return GrowthEstimate("too_short")
    whole = _judge(points, policy)
    # More looks need more certainty; over half of the time what fills exponentially slows down by the root.
    stricter = replace(
        policy,
        suspicion=1.2 * policy.suspicion,
        certainty=1.2 * policy.certainty,
        slows=policy.slows**0.5,
    )
    best = whole
    for start in _changes(points, policy):
        late = _judge(points.since(start), stricter)
        if late.state == "growing":
            late = replace(late, jumps=whole.jumps)
            if whole.state == "growing" and late.high - late.low > 0.5 * (whole.high - whole.low):
                continue  # it began with the series
            return late
        if late.state == "undecided" and best.state == "flat":
            best = late
    if best.state != "flat":
        return best
    ended = best if best.until is not None else _ended(points, best, stricter)
    after = _judge(_after(points, ended, policy), stricter)
    return after if after.state == "growing" else ended


def detection_limit(points: Points, policy: TrendPolicy = TrendPolicy()) -> float | None:
    """Return the smallest growth that would have been found, in bytes a position; None if too short.

    Leaks of rising size are added to this very series, less its own growth, until one is found with its
    rate: a steady one, and, where readings are many and dense enough to tell them apart, one that comes in
    eight rises and one that begins in the middle, of as many bytes altogether. So the limit reflects the
    run's own noise, jumps and length.
    """
    if len(points.at) < policy.points or points.span <= 0:
        return None
    own = estimate(points, policy)
    if own.state == "growing" and own.onset is not None:
        grown = own.rate * np.maximum(0, points.at - own.onset)
        points = Points(points.at, points.means - grown, points.floors - grown)
    after = _after(points, own, policy)
    points = after if len(after.at) >= policy.points else points
    rate = max(policy.least, policy.settles / points.span) * 1.001
    swing = float(np.ptp(points.means)) / points.span
    missed = rate
    for _ in range(_TRIES):
        if _would_find(points, rate, policy):
            break
        missed = rate
        rate *= 1.25 if rate > swing / 8 else 2
    else:
        return None
    for _ in range(_FINER):
        middle = (missed * rate) ** 0.5
        if _would_find(points, middle, policy):
            rate = middle
        else:
            missed = middle
    return rate * policy.margin


def _would_find(points: Points, rate: float, policy: TrendPolicy) -> bool:
    """Whether a leak of such a rate would be found in these readings, with the right rate."""
    return estimate(points.steeper(rate), policy).is_growth_of(rate, policy.accuracy) and all(
        abs(growth.rate - true_rate) <= policy.accuracy * true_rate and growth.state == "growing"
        for growth, true_rate in _estimates_of_other_shapes(points, rate, policy)
    )


def _estimates_of_other_shapes(
    points: Points, rate: float, policy: TrendPolicy
) -> Iterator[tuple[GrowthEstimate, float]]:
    """Estimate leaks that come now and then, or late; yield each estimate with the leak's true rate."""
    since = points.at - points.at[0]
    period = points.span / 8
    if len(points.at) < policy.windows or np.diff(since).max() > period:
        return  # several rises may come between two readings
    yield estimate(points.plus(rate * period * np.floor(since / period)), policy), rate
    yield estimate(points.plus(2 * rate * np.maximum(0, since - points.span / 2)), policy), 2 * rate


_TRIES: Final = 64
_FINER: Final = 3
"""Halvings of the last factor: the limit is then within 3 % of the smallest leak that would be found."""


# --- one stretch of time ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """A line through levels `(at, values)`: its slope and the slope's standard error."""

    rate: float
    error: float
    at: Floats
    values: Floats

    @property
    def levels(self) -> int:
        return len(self.at)

    def error_of_a_curve(self) -> float:
        """The same error from what a parabola leaves: how far growth may seem to slow down by chance."""
        centered = self.at - self.at.mean()
        powers = np.polynomial.polynomial.polyvander(centered / np.ptp(centered), 2)
        return _error(centered, self.values - powers @ np.linalg.lstsq(powers, self.values, rcond=None)[0])


def _judge(points: Points, policy: TrendPolicy, *, to_the_end: bool = True) -> GrowthEstimate:
    """Judge whether a series grows from its beginning to its end; without `to_the_end`, almost to it."""
    if len(points.at) < policy.points or points.span <= 0:
        return GrowthEstimate("too_short")
    points, jumps = _without_jumps(_without_releases(points, policy), policy)
    line, values, quantile = _line(points.at, points.means, policy.windows), points.means, 0.25
    if len(points.at) >= 4 * policy.troughs:
        lowest = _line(points.at, points.floors, policy.troughs, quantile=0.0)
        if 2 * _uncertainty(lowest) < _uncertainty(line):
            line, values, quantile = lowest, points.floors, 0.0
    reach = policy.interval * (1 + 3 / line.levels) * line.error
    result = GrowthEstimate(
        "flat", line.rate, line.rate - reach, line.rate + reach, float(points.at[0]), jumps=jumps
    )
    significant = (
        line.rate > policy.suspicion * _uncertainty(line)
        and line.rate >= policy.least
        and line.rate * points.span >= policy.settles
    )
    if not significant:
        return result
    quarters = _quarters(points.at, values, quantile)
    noise = _QUARTER_ERROR * line.error
    rises = np.diff(line.values)
    always = len(rises) >= policy.always and bool((rises > 0).all())
    goes_on = quarters[-1] > policy.suspicion * noise
    if quarters.min() < policy.share * line.rate:
        return replace(result, state="undecided" if goes_on else "flat")
    end = _end(points.at, values, policy) if to_the_end else None
    if end is not None:
        few = int(np.count_nonzero(points.at > end)) < 2 * policy.points
        return replace(result, state="undecided" if few else "flat", until=end)
    slower = policy.slows * quarters[0] - quarters[-1]
    differ = max(_QUARTER_ERROR * line.error_of_a_curve(), _spread_of_quarters(line))
    if (line.rate < policy.certainty * _uncertainty(line) and not always) or slower > 2 * differ:
        return replace(result, state="undecided")
    return _by_single_rises(points, replace(result, state="growing"), policy)


def _end(at: Floats, values: Floats, policy: TrendPolicy) -> float | None:
    """Return the position at which growth came to an end; None where it goes on to the last reading.

    The end of the run is compared with all other stretches of the same length. Noise and rises that come now
    and then make some of these as flat as an end, so only growth that never paused can be seen to stop.
    """
    part, apart = policy.stops
    span = float(at[-1] - at[0])
    for count in (8, 16, 32, 64, 128):
        slopes = _slopes(at, values, count)
        if slopes is None:
            return None
        last, others = slopes[-1], slopes[:-2]
        least, middle = float(others.min()), float(np.median(others))
        flat = last < part * least and middle - last > apart * (middle - least)
        if not flat or least < policy.share * middle:
            continue
        end = float(at[-1] - span / count)
        if not _has_release(at[at >= end], values[at >= end], middle):
            return end
    return None


def _has_release(at: Floats, values: Floats, rate: float) -> bool:
    """Whether a short stretch is flat only because something was released in it.

    It contains a fall, and growth goes on before or after it, as far as there are enough readings to tell.
    """
    middle = len(at) // 2
    if -float(np.diff(values).min()) < 0.25 * rate * float(at[-1] - at[0]):
        return False
    if middle < 2:
        return True
    halves = (slice(None, middle), slice(middle, None))
    return max(float(np.polyfit(at[halve] - at[0], values[halve], 1)[0]) for halve in halves) >= 0.5 * rate


def _slopes(at: Floats, values: Floats, count: int) -> Floats | None:
    """Least-squares slopes within so many equal spans; None where one has fewer than three readings."""
    edges = np.searchsorted(at, np.linspace(at[0], at[-1], count + 1)[1:-1])
    starts = np.concatenate(([0], edges))
    sizes = np.diff(np.concatenate((starts, [len(at)])))
    if sizes.min() < 3:
        return None
    x = at - np.repeat(np.add.reduceat(at, starts) / sizes, sizes)
    slopes: Floats = np.add.reduceat(x * values, starts) / np.add.reduceat(x * x, starts)
    return slopes


_QUARTER_ERROR: Final = 3.3
"""Standard error of the rise between two neighboring quarters, as a multiple of the line's: 8 * sqrt(2) over
sqrt(12), for independent noise."""


def _spread_of_quarters(line: _Line) -> float:
    """Standard error of the difference between two quarters' rates, where growth comes in random sizes."""
    rates = np.diff(line.values) / np.diff(line.at)
    quarter = len(rates) // 4
    if quarter < 2:
        return 0.0
    # From one to the next, so that growth which slows down steadily does not count.
    squares = [np.square(np.diff(part)).mean() / 2 for part in (rates[:quarter], rates[-quarter:])]
    return float(np.sqrt(sum(squares) / quarter))


def _uncertainty(line: _Line) -> float:
    """A line's standard error, larger where few levels tell it less well."""
    return (1 + 5 / line.levels) * line.error


def _quarters(at: Floats, values: Floats, quantile: float) -> Floats:
    """Rates from each quarter of the time to the next; of the readings, where a quarter has none."""
    windows = _windows(at, 4)
    if len(windows) < 4:
        windows = list(pairwise(np.linspace(0, len(at), 5).astype(int).tolist()))
    # Where a series rises steadily, the quantile of a quarter is the reading at that part of it.
    ranks = [int(quantile * (b - a - 1)) for a, b in windows]
    levels = [np.sort(values[a:b])[rank] for (a, b), rank in zip(windows, ranks, strict=True)]
    when = [at[a + rank] for (a, b), rank in zip(windows, ranks, strict=True)]
    rates: Floats = np.diff(levels) / np.diff(when)
    return rates


def _levels(at: Floats, values: Floats, windows: int, quantile: float = 0.25) -> tuple[Floats, Floats]:
    """The point at a quantile of each of so many equal spans; the points themselves where they are few.

    A quantile stays at one side of a jump, so that one jump makes one difference between levels.
    """
    if len(at) < 2 * windows:
        return at, values
    chosen = [a + int(values[a:b].argsort()[int(quantile * (b - a - 1))]) for a, b in _windows(at, windows)]
    return at[chosen], values[chosen]


def _windows(at: Floats, count: int) -> list[tuple[int, int]]:
    """Where to cut points into so many equal spans; spans without a point are left out."""
    edges = np.linspace(at[0], at[-1], count + 1)[1:-1]
    bounds = [0, *np.searchsorted(at, edges).tolist(), len(at)]
    return [(a, b) for a, b in pairwise(bounds) if b > a]


@cache
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _line(at: Floats, values: Floats, windows: int, quantile: float = 0.25) -> _Line:
    """Fit a line through levels: the median slope of all pairs, with an error that allows for swings.

    The error is Newey and West's: neighboring residuals that go together make it larger.
    """
    x, y = _levels(at, values, windows, quantile)
    i, j = _pairs(len(x))
    apart = x[j] - x[i]
    slopes = (y[j] - y[i])[apart > 0] / apart[apart > 0]
    rate = float(np.median(slopes))
    residuals = y - rate * x
    return _Line(rate, _error(x - x.mean(), residuals - residuals.mean()), x, y)


def _error(x: Floats, residuals: Floats) -> float:
    """Standard error of a slope from what the fit leaves."""
    scores = x * residuals
    lags = max(2, len(x) // 6)
    variance = float(scores @ scores)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    spread = float(x @ x)
    # Where swings cancel out by chance the sum may be near 0: never less than half of independent noise.
    variance = max(variance, 0.5 * float(residuals @ residuals) / len(x) * spread)
    return 1.2 * float(np.sqrt(variance * len(x) / (len(x) - 2))) / spread


# --- changes that are no trend ------------------------------------------------------------------------------


def _usual_and_noise(rises: Floats) -> tuple[float, float]:
    """Return the median of rises from level to level, and their standard deviation without jumps."""
    usual = float(np.median(rises))
    return usual, _noise(rises - usual)


def _noise(deviations: Floats) -> float:
    """Return their standard deviation, as the median of their sizes tells it: jumps do not count."""
    return 1.48 * float(np.median(np.abs(deviations)))


def _excess_and_noise(at: Floats, values: Floats) -> tuple[Floats, float]:
    """Return by how much each level rises more than usual in such a time, and the standard deviation of that.

    Levels lie at unequal distances: where readings are missing, growth shows as one large rise.
    """
    times, rises = np.diff(at), np.diff(values)
    excess = rises - float(np.median(rises / times)) * times
    return excess, _noise(excess)


def _without_jumps(points: Points, policy: TrendPolicy) -> tuple[Points, tuple[tuple[float, float], ...]]:
    """Remove one or two rises that come once and stay: an optimizer's state, a copy, an evaluation."""
    at, values = _levels(points.at, points.means, policy.windows)
    excess, noise = _excess_and_noise(at, values)
    enough = max(6 * noise, policy.jump * float(np.ptp(values)), 1.0)
    jump_levels = np.flatnonzero(excess > enough)
    if not 1 <= len(jump_levels) <= 2:
        return points, ()
    means, floors, jumps = points.means, points.floors, []
    for level in jump_levels.tolist():
        a, b = np.searchsorted(points.at, at[level : level + 2]).tolist()
        where = a + int(np.argmax(np.diff(points.means[a : b + 1]))) + 1
        after = points.at >= points.at[where]
        nbytes = float(excess[level])
        means, floors = means - nbytes * after, floors - nbytes * after
        jumps.append((float(points.at[where]), nbytes))
    return Points(points.at, means, floors), tuple(jumps)


def _without_releases(points: Points, policy: TrendPolicy) -> Points:
    """Put back one or two releases that are far smaller than the growth before and after them.

    A list or a collector that is emptied now and then releases most of what had come before, and is left in.
    """
    at, values = _levels(points.at, points.means, policy.windows)
    excess, noise = _excess_and_noise(at, values)
    rises = np.diff(values)
    enough = max(6 * noise, 0.1 * policy.jump * float(np.ptp(values)), 1.0)
    fall_levels = np.flatnonzero((-excess > enough) & (rises < 0))
    if not 1 <= len(fall_levels) <= 2 or np.median(rises) <= 0:
        return points
    means, floors = points.means, points.floors
    for level in fall_levels.tolist():
        nbytes = -float(excess[level])
        before, after = (
            values[level] - values[: level + 1].min(),
            values[level + 1 :].max() - values[level + 1],
        )
        if nbytes > policy.released * min(before, after):
            return points
        a, b = np.searchsorted(points.at, at[level : level + 2]).tolist()
        where = points.at >= points.at[a + int(np.argmin(np.diff(points.means[a : b + 1]))) + 1]
        means, floors = means + nbytes * where, floors + nbytes * where
    return Points(points.at, means, floors)


def _changes(points: Points, policy: TrendPolicy) -> list[float]:
    """Positions from which the rest may be judged separately: an onset, a release, half of the time."""
    at, values = _levels(points.at, points.means, policy.windows)
    positions = []
    onset = _onset(at, values)
    if onset is not None and at[onset] <= at[0] + policy.late * points.span:
        positions.append(float(at[onset]))
    falls = -np.diff(values)
    big = np.flatnonzero(falls > max(0.3 * float(np.ptp(values)), 1.0))
    if len(big) == 1 and 2 * (at[-1] - at[big[0] + 1]) >= points.span:
        positions.append(float(at[big[0] + 1]))
    return [*positions, float(points.at[0]) + points.span / 2]


def _ended(points: Points, flat: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return with `until` where a flat series grew up to some position: a cache that filled to its bound."""
    at, values = _levels(points.at, points.means, policy.windows)
    end = _onset(-at[::-1], values[::-1])
    if end is None:
        return flat
    until = float(at[len(at) - 1 - end])
    early = points.at <= until
    grown = Points(points.at[early], points.means[early], points.floors[early])
    grew = _judge(grown, policy, to_the_end=False)
    if grew.state != "growing":
        return flat
    return replace(grew, state="flat", until=until, jumps=flat.jumps)


def _after(points: Points, growth: GrowthEstimate, policy: TrendPolicy) -> Points:
    """The points after growth that ended (imports, loading), a level later; all where none did."""
    if growth.until is None:
        return points
    return points.since(growth.until + points.span / policy.windows)


def _onset(at: Floats, values: Floats) -> int | None:
    """The level from which a line that is flat before fits best; None where that is hardly better."""
    straight = _misfit(at - at[0], values)
    misfits = [_misfit(np.maximum(0, at - at[level]), values) for level in range(2, len(at) - 3)]
    best = int(np.argmin(misfits)) if misfits else 0
    return best + 2 if misfits and misfits[best] < 0.5 * straight else None


def _misfit(x: Floats, y: Floats) -> float:
    """Sum of squares that a least-squares line leaves."""
    dx, dy = x - x.mean(), y - y.mean()
    across = float(dx @ dx)
    return float(dy @ dy) - (float(dx @ dy) ** 2 / across if across else 0.0)


def _by_single_rises(points: Points, growth: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return growth that comes in single rises as periodic where they are regular, as undecided where few."""
    steps = np.diff(points.means)
    usual, noise = _usual_and_noise(steps)
    grown = growth.rate * points.span
    # What an evaluation takes goes again: a rise counts where the series never falls below it later.
    steps = np.diff(np.minimum.accumulate(points.means[::-1])[::-1])
    high = steps > max(6 * noise, usual, 0.005 * grown)
    if usual * len(steps) > 0.5 * grown or not high.any():
        return growth  # it grows at other times too
    typical = float(np.median(steps[high]))
    at = np.flatnonzero(high & (steps > 0.3 * typical) & (steps < 5 * typical))
    # A rise within a block shows in two differences.
    groups = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    if len(at) > len(steps) / 3 or len(groups) > len(steps) / 6:
        return growth
    where = np.array([points.at[group[0] + 1] for group in groups])
    sizes = np.array([steps[group].sum() for group in groups])
    if sizes.sum() < 0.5 * grown:
        return growth  # noise hides the others
    if len(groups) < 3:
        return replace(growth, state="undecided")
    gaps = np.diff(where)
    if points.at[-1] - where[-1] > policy.waits * gaps.max():
        return replace(growth, state="undecided")
    regular = gaps.std() <= policy.regular * gaps.mean() and sizes.std() <= 2 * policy.regular * sizes.mean()
    period = float(gaps.mean())
    rate = float(sizes.mean()) / period
    if regular and abs(rate - growth.rate) <= max(growth.high - growth.rate, 0.05 * rate):
        reach = policy.interval * float(sizes.std()) / np.sqrt(len(sizes)) / period
        return replace(growth, rate=rate, low=rate - reach, high=rate + reach, period=period)
    return growth if len(groups) > 4 else replace(growth, state="undecided")
