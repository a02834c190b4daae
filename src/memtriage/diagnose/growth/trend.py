"""Estimate whether a counter grows, since when and how fast, and the smallest leak that would be seen. Pure.

A leak grows during all of the time that it is followed. A cache that fills, a jump and a swing do not. So
growth must exceed the noise, show in each quarter of the time since its onset, and go on up to the last
reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from memtriage.diagnose.growth.jumps import bend_to_flat, changes, without_jumps, without_releases
from memtriage.diagnose.growth.line import POLICY as LINE
from memtriage.diagnose.growth.line import fit, levels, noise, quarter_rates, slopes
from memtriage.diagnose.growth.track import Floats, Points
from memtriage.model.units import MIB

TrendState = Literal["too_short", "flat", "undecided", "growing"]
"""Whether a counter grows: `undecided` growth has slowed down, or came in a few irregular jumps."""


@dataclass(frozen=True, slots=True)
class TrendPolicy:
    """Thresholds of growth detection.

    Attributes:
        warm_up: first readings to leave out: optimizer state, workspaces, compilation.
        points: readings needed after these: with the warm-up, 12 positions.
        least: bytes per position below which growth is the program's own bookkeeping: a loss kept as a
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
        slows: if the last quarter grows by less than this part of the first one's growth, growth may be
            ending: what approaches a bound exponentially gets there when it is half full.
        accuracy: error of the rate within which a leak counts as found.
        margin: how much larger than the smallest leak that would have been found the stated limit is: with
            other noise of the same size, 99 in 100 are found.
        again: factor of `suspicion` and `certainty` where a part of the series is judged: more looks need
            more certainty.
        narrower: growth is taken to have begun with a later part of the series only if the rate of that part
            has an interval below this part of the whole's: only then is it known better there.
        windows: levels that a rate is taken from.
        troughs: windows whose lowest points are compared where collections make the counter a saw-tooth.
        per_trough: readings that each of them must have.
        steadier: the lowest points are taken, and not the levels, if a line through them has less than this
            part of the error.
        stops: growth has ended if the last stretch is flatter than 0.25 of the flattest other stretch of its
            length, and more than 3 times as far from their median slope.
        ends: lengths of that stretch that are tried: one part in so many of the whole time.
        rests: growth has also ended if so many levels at the end do not rise, where all earlier ones did. A
            program that is followed over time is faster now and slower then, so that its end need not be
            further from the median than its slowest part. One in 10,000 series of 24 independent rises has
            its four smallest ones at the end.
        falls: a fall within the last stretch explains why it is flat, and nothing has ended, if it is at
            least this part of what that time would have brought,
        goes_on: and if growth before or after the fall has at least this part of the rate.
        differs: the last quarter is slower than the first if it falls short by this many standard errors.
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
    again: float = 1.2
    narrower: float = 0.5
    windows: int = 24
    troughs: int = 6
    per_trough: int = 4
    steadier: float = 0.5
    stops: tuple[float, float] = (0.25, 3.0)
    ends: tuple[int, ...] = (8, 16, 32, 64, 128)
    rests: int = 4
    falls: float = 0.25
    goes_on: float = 0.5
    differs: float = 2.0

    @property
    def readings(self) -> int:
        """Readings needed in all."""
        return self.warm_up + self.points


@dataclass(frozen=True, slots=True)
class RisePolicy:
    """Thresholds for growth that comes in single rises.

    Attributes:
        noise: a rise must exceed this many standard deviations of the differences.
        part: a rise must have at least this part of all growth.
        others: if the usual differences bring more than this part of all growth, it also grows in between.
        alike: rises are of one kind if they are 0.3 to 3 times as large as one of them.
        differences: at most 1 in 3 differences may be a rise: otherwise growth is not a rare event.
        groups: at most 1 in 6, if a rise within a block, which shows in two differences, counts once.
        explained: the rises must bring at least this part of all growth; noise may hide the rest.
        few: with fewer rises, nothing says that another will come.
        several: with this many rises, irregular ones are growth, too.
        regular: rises are periodic if their distances spread by at most this part of their mean, and their
            sizes by at most twice that.
        accuracy: the counter's rate may always differ from the rate of the rises by this part of it.
        waits: if no rise came for this many times the longest distance between two, they may be over.
    """

    noise: float = 6.0
    part: float = 0.005
    others: float = 0.5
    alike: tuple[float, float] = (0.3, 3.0)
    differences: int = 3
    groups: int = 6
    explained: float = 0.5
    few: int = 3
    several: int = 5
    regular: float = 0.25
    accuracy: float = 0.05
    waits: float = 1.6


