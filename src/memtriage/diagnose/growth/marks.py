"""Test quickly whether a counter rises from mark to mark: within a step, in a live view, in a snapshot. Pure.

`trend.py` judges whole runs. This test only raises a suspicion, so it is made to miss nothing: it asks
whether the *floor* (the smallest value in a window) rises over three successive windows. Longer batches,
gradient accumulation and collections move single values, not floors. Growth at every mark moves each floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """Thresholds of the quick test.

    Attributes:
        warm_up: first marks of a series to leave out: optimizer state, workspaces, caches, compilation, and
            the run's first census, which moves malloc's counter (it is taken at the end of the third step).
        points: marks needed before a verdict on the counter.
        floor_bytes: growth per mark below which nothing is suspected. It is far below the smallest leak worth
            reporting; a step's own bookkeeping (a loss kept as a float) is smaller still.
        microbatch_warm_up: first micro-batches of a step to leave out: the first allocates gradients.
        microbatch_points: micro-batches needed for a suspicion inside one step.
        microbatch_share: growth continues if later micro-batches show at least this part of its rate.
        microbatch_recent: the last micro-batches of a step that must all rise, if there are that many.
        longest_period: most backwards that one micro-batch may consist of.
    """

    warm_up: int = 3
    points: int = 6
    floor_bytes: int = 1024
    microbatch_warm_up: int = 1
    microbatch_points: int = 3
    microbatch_share: float = 0.3
    microbatch_recent: int = 12
    longest_period: int = 8


POLICY = GrowthPolicy()
_MAX_POINTS = 4096


@dataclass(slots=True)
class Series:
    """One counter at one kind of mark: positions (steps) and values (bytes), thinned when long."""

    positions: list[float] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def add(self, position: float, value: int) -> None:
        self.positions.append(position)
        self.values.append(value)
        if len(self.values) > _MAX_POINTS:
            # every second point of the older half: recent marks stay dense
            half = _MAX_POINTS // 2
            self.positions[:half] = self.positions[:half:2]
            self.values[:half] = self.values[:half:2]

    def after(self, position: float) -> Series:
        """Return the part of the series after a position."""
        start = next((i for i, p in enumerate(self.positions) if p > position), len(self.positions))
        return Series(self.positions[start:], self.values[start:])


def floors(values: Sequence[int], windows: int) -> list[int]:
    """Return the smallest value in each of `windows` equal windows (the last one takes the remainder)."""
    width = len(values) // windows
    if width == 0:
        return []
    bounds = [*range(0, width * windows, width), len(values)]
    return [min(values[a:b]) for a, b in zip(bounds[:windows], [*bounds[1:windows], bounds[-1]], strict=True)]


def floor_growth(series: Series, windows: int = 3) -> float | None:
    """Return bytes per position by which the floor rises; None if it does not rise from window to window."""
    if len(series.values) < 2 * windows:
        return None
    low = floors(series.values, windows)
    if any(after <= before for before, after in pairwise(low)):
        return None
    # From where the first floor was touched to where the last one was.
    last_window = len(series.values) // windows * (windows - 1)
    first = series.positions[series.values.index(low[0])]
    last = series.positions[series.values.index(low[-1], last_window)]
    return (low[-1] - low[0]) / (last - first) if last > first else None


def policy_for(counter: str) -> GrowthPolicy:
    """Return the policy for a counter: malloc's and the shared resident set drift a little without a leak."""
    return _DRIFTING.get(counter, POLICY)


_DRIFTING = {"cpu": GrowthPolicy(floor_bytes=8 * 1024), "shared": GrowthPolicy(floor_bytes=16 * 1024)}


def recent_growth(series: Series, policy: GrowthPolicy = POLICY) -> float | None:
    """Return bytes per step by which the floor of the recent half rises; None if the series is too short.

    0 if it does not rise from window to window, or by less than `policy.floor_bytes`.
    """
    length = len(series.values) - policy.warm_up
    if length < policy.points:
        return None
    start = policy.warm_up + max(0, (length - policy.points) // 2)
    rate = floor_growth(Series(series.positions[start:], series.values[start:]))
    return rate if rate is not None and rate >= policy.floor_bytes else 0.0


def period_within_step(values: Sequence[int], policy: GrowthPolicy = POLICY) -> int | None:
    """Return the number of backwards after which the counter is higher each time, within one step; or None.

    1 if every backward ends higher than the one before. More if a micro-batch has several backwards, such as
    one per pipeline stage or one in the fused forward of a head: then the counter goes up and down within a
    micro-batch, and only the same instant of each can be compared.

    Args:
        values: the counter at the end of backwards 1, 2, ... of the step. The last few are looked at.
        policy: how many points are needed, and the least rise.
    """
    for period in range(1, policy.longest_period + 1):
        needed = policy.microbatch_points * period
        recent = values[max(policy.microbatch_warm_up, len(values) - max(needed, policy.microbatch_recent)) :]
        if len(recent) < needed:
            return None
        if all(
            after - before >= policy.floor_bytes
            for before, after in zip(recent, recent[period:], strict=False)
        ):
            return period
    return None


def went_on_within_step(
    step: Series, since: float, rate: float, policy: GrowthPolicy = POLICY
) -> bool | None:
    """Whether growth within a step continues after micro-batch `since`; None if too few followed to say.

    A cache that fills while the first step runs rises from micro-batch to micro-batch, and then never again.

    Args:
        step: the counter over the micro-batches of one step.
        since: micro-batch of the census that saw growth; of a later step, its warm-up.
        rate: bytes per micro-batch that the censuses found.
        policy: how many micro-batches are needed, and how much of that rate.
    """
    later = step.after(since)
    if len(later.values) < policy.microbatch_points:
        return None
    width = len(later.values) // 3
    rise = min(later.values[-width:]) - min(later.values[:width])
    return rise >= policy.microbatch_share * rate * (later.positions[-width] - later.positions[0])


def steps_left(limit: int | None, used: int | None, rate: float | None) -> int | None:
    """Return marks until `used` reaches `limit` at `rate` bytes per mark; None if one is unknown."""
    if limit is None or used is None or not rate or rate <= 0:
        return None
    return max(0, int((limit - used) / rate))
