"""Find changes of a counter that are not a trend: jumps, releases, and where growth begins. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.line import levels, misfit, noise
from memtriage.diagnose.growth.track import Floats, Points


@dataclass(frozen=True, slots=True)
class JumpPolicy:
    """Thresholds for changes that happen once.

    Attributes:
        windows: levels between which changes are looked for.
        noise: a change must exceed this many standard deviations of the rises between levels.
        jump: each of one or two jumps must have this part of the whole range to be separated from a trend.
        release: the same for releases. It is smaller, because a fall during growth is not noise.
        released: a fall of at most this part of the rise before it, and of the rise after it, releases memory
            that does not grow. A list that is emptied now and then releases most of the rise before.
        cleared: a single fall of more than this part of the whole range begins a new stretch of time.
        late: an onset after this part of the time leaves too little to judge.
        bends: growth began at an onset if a line that is flat before it has less than this part of the
            misfit of a straight line.
    """

    windows: int = 24
    noise: float = 6.0
    jump: float = 0.25
    release: float = 0.025
    released: float = 0.4
    cleared: float = 0.3
    late: float = 0.8
    bends: float = 0.5


POLICY: Final = JumpPolicy()


def without_jumps(points: Points) -> tuple[Points, tuple[tuple[float, float], ...]]:
    """Remove one or two rises that happen once and stay: an optimizer's state, a copy, an evaluation."""
    at, values = levels(points.at, points.means, POLICY.windows)
    excess, deviation = _excess_and_noise(at, values)
    enough = max(POLICY.noise * deviation, POLICY.jump * float(np.ptp(values)), 1.0)
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


def without_releases(points: Points) -> Points:
    """Put back one or two releases that are far smaller than the growth before and after them."""
    at, values = levels(points.at, points.means, POLICY.windows)
    excess, deviation = _excess_and_noise(at, values)
    rises = np.diff(values)
    enough = max(POLICY.noise * deviation, POLICY.release * float(np.ptp(values)), 1.0)
    fall_levels = np.flatnonzero((-excess > enough) & (rises < 0))
    if not 1 <= len(fall_levels) <= 2 or np.median(rises) <= 0:
        return points
    means, floors = points.means, points.floors
    for level in fall_levels.tolist():
        nbytes = -float(excess[level])
        before = values[level] - values[: level + 1].min()
        after = values[level + 1 :].max() - values[level + 1]
        if nbytes > POLICY.released * min(before, after):
            return points
        a, b = np.searchsorted(points.at, at[level : level + 2]).tolist()
        where = points.at >= points.at[a + int(np.argmin(np.diff(points.means[a : b + 1]))) + 1]
        means, floors = means + nbytes * where, floors + nbytes * where
    return Points(points.at, means, floors)


def _excess_and_noise(at: Floats, values: Floats) -> tuple[Floats, float]:
    """Return by how much each level rises more than usual in the same time, and the standard deviation of it.

    Levels are at unequal distances: if readings are missing, growth shows as one large rise.
    """
    times, rises = np.diff(at), np.diff(values)
    excess = rises - float(np.median(rises / times)) * times
    return excess, noise(excess)


def changes(points: Points) -> list[float]:
    """Return positions from which the rest may be judged alone: an onset, a release, half of the time."""
    at, values = levels(points.at, points.means, POLICY.windows)
    positions = []
    onset = _onset(at, values)
    if onset is not None and at[onset] <= at[0] + POLICY.late * points.span:
        positions.append(float(at[onset]))
    falls = -np.diff(values)
    big = np.flatnonzero(falls > max(POLICY.cleared * float(np.ptp(values)), 1.0))
    if len(big) == 1 and 2 * (at[-1] - at[big[0] + 1]) >= points.span:
        positions.append(float(at[big[0] + 1]))
    return [*positions, float(points.at[0]) + points.span / 2]


def bend_to_flat(points: Points) -> float | None:
    """Return the position from which a line that becomes flat there fits best; None if none fits well."""
    at, values = levels(points.at, points.means, POLICY.windows)
    end = _onset(-at[::-1], values[::-1])
    return None if end is None else float(at[len(at) - 1 - end])


def _onset(at: Floats, values: Floats) -> int | None:
    """The level at which a line that is flat until there fits best; None if it is hardly better."""
    straight = misfit(at - at[0], values)
    misfits = [misfit(np.maximum(0, at - at[level]), values) for level in range(2, len(at) - 3)]
    best = int(np.argmin(misfits)) if misfits else 0
    return best + 2 if misfits and misfits[best] < POLICY.bends * straight else None
