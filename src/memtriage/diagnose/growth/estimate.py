"""Estimate the growth of one series: whether it grows, since when, how fast and in which shape. Pure.

Growth that comes in single rises is judged by these rises. All other growth is judged by few straight pieces
through about 24 levels of the series; the last piece decides whether it goes on. A series that falls again
and again (the cyclic collector) is judged by its lowest points: what was there after a collection stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from memtriage.diagnose.growth.track import Floats, Points
from memtriage.model.units import MIB

Flags = NDArray[np.bool_]
State = Literal["too_short", "flat", "filling", "uncertain", "growing"]
Shape = Literal["steady", "accelerating", "slowing", "periodic", "stairs", "late"]
FEWEST: Final = 6
"""Readings that `floor_rise` needs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds of growth detection.

    Attributes:
        least: bytes per position below which growth is the program's own bookkeeping: a log, losses.
        settles: bytes that caches of libraries and of malloc take altogether until they are full.
        points: readings needed after the warm-up.
        windows: levels that pieces are fitted to; rates need no more, and 24 average out most noise.
        bend: a knot or step must reduce the misfit by this many times the mean square that is left.
        jump: standard deviations by which a single change must exceed the usual ones.
        share: what is less than this part of a whole is nothing: a slope after growth, a spread of periods,
            the length of a piece, growth compared to the swings around it.
        slows: growth may be ending if it is slower than this part of what it was.
        half: growth must certainly keep more than this part of its rate from its first half to its second. Of
            a cache that fills exponentially by two thirds, the second half adds less than 0.6 of the first.
            The interval of the rate may reach no further than this part of it.
            Lowest points are used only if their noise is less than this part of the levels' noise.
        suspicion: standard errors by which growth must exceed 0 to be uncertain instead of flat.
        accuracy: a leak that is added to a series is found if its rate is off by less than this part.
        interval: standard errors to either side of a rate in which the truth lies, 99 times in 100.
        differs: standard errors by which two halves differ.
        several: with this many rises, irregular ones are growth; regular ones are with one less.
        margin: how much larger the stated limit is than the smallest leak that was found, because other noise
            of the same size may hide that one.
    """

    least: float = 1024
    settles: float = MIB / 2
    points: int = 9
    windows: int = 24
    bend: float = 20.0
    jump: float = 6.0
    share: float = 0.25
    slows: float = 0.7
    half: float = 0.5
    suspicion: float = 5.0
    accuracy: float = 0.2
    interval: float = 2.6
    differs: float = 2.0
    several: int = 5
    margin: float = 1.3


POLICY: Final = Policy()
_COUNTERS: Final = {
    "cpu": POLICY,
    "heap": Policy(settles=2 * MIB),
    "shared": Policy(least=16 * 1024, settles=4 * MIB),
    "host": Policy(least=16 * 1024, settles=16 * MIB),
}
_ALLOCATOR: Final = Policy(least=256, settles=8 * 1024)


def policy_of(counter: str) -> Policy:
    """Return the policy for `cpu` (malloc), `heap`, `shared`, `host` (the resident set) or a device.

    An allocator of a device counts blocks of 512 bytes and nothing else, so that it has hardly any noise.
    """
    return _COUNTERS.get(counter, _ALLOCATOR)


@dataclass(frozen=True, slots=True)
class Growth:
    """Whether a series grows, and how fast, in bytes per position (a step, a micro-batch, a second).

    Attributes:
        state: `growing` up to the end, as far as can be seen; `filling`, slower and slower, so it may
            approach a bound; `uncertain`, not to be told from noise, or a few irregular rises; else `flat`.
        rate: mean from the onset to the end of growth.
        low, high: interval that contains the true mean 99 times in 100.
        recent: rate of the latest part, for projections; 0 where growth ended.
        onset, until: positions at which growth began and, if it did, ended.
        period: positions from one rise to the next, on average, where it comes in single rises.
        shape: of growth.
        jumps: one or two single rises that stay and are no growth: `(position, bytes)`.
    """

    state: State
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    recent: float = 0.0
    onset: float | None = None
    until: float | None = None
    period: float | None = None
    shape: Shape | None = None
    jumps: tuple[tuple[float, float], ...] = ()

    @property
    def by_rises(self) -> bool:
        """Whether it grows in single rises, many positions apart."""
        return self.shape in ("periodic", "stairs")


def grow(points: Points, policy: Policy = POLICY) -> Growth:
    """Judge a series. Takes about a millisecond."""
    if len(points.at) < policy.points or points.span <= 0:
        return Growth("too_short")
    troughs = _troughs(points.floors)
    return _by_rises(points, troughs, policy) or _by_pieces(
        points, *_levels(points, troughs, policy), policy, points.span
    )


def detection_limit(points: Points, policy: Policy = POLICY) -> float | None:
    """Return the smallest growth that would have been found, in bytes per position; None if too short.

    Leaks are added to this very series, less its own growth: a steady one and, where readings are dense
    enough, one in eight rises and one that begins in the middle, of as many bytes. So the limit reflects the
    run's own noise, jumps and length.
    """
    own = grow(points, policy)
    if own.state == "too_short":
        return None
    later = points.since((own.until or np.inf) + points.span / policy.windows)
    if len(later.at) >= policy.points:
        points = later
    elif own.state in ("growing", "filling"):
        points = points.plus(-np.minimum.accumulate(points.floors[::-1])[::-1])
    missed = max(policy.least, policy.settles / points.span) * 1.001
    found = max(2 * missed, float(np.ptp(points.means)) / points.span / 8)
    while not _would_find(points, found, policy):
        missed, found = found, 2 * found
        if found * points.span > 1e18:
            return None
    rates = missed * 1.1 ** np.arange(np.log(found / missed) / np.log(1.1))
    smallest = bisect_left(rates, True, key=lambda rate: _would_find(points, rate, policy))
    return float([*rates, found][smallest]) * policy.margin


def _would_find(points: Points, rate: float, policy: Policy) -> bool:
    """Whether leaks of such a rate would be found in these readings, with the right rate."""
    since, period = points.at - points.at[0], points.span / 8
    leaks = [(rate, rate * since)]
    if len(since) >= policy.windows and np.diff(since).max() <= period:
        leaks += [
            (rate, rate * period * np.floor(since / period)),
            (2 * rate, 2 * rate * np.maximum(0, since - points.span / 2)),
        ]
    for true_rate, leak in leaks:
        found = grow(points.plus(leak), policy)
        if found.state != "growing" or abs(found.rate - true_rate) > policy.accuracy * true_rate:
            return False
    return True


def floor_rise(readings: Sequence[tuple[float, float]]) -> float | None:
    """Return bytes per position by which the floor of readings (position, bytes) rises from third to third.

    0 if it does not, None for too few. `grow` takes too long for a thousand ranks, or allocation sites.
    """
    if len(readings) < FEWEST:
        return None
    third = len(readings) // 3
    parts = (readings[:third], readings[third : 2 * third], readings[2 * third :])
    (start, low), (_, middle), (end, high) = (min(part, key=itemgetter(1)) for part in parts)
    return (high - low) / (end - start) if low < middle < high and start < end else 0.0


def noise(values: Floats) -> float:
    """Return the standard deviation, estimated by medians so that single changes do not count."""
    return 1.48 * float(np.median(np.abs(values - np.median(values))))


def _swing(values: Floats) -> float:
    """Return the largest fall from an earlier point to a later one."""
    return float((np.maximum.accumulate(values) - values).max())


# --- single rises -------------------------------------------------------------------------------------------


def _by_rises(points: Points, troughs: list[int], policy: Policy) -> Growth | None:
    """Judge growth that comes in single rises that stay; None where it comes otherwise."""
    at, low = points.at, points.floors
    stays = np.minimum.accumulate(low[::-1])[::-1]
    cut = _swing(low) > policy.share * (stays[-1] - stays[0])
    if cut:  # what came after the last fall may fall again
        at, low, stays = (values[: troughs[-1] + 1] for values in (at, low, stays))
    grown, steps = float(stays[-1] - stays[0]), np.diff(stays)
    if len(steps) < 3 or grown < policy.settles:
        return None
    wobble = noise(np.diff(low))
    # What comes at the usual pace while nothing is read is no single rise, and several are no jump.
    apart = np.diff(at)
    usual = np.median(steps / apart) * apart
    high = np.flatnonzero(steps - usual > max(policy.jump * wobble, float(steps.mean())))
    if not len(high) or steps[high].sum() < (1 - policy.share) * grown or 3 * len(high) > len(steps):
        return None
    wide = policy.several * float(np.median(apart))
    groups = np.split(high, np.flatnonzero((np.diff(high) > 1) | (apart[high[1:]] > wide)) + 1)
    when = np.array([at[group[0] + 1] for group in groups])
    sizes = np.diff([*(stays[group[0]] for group in groups), stays[-1]])
    single = policy.share * sizes > np.median(sizes)
    pace = sizes[~single].sum() / max(1e-9, when[-1] - when[0])
    took = np.array([at[group[-1] + 1] - at[group[0]] for group in groups])
    single &= policy.share * sizes > pace * took
    jumps: tuple[tuple[float, float], ...] = ()
    if np.count_nonzero(single) <= 2:
        jumps = tuple(zip(when[single].tolist(), sizes[single].tolist(), strict=True))
        when, sizes, took = when[~single], sizes[~single], took[~single]
    if len(sizes) < 3:
        return None
    when, sizes = _spread_out(when, sizes, took, wide, policy)
    gaps, count, length = np.diff(when), len(sizes), float(when[-1] - when[0])
    rate = float(sizes[1:].sum()) / length
    spreads = _spreads(when, sizes)
    regular = max(spreads) <= policy.share
    between = float(apart.mean())
    differ = spreads[1] if regular else float(np.hypot(*spreads))
    reach = (rate * between + 2 * wobble) / length + policy.interval * rate * differ / count**0.5
    middle = count // 2
    recent = float(sizes[middle + 1 :].sum() / (when[-1] - when[middle]))
    low, high, period = rate - reach, rate + reach, float(gaps.mean())
    growth = Growth("uncertain", rate, low, high, recent, float(when[0]), None, period, jumps=jumps)
    waits = float(at[-1] - when[-1])
    if waits > gaps.max() / policy.slows + between:
        ended: State = "flat" if waits >= policy.share * points.span else "uncertain"
        return replace(growth, state=ended, until=float(when[-1]), recent=0.0)
    if count < policy.several - regular or rate < policy.least or growth.low <= 0:
        return growth
    if recent < policy.half * sizes[1 : middle + 1].sum() / (when[middle] - when[0]):
        return replace(growth, state="filling", shape="slowing")
    return replace(growth, state="growing", shape="periodic" if regular else "stairs")


def _spread_out(
    when: Floats, sizes: Floats, took: Floats, wide: float, policy: Policy
) -> tuple[Floats, Floats]:
    """Return rises with those apart that came while nothing was read, if all are regular then."""
    parts = np.where(took > wide, np.maximum(1, np.rint(sizes / np.median(sizes))), 1).astype(int)
    part = np.concatenate([np.arange(count, 0, -1) - 1 for count in parts])
    apart = np.repeat(when, parts) - part * np.repeat(took / parts, parts)
    even = np.repeat(sizes / parts, parts)
    return (apart, even) if max(_spreads(apart, even)) <= policy.share else (when, sizes)


def _spreads(when: Floats, sizes: Floats) -> tuple[float, float]:
    """Return how irregular the distances and the sizes of rises are."""
    gaps = np.diff(when)
    return float(gaps.std() / gaps.mean()), float(sizes.std() / sizes.mean())


# --- straight pieces ----------------------------------------------------------------------------------------


def _by_pieces(points: Points, x: Floats, y: Floats, policy: Policy, whole: float) -> Growth:
    """Judge levels `(x, y)` of a series, which may be its later part; `whole` is the span of all of it."""
    knots, steps = _features(x, y, policy)
    fit = _Fit(x, y, knots, steps)
    bounds, slopes = [float(x[0]), *knots, float(x[-1])], fit.slopes
    earlier = max((fit.mean(start, bounds[-2])[0] for start in bounds[:-2]), default=0.0)
    ended = earlier > 0 and slopes[-1] < policy.share * earlier
    last = len(slopes) - ended
    means = [fit.mean(start, bounds[last])[0] for start in bounds[:last]]
    first = max((i + 1 for i in range(last - 1) if slopes[i] < policy.share * means[i + 1]), default=0)
    begin, end = bounds[first], bounds[last]
    inside = (x >= begin) & (x <= end)
    count, span = int(np.count_nonzero(inside)), float(x[-1] - x[0])
    few = 1 + 4 / max(1, count)  # an error from few levels is uncertain
    rate, error = fit.mean(begin, end)
    reach = policy.interval * few * error
    if knots or points.span < whole:  # a knot may be between two levels, and a curve is not straight
        turns = float(np.abs(np.diff(slopes)).sum())
        reach += (2 * fit.spread + turns * span / (2 * len(x))) / (end - begin)
    jumps = tuple((float(x[k]), size) for k, size in zip(steps, fit.sizes, strict=True) if size > 0)
    result = Growth("flat", rate, rate - reach, rate + reach, 0.0, begin, jumps=jumps)

    def certain(start: float, stop: float) -> bool:
        slope, about = fit.mean(start, stop)
        rises = slope >= policy.least and slope * (stop - start) >= policy.settles
        return rises and slope > policy.suspicion * few * about

    rises = certain(begin, end)
    if ended or (rises and slopes[-1] < policy.slows * max(slopes)):  # what came first may be a warm-up
        after = x >= bounds[1]
        if 2 * (bounds[1] - x[0]) <= span and np.count_nonzero(after) >= policy.points:
            late = _by_pieces(points.since(bounds[1]), x[after], y[after], policy, whole)
            if late.state == "growing":
                return late
    if ended and (rises or certain(bounds[0], bounds[-1])):
        if certain(*bounds[-2:]):
            return replace(result, state="filling", shape="slowing", recent=slopes[-1])
        state: State = "flat" if x[-1] - end >= policy.share * span else "uncertain"
        return replace(result, state=state, until=end)
    if not rises:
        return replace(result, state="uncertain") if certain(bounds[0], bounds[-1]) else result
    result = replace(result, recent=slopes[-1])
    if count < policy.several or end - begin < 0.8 * policy.share * span:
        return replace(result, state="uncertain")
    rest, part = y - fit.of_steps, span / whole  # in a part of the time, what fills slows down by less
    halves = _Fit(x[inside], rest[inside], [(begin + end) / 2], [])
    slower, about = halves.sum_of(-(policy.slows**part), 1)
    if slower < -policy.differs * few * about:
        return replace(result, state="filling", shape="slowing")
    keeps, about = halves.sum_of(-(policy.half**part), 1)
    if points.span < whole:
        reach += abs(halves.slopes[1] - halves.slopes[0]) / 2
        result = replace(result, low=rate - reach, high=rate + reach)
    # Rises of random size make the rate uncertain, and not the growth.
    doubtful = reach > policy.half * rate or keeps < policy.differs * few * about
    if doubtful or _may_come_again(y, steps, fit.sizes, policy):
        return replace(result, state="uncertain")
    faster, about = halves.sum_of(-1 / policy.slows, 1)
    shape: Shape = "accelerating" if faster > policy.differs * about else "late" if first else "steady"
    return replace(result, state="growing", shape=shape)


def _may_come_again(y: Floats, steps: list[int], sizes: list[float], policy: Policy) -> bool:
    """Whether a fall took about what the series had risen by before it, as a list does that is emptied."""
    start, falls = 0, sum(size < 0 for size in sizes)
    for at, size in zip(steps, sizes, strict=True):
        if size < 0:
            most = max(y[at - 1], y[at] - size)  # just before it there may be no level
            before, after = float(most - y[start:at].min()), float(y[-1] - y[at])
            small = max(before, after) * policy.share * (2 if falls == 1 else 1)
            if small < -size < (1 + policy.share) * before and after < 2 * before:
                return True
            start = at
    return False


class _Fit:
    """Least squares: straight pieces that meet at knots (positions), and steps (levels)."""

    def __init__(self, x: Floats, y: Floats, knots: list[float], steps: list[int]) -> None:
        self._starts = np.array([x[0], *knots])
        pieces = len(self._starts)
        rows = [np.ones_like(x), *(np.maximum(0, x - k) for k in self._starts)]
        design = np.array([*rows, *((np.arange(len(x)) >= k) * 1.0 for k in steps)])
        self._design, self._weights = design, np.linalg.pinv(design.T)
        found = self._weights @ (y - y[0])
        self._residuals = y - y[0] - found @ design
        self._turns = found[1 : pieces + 1]
        self._free = max(1, len(x) - len(design))
        self.slopes: list[float] = np.cumsum(self._turns).tolist()
        self.sizes: list[float] = found[pieces + 1 :].tolist()
        self.of_steps: Floats = found[pieces + 1 :] @ design[pieces + 1 :]
        self.spread = float(np.sqrt(self._residuals @ self._residuals / self._free))

    def mean(self, begin: float, end: float) -> tuple[float, float]:
        """Return the mean slope between two positions, and its standard error."""
        part = np.maximum(0, end - self._starts) - np.maximum(0, begin - self._starts)
        return self._estimate(part / (end - begin))

    def sum_of(self, *factors: float) -> tuple[float, float]:
        """Return a sum of the slopes, each times a factor, and its standard error."""
        return self._estimate(np.cumsum(factors[::-1])[::-1])

    def _estimate(self, part: Floats) -> tuple[float, float]:
        """Return a sum of turns with an error that is larger where neighboring residuals correlate.

        It is Newey and West's, wider by a fifth, because that of few levels is too small, and at least half
        of that of independent noise, because swings may cancel out by chance.
        """
        n, weights = len(self._residuals), part @ self._weights[1 : len(self._starts) + 1]
        scores = weights * self._residuals
        lags = max(2, n // 6)
        kernel = 1 - np.abs(np.subtract.outer(np.arange(n), np.arange(n))) / (lags + 1)
        variance = float(scores @ np.maximum(0, kernel) @ scores)
        independent = float(self._residuals @ self._residuals) / n * float(weights @ weights)
        error = 1.2 * float(np.sqrt(max(variance, 0.5 * independent) * n / self._free))
        return float(part @ self._turns), error


def _features(x: Floats, y: Floats, policy: Policy) -> tuple[list[float], list[int]]:
    """Return the positions of at most two knots and the levels of at most two steps that a line needs."""
    n, span = len(x), float(x[-1] - x[0])
    v = (y - y[0]) / (float(np.ptp(y)) or 1.0)
    inner = x[2 : n - 2]
    grid = np.sort(np.concatenate((inner, (inner[1:] + inner[:-1]) / 2)))
    rows = [np.maximum(0, x - grid[:, None]) / span, (np.arange(n) >= np.arange(1, n)[:, None]) * 1.0]
    features = np.concatenate(rows)
    is_step = np.arange(len(features)) >= len(grid)
    places = np.where(is_step, np.inf, np.concatenate((grid, x[1:])))
    with np.errstate(invalid="ignore"):
        near = np.abs(places - places[:, None]) < policy.share / 2 * span  # two knots there are a step
    # A step is a single rise: it shows between two levels, and not before and after them.
    slopes = np.pad(np.diff(v) / np.diff(x), 2, mode="edge")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(slopes, 5), axis=1)
    excess = np.diff(v) - usual * np.diff(x)
    usable = np.concatenate((np.ones(len(grid), bool), np.abs(excess) > policy.jump * noise(excess)))
    base = np.array([np.ones(n), (x - x[0]) / span])
    chosen: list[int] = []
    while len(chosen) < 4:
        full = (is_step[chosen, None] == is_step).sum(axis=0) >= 2
        full |= near[chosen].any(axis=0)
        found = _best(
            np.concatenate((base, features[chosen])), features, v, usable & ~full, near, policy.bend
        )
        if not found:
            break
        both = [*chosen, *found]
        sizes = np.linalg.lstsq(np.concatenate((base, features[both])).T, v, rcond=None)[0][2:]
        false = [
            i
            for i, size in zip(both, sizes, strict=True)
            if is_step[i] and excess[i - len(grid)] * np.sign(size) < policy.half * abs(size)
        ]
        usable[false] = False
        chosen = [i for i in chosen if i not in false] if false else both
    knots = sorted(float(grid[i]) for i in chosen if not is_step[i])
    steps = sorted(i - len(grid) + 1 for i in chosen if is_step[i])
    for i, knot in enumerate(knots):
        others, finer = knots[:i] + knots[i + 1 :], knot + np.linspace(-0.5, 0.5, 9) * span / n
        knots[i] = min(finer.tolist(), key=lambda k: _Fit(x, v, sorted([*others, k]), steps).spread)
    return knots, steps


def _best(base: Floats, features: Floats, v: Floats, usable: Flags, near: Flags, bend: float) -> list[int]:
    """Return the one or two features that reduce the misfit enough; none where none do.

    What they share with the base is taken out first, so that each pair's gain has a closed form.
    """
    q = np.linalg.qr(base.T)[0]
    free = features - features @ q @ q.T
    own = (free * free).sum(axis=1)
    places = np.flatnonzero(usable & (own > 1e-6))
    if not len(places):
        return []
    free, own, n = free[places], own[places], len(v)
    rest = v - q @ (q.T @ v)
    misfit, gram, to = float(rest @ rest), free @ free.T, free @ rest
    one, product = to**2 / own, np.outer(own, own)
    two = np.outer(to**2, own) + np.outer(own, to**2) - 2 * np.outer(to, to) * gram
    two /= np.maximum(product - gram**2, 1e-3 * product)
    two[near[np.ix_(places, places)] | np.eye(len(places), dtype=bool)] = 0
    best: list[int] = []
    for found in ([int(one.argmax())], [int(i) for i in np.unravel_index(int(two.argmax()), two.shape)]):
        gain = float(one[found[0]] if len(found) == 1 else two[found[0], found[1]])
        have = float(one[best[0]]) if best else 0.0
        left = max(0.0, misfit - gain) + n * 1e-6
        levels = n - 2 * (len(base) - 1) - 2 * len(found)
        if levels >= 3 and misfit - have - left > bend * (len(found) - len(best)) * left / levels:
            best = found
    return [int(places[i]) for i in best]


# --- levels -------------------------------------------------------------------------------------------------


def _levels(points: Points, troughs: list[int], policy: Policy) -> tuple[Floats, Floats]:
    """Return the middle readings of windows; the lowest ones, or troughs, where these have far less noise."""
    n = len(points.at)
    fine = n if n < 2 * policy.windows else policy.windows
    best = _windows(points.at, points.means, fine, 0.5)
    for x, y, count in (
        (points.at, points.floors, min(fine, n // 2)),
        (points.at[troughs], points.floors[troughs], min(policy.windows, len(troughs))),
    ):
        if count >= policy.several and x[-1] - x[0] >= (1 - policy.share) * points.span:
            lowest = _windows(x, y, count, 0.0)
            if _roughness(*lowest) < policy.half * _roughness(*best):
                best = lowest
    return best


def _windows(at: Floats, values: Floats, count: int, quantile: float) -> tuple[Floats, Floats]:
    """Return the point at a quantile of each of several windows with equal numbers of points."""
    if count >= len(at):
        return at, values
    edges = np.linspace(0, len(at), count + 1).astype(int).tolist()
    spans = pairwise(edges)
    chosen = [a + int(values[a:b].argsort()[int(quantile * (b - a - 1))]) for a, b in spans]
    return at[chosen], values[chosen]


def _roughness(x: Floats, y: Floats) -> float:
    """Return how far levels are off the lines between their neighbors, over the root of their number."""
    part = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    off = np.abs(y[1:-1] - (1 - part) * y[:-2] - part * y[2:])
    return float(np.quantile(off, 0.8) / np.sqrt(len(x)))


def _troughs(values: Floats) -> list[int]:
    """Return where a series turns after falls of more than half of its largest fall."""
    enough = _swing(values) / 2
    troughs, turn, falling = [], 0, True
    kept = values.tolist()
    for i, value in enumerate(kept):
        if (value < kept[turn]) == falling and value != kept[turn]:
            turn = i
        elif falling and value > kept[turn] + enough:
            troughs.append(turn)
            turn, falling = i, False
        elif not falling and value < kept[turn] - enough:
            turn, falling = i, True
    return troughs + [turn] * falling