_RISES: Final = RisePolicy()


_POLICIES: Final = {
    "cpu": TrendPolicy(),
    "shared": TrendPolicy(least=16 * 1024, settles=4 * MIB),
    "host": TrendPolicy(least=16 * 1024, settles=16 * MIB),
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
        slows: the last quarter shows less than the first, by so much that it may come to an end, but also by
            so little that chance may have made the difference.
    """

    state: TrendState
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    onset: float | None = None
    period: float | None = None
    jumps: tuple[tuple[float, float], ...] = ()
    until: float | None = None
    slows: bool = False

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
    stricter = replace(
        policy,
        suspicion=policy.again * policy.suspicion,
        certainty=policy.again * policy.certainty,
        slows=policy.slows**0.5,  # over half of the time what fills exponentially slows down by the root
    )
    best = whole
    for start in changes(points):
        late = _judge(points.since(start), stricter)
        if late.state == "growing":
            late = replace(late, jumps=whole.jumps)
            if whole.state == "growing" and _interval(late) > policy.narrower * _interval(whole):
                continue
            return late
        if late.state == "undecided" and best.state == "flat":
            best = late
    if best.state != "flat":
        return best
    ended = best if best.until is not None else _ended(points, best, stricter)
    after = _judge(_after(points, ended, policy), stricter)
    return after if after.state == "growing" else ended


def _interval(growth: GrowthEstimate) -> float:
    return growth.high - growth.low


def detection_limit(points: Points, policy: TrendPolicy = TrendPolicy()) -> float | None:
    """Return the smallest growth that would have been found, in bytes per position; None if too short.

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
    rate = max(policy.least, policy.settles / points.span) * _JUST_ABOVE
    swing = float(np.ptp(points.means)) / points.span
    missed = rate
    for _ in range(_TRIES):
        if _would_find(points, rate, policy):
            break
        missed = rate
        rate *= _FACTOR if rate > swing / _RISES_OF_A_LEAK else _FAR_FACTOR
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
    period = points.span / _RISES_OF_A_LEAK
    if len(points.at) < policy.windows or np.diff(since).max() > period:
        return  # several rises may come between two readings
    yield estimate(points.plus(rate * period * np.floor(since / period)), policy), rate
    yield estimate(points.plus(2 * rate * np.maximum(0, since - points.span / 2)), policy), 2 * rate


_JUST_ABOVE: Final = 1.001
"""Above what is never called growth, for rounding."""
_RISES_OF_A_LEAK: Final = 8
"""In how many rises a leak comes that comes now and then."""
_FACTOR: Final = 1.25
_FAR_FACTOR: Final = 2
"""From a rate that is not found to the next; the second one far below the swing of the series itself."""
_TRIES: Final = 64
_FINER: Final = 3
"""Halvings of the last factor: the limit is then within 3 % of the smallest leak that would be found."""


# --- one stretch of time ----------------------------------------------------------------------------------


def _judge(points: Points, policy: TrendPolicy, *, to_the_end: bool = True) -> GrowthEstimate:
    """Judge whether a series grows from its beginning to its end; without `to_the_end`, almost to it."""
    if len(points.at) < policy.points or points.span <= 0:
        return GrowthEstimate("too_short")
    points, jumps = without_jumps(without_releases(points))
    line, values, quantile = fit(points.at, points.means, policy.windows), points.means, LINE.level
    if len(points.at) >= policy.per_trough * policy.troughs:
        lowest = fit(points.at, points.floors, policy.troughs, quantile=0.0)
        if lowest.uncertainty < policy.steadier * line.uncertainty:
            line, values, quantile = lowest, points.floors, 0.0
    reach = policy.interval * line.reach
    result = GrowthEstimate(
        "flat", line.rate, line.rate - reach, line.rate + reach, float(points.at[0]), jumps=jumps
    )
    significant = (
        line.rate > policy.suspicion * line.uncertainty
        and line.rate >= policy.least
        and line.rate * points.span >= policy.settles
    )
    if not significant:
        return _by_regular_rises(points, result, policy)
    quarters = quarter_rates(points.at, values, quantile)
    rises = np.diff(line.values)
    always = len(rises) >= policy.always and bool((rises > 0).all())
    goes_on = quarters[-1] > policy.suspicion * line.quarter_error
    if quarters.min() < policy.share * line.rate:
        return _by_regular_rises(points, replace(result, state="undecided" if goes_on else "flat"), policy)
    end = _end(points.at, values, policy) if to_the_end else None
    if end is not None:
        few = int(np.count_nonzero(points.at > end)) < 2 * policy.points
        return replace(result, state="undecided" if few else "flat", until=end)
    uncertain = line.rate < policy.certainty * line.uncertainty and not always
    slower = policy.slows * quarters[0] - quarters[-1]
    if uncertain or slower > policy.differs * line.difference_of_quarters():
        return _by_regular_rises(points, replace(result, state="undecided"), policy)
    growing = replace(result, state="growing", slows=bool(slower > 0))
    return _by_single_rises(points, _by_total(points, growing, policy), policy)


def _by_total(points: Points, growth: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return growth with the rate from the first reading to the last, where that is known better.

    A line's rate may be too uncertain where growth comes in random sizes. The total is uncertain by what
    falls again, and by the largest rise, which may have come once.
    """
    if growth.high - growth.low <= 2 * policy.accuracy * growth.rate:
        return growth
    rises = np.diff(points.means)
    fall = float((np.maximum.accumulate(points.means) - points.means).max())
    rate = float(points.means[-1] - points.means[0]) / points.span
    reach = (fall + float(rises.max())) / points.span
    if reach >= (growth.high - growth.low) / 2:
        return growth
    return replace(growth, rate=rate, low=rate - reach, high=rate + reach)


def _end(at: Floats, values: Floats, policy: TrendPolicy) -> float | None:
    """Return the position at which growth came to an end; None where it goes on to the last reading.

    The end of the run is compared with all other stretches of the same length. Noise and rises that come now
    and then make some of these as flat as an end, so only growth that never paused can be seen to stop.
    """
    part, apart = policy.stops
    span = float(at[-1] - at[0])
    for count in policy.ends:
        rates = slopes(at, values, count)
        if rates is None:
            break
        last, others = rates[-1], rates[:-2]
        least, middle = float(others.min()), float(np.median(others))
        flat = last < part * least and middle - last > apart * (middle - least)
        if not flat or least < policy.share * middle:
            continue
        end = float(at[-1] - span / count)
        if not _has_release(at[at >= end], values[at >= end], middle, policy):
            return end
    return _rest(at, values, policy)


def _rest(at: Floats, values: Floats, policy: TrendPolicy) -> float | None:
    """Return the position from which on a series rests that rose from each level to the next until then."""
    at, values = levels(at, values, policy.windows)
    rates = np.diff(values) / np.diff(at)
    most = policy.stops[0] * float(np.median(rates))
    resting = len(rates) - 1 - int(np.flatnonzero(rates >= most).max(initial=-1))
    earlier = rates[: len(rates) - resting - 1]  # less the one in which it ended
    if resting < policy.rests or len(earlier) < policy.rests or earlier.min() <= most:
        return None
    return float(at[-1 - resting])


def _has_release(at: Floats, values: Floats, rate: float, policy: TrendPolicy) -> bool:
    """Whether a short stretch is flat only because something was released in it.

    It contains a fall, and growth goes on before or after it, as far as there are enough readings to tell.
    """
    middle = len(at) // 2
    if -float(np.diff(values).min()) < policy.falls * rate * float(at[-1] - at[0]):
        return False
    if middle < 2:
        return True
    halves = (slice(None, middle), slice(middle, None))
    rates = [float(np.polyfit(at[half] - at[0], values[half], 1)[0]) for half in halves]
    return max(rates) >= policy.goes_on * rate


def _ended(points: Points, flat: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return with `until` where a flat series grew up to some position: a cache that filled to its bound."""
    until = bend_to_flat(points)
    if until is None:
        return flat
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


@dataclass(frozen=True, slots=True)
class _Rises:
    """Rises of one kind: where each came, and its bytes."""

    at: Floats
    sizes: Floats

    @property
    def period(self) -> float:
        return float(np.diff(self.at).mean())

    @property
    def regular(self) -> bool:
        gaps, sizes = np.diff(self.at), self.sizes
        even = gaps.std() <= _RISES.regular * gaps.mean()
        return bool(even and sizes.std() <= 2 * _RISES.regular * sizes.mean())

    def over_by(self, position: float) -> bool:
        """Whether no rise came for so long that there may be no more."""
        return bool(position - self.at[-1] > _RISES.waits * np.diff(self.at).max())


def _single_rises(points: Points, grown: float) -> _Rises | None:
    """Return single rises that stay, by which a series grew so many bytes; None where it grows otherwise."""
    steps = np.diff(points.means)
    usual = float(np.median(steps))
    deviation = noise(steps - usual)
    # What an evaluation takes goes again: a rise counts where the series never falls below it later.
    steps = np.diff(np.minimum.accumulate(points.means[::-1])[::-1])
    high = steps > max(_RISES.noise * deviation, usual, _RISES.part * grown)
    if usual * len(steps) > _RISES.others * grown or not high.any():
        return None
    at = np.flatnonzero(high)
    groups = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    where = np.array([points.at[group[0] + 1] for group in groups])
    sizes = np.array([steps[group].sum() for group in groups])
    alike = _of_one_kind(sizes)
    if len(at) > len(steps) / _RISES.differences or np.count_nonzero(alike) > len(steps) / _RISES.groups:
        return None
    return _Rises(where[alike], sizes[alike])


def _of_one_kind(sizes: Floats) -> NDArray[np.bool_]:
    """Return which rises are of one size, of which there are more than a few; the kind with most bytes."""
    smallest, largest = _RISES.alike
    kinds = [(sizes > smallest * size) & (sizes < largest * size) for size in sizes]
    return max(kinds, key=lambda kind: (np.count_nonzero(kind) >= _RISES.few, float(sizes[kind].sum())))


def _by_regular_rises(points: Points, growth: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return growth that a line does not show, but several regular rises of one size do."""
    total = float(points.means[-1] - points.means[0])
    rises = _single_rises(points, total) if total > 0 else None
    if rises is None or len(rises.at) < _RISES.several or not rises.regular:
        return growth
    rate = float(rises.sizes.mean()) / rises.period
    enough = rate >= policy.least and float(rises.sizes.sum()) >= policy.settles
    whole = float(rises.sizes.sum()) >= _RISES.explained * total
    if not enough or not whole or rises.over_by(float(points.at[-1])):
        return growth
    return _periodic(growth, rises, rate, policy)


def _periodic(growth: GrowthEstimate, rises: _Rises, rate: float, policy: TrendPolicy) -> GrowthEstimate:
    reach = policy.interval * float(rises.sizes.std()) / np.sqrt(len(rises.sizes)) / rises.period
    return replace(
        growth, state="growing", rate=rate, low=rate - reach, high=rate + reach, period=rises.period
    )


def _by_single_rises(points: Points, growth: GrowthEstimate, policy: TrendPolicy) -> GrowthEstimate:
    """Return growth that comes in single rises as periodic where they are regular, as undecided where few."""
    grown = growth.rate * points.span
    rises = _single_rises(points, grown)
    if rises is None or rises.sizes.sum() < _RISES.explained * grown:
        return growth
    if len(rises.at) < _RISES.few or rises.over_by(float(points.at[-1])):
        return replace(growth, state="undecided")
    rate = float(rises.sizes.mean()) / rises.period
    near = abs(rate - growth.rate) <= max(growth.high - growth.rate, _RISES.accuracy * rate)
    if rises.regular and near:
        return _periodic(growth, rises, rate, policy)
    return growth if len(rises.at) >= _RISES.several else replace(growth, state="undecided")
