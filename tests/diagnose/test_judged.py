"""What a judgement rests on: a limit where nothing grows, a reason where nothing can be said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.diagnose.judged import judge_counter
from memtriage.diagnose.track import Track
from memtriage.diagnose.trend import TrendPolicy, trend_policy
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale

CPU = trend_policy("cpu")
MIB = 1024**2


def judged(
    value: Callable[[int], float],
    steps: int,
    scale: JudgedScale = "step",
    policy: TrendPolicy = CPU,
    unit: float = 1,
) -> tuple[str, Judged]:
    track = Track(policy.warm_up)
    for step in range(steps):
        track.add(step * unit, int(value(step)))
    found, said = judge_counter(track, scale, policy)
    return found.state, said


@pytest.mark.parametrize(
    ("steps", "scale", "count"),
    [
        (0, "step", "0 steps"),
        (1, "step", "1 step,"),
        (11, "microbatch", "11 backwards"),
        (5, "time", "5 readings"),
    ],
)
def test_too_few_positions_are_the_reason(steps: int, scale: JudgedScale, count: str) -> None:
    state, said = judged(lambda step: step * MIB, steps, scale)
    assert state == "too_short"
    assert (said.scale, said.points, said.detection_limit) == (scale, steps, None)
    assert said.reason is not None
    assert count in said.reason
    assert "12 are needed" in said.reason


def test_a_flat_counter_has_a_limit_and_no_reason() -> None:
    state, said = judged(lambda step: 7, 312)
    assert (state, said.reason, said.points) == ("flat", None, 312)
    assert said.detection_limit is not None
    assert said.detection_limit.per == "step"
    assert CPU.least <= said.detection_limit.bytes <= 4 * 1024


def test_three_seconds_at_tenths_of_a_second_are_enough() -> None:
    state, said = judged(lambda step: 7, 30, "time", unit=0.1)
    assert state == "flat"
    assert said.detection_limit is not None
    assert said.detection_limit.per == "second"
    assert judged(lambda step: step * MIB, 30, "time", unit=0.1)[0] == "growing"


def test_a_growing_counter_has_neither_limit_nor_reason() -> None:
    assert judged(lambda step: step * MIB, 30) == ("growing", Judged(scale="step", points=30))


def test_undecided_growth_says_its_rate() -> None:
    state, said = judged(lambda step: 1e9 * (1 - 2 ** (-step / 100)), 300)
    assert state == "undecided"
    assert said.detection_limit is None
    assert said.reason is not None
    assert said.reason.startswith("suspected growth of ")
    assert "per step" in said.reason


def test_a_limit_is_never_rounded_down() -> None:
    _, said = judged(lambda step: 7, 3_000)
    assert isinstance(said.detection_limit, DetectionLimit)
    assert said.detection_limit.bytes >= CPU.least
