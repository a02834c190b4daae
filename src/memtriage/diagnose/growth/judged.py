"""State whether a counter could be judged: growth, a detection limit, or the reason why not. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from memtriage.diagnose.growth.evidence import ENOUGH_MARKS
from memtriage.diagnose.growth.track import Points, Track
from memtriage.diagnose.growth.trend import (
    GrowthEstimate,
    TrendPolicy,
    detection_limit,
    estimate,
)
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale
from memtriage.model.units import MIB, count, devices_in_words, duration, rate

_UNITS: Final[Mapping[JudgedScale, str]] = {"step": "step", "microbatch": "backward", "time": "second"}
_SECONDS_NEEDED: Final = 3
"""Seconds after which readings over time are enough: at first they come every few tenths of a second."""
_MEANINGFUL: Final = 8
"""A limit means nothing if a leak at the limit would add more than this many times the memory in use during
the run: then even a leak that doubles the program's memory would not be detected."""
_SMALL: Final = 256 * MIB
"""Bytes that a leak at the limit may always add during a run."""
NO_COUNTER: Final = Judged(reason="no counter of it can be read")


def judge_counter(track: Track, scale: JudgedScale, policy: TrendPolicy) -> tuple[GrowthEstimate, Judged]:
    """Estimate a counter's growth and state what that is based on.

    Takes about 20 ms, nearly all of it for the limit: call it at the end of a run.

    Args:
        track: the counter's readings.
        scale: what its positions count.
        policy: of the counter.
    """
    points = track.points()
    growth = estimate(points, policy)
    if growth.state == "flat" and scale == "time" and points.span < _SECONDS_NEEDED:
        # In such a short time, even a fast leak adds no more bytes than filling caches do.
        unsettled = estimate(points, replace(policy, settles=0.0))
        growth = replace(unsettled, state="undecided") if unsettled.state == "growing" else growth
    judged = Judged(scale=scale, points=track.readings)
    if growth.state == "too_short":
        return growth, msgspec.structs.replace(
            judged, reason=_too_few(track.readings, scale, policy.readings)
        )
    if growth.state == "growing":
        return growth, judged
    if growth.state == "undecided":
        reason = (
            f"suspected growth of {rate(round(growth.rate), _UNITS[scale])}, which may end by itself; "
            "run longer to confirm"
        )
        return growth, msgspec.structs.replace(judged, reason=reason)
    limit = detection_limit(points, policy)
    return growth, with_limit(judged, limit, points)


def with_limit(judged: Judged, limit: float | None, points: Points) -> Judged:
    """Return a judgment with a limit in bytes per position, or with a reason if the limit means nothing.

    Args:
        judged: of a counter, with its scale.
        limit: None if no growth of any size would be detected.
        points: the counter's readings.
    """
    if limit is None or limit * points.span > max(_SMALL, _MEANINGFUL * points.means.max()):
        reason = "the counter moves too much: no growth of any size would show"
        return msgspec.structs.replace(judged, reason=reason)
    stated = DetectionLimit(math.ceil(limit), "second" if judged.scale == "time" else "step")
    return msgspec.structs.replace(judged, detection_limit=stated, reason=None)


def _too_few(readings: int, scale: JudgedScale, needed: int) -> str:
    if scale == "time":
        return f"no step was seen; {needed} steps, or {_SECONDS_NEEDED} s without any, are needed"
    few = f"{count(readings, _UNITS[scale])} {'is' if readings == 1 else 'are'} too few"
    return f"{few}, {needed} are needed"


def with_circumstances(
    judged: Mapping[str, Judged], *, failed: bool, steps: int, torch: bool
) -> dict[str, Judged]:
    """Say why a run was too short, if that is because the program failed or does not use torch.

    Args:
        judged: by device, as `judge_counter` returned it.
        failed: whether an exception ended the program.
        steps: its optimizer steps.
        torch: whether it imported torch.
    """
    if failed:
        why = f"the script failed after {count(steps, 'step')}" if steps else "the script failed at once"
    elif not torch and not steps:
        why = "torch was not imported"
    else:
        return dict(judged)
    return {
        device: msgspec.structs.replace(judgment, reason=f"{why}: {judgment.reason}")
        if judgment.scale is not None and judgment.points < ENOUGH_MARKS
        else judgment
        for device, judgment in judged.items()
    }


def weakest(judged: Iterable[Judged]) -> Judged:
    """Return the judgment that proves least: one with a reason, then growth, then the highest limit.

    Args:
        judged: of the same device on several ranks, at least one.
    """
    return max(judged, key=_weakness)


def _weakness(judgment: Judged) -> tuple[bool, bool, int]:
    limit = judgment.detection_limit
    return (judgment.reason is not None, limit is None, 0 if limit is None else limit.bytes)


def stated_limit(judged: Mapping[str, Judged], *, steps: int, seconds: float | None) -> str | None:
    """Return how small a leak would have been detected, and in how long a run; None if nothing was judged.

    Args:
        judged: what the judgment of growth is based on, by device.
        steps: optimizer steps of the run.
        seconds: how long it was watched; None if unknown.
    """
    devices: dict[str, list[str]] = {}
    for device, judgment in judged.items():
        if judgment.detection_limit is not None:
            limit = rate(judgment.detection_limit.bytes, judgment.detection_limit.per)
            devices.setdefault(limit, []).append(device)
    if not devices:
        return None
    limits = " and ".join(f"{limit} on {devices_in_words(names)}" for limit, names in devices.items())
    first = next(judgment for judgment in judged.values() if judgment.detection_limit is not None)
    if first.scale == "step":
        rests_on = count(steps, "step")
    elif first.scale == "microbatch":
        rests_on = count(first.points, "backward")
    else:
        rests_on = count(first.points, "reading") if seconds is None else duration(seconds)
    return f"no growth above {limits} in {rests_on}"
