"""From a counter's track to whether it could be judged: growth, a detection limit, or a reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from memtriage.diagnose.track import Track
from memtriage.diagnose.trend import GrowthEstimate, TrendPolicy, detection_limit, estimate
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale
from memtriage.model.units import size

_UNITS: Final[Mapping[JudgedScale, tuple[str, str]]] = {
    "step": ("step", "steps"),
    "microbatch": ("backward", "backwards"),
    "time": ("second", "readings over time"),
}


def judge_counter(track: Track, scale: JudgedScale, policy: TrendPolicy) -> tuple[GrowthEstimate, Judged]:
    """Estimate a counter's growth and state what that rests on.

    Takes about 20 ms, nearly all of it for the limit: meant for the end of a run.

    Args:
        track: the counter's readings.
        scale: what its positions count.
        policy: its counter's.
    """
    points = track.points()
    found = estimate(points, policy)
    one, many = _UNITS[scale]
    if found.state == "too_short":
        needed = policy.warm_up + policy.points
        count = track.readings
        reason = f"too short: {count} {one if count == 1 else many}, and {needed} are needed"
        return found, Judged(scale=scale, points=count, reason=reason)
    if found.state == "growing":
        return found, Judged(scale=scale, points=track.readings)
    if found.state == "undecided":
        reason = (
            f"suspected growth of {size(round(found.rate))} per {one}, not steady enough to be sure; "
            "a longer run would settle it"
        )
        return found, Judged(scale=scale, points=track.readings, reason=reason)
    limit = detection_limit(points, policy)
    if limit is None:
        reason = "the counter moves too much: no growth of any size would show"
        return found, Judged(scale=scale, points=track.readings, reason=reason)
    stated = DetectionLimit(math.ceil(limit), "second" if scale == "time" else "step")
    return found, Judged(scale=scale, points=track.readings, detection_limit=stated)
