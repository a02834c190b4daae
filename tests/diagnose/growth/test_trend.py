"""Trends: growth is found with its rate, onset and period; what fills, jumps or swings is no growth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.diagnose.growth.track import Floats, Points, Track
from memtriage.diagnose.growth.trend import (
    GrowthEstimate,
    TrendPolicy,
    detection_limit,
    estimate,
    trend_policy,
)
from support.expected import assert_as_kept

KIB, MIB = 1024, 1024**2
NOISE: dict[str, list[int]] = json.loads(
    (Path(__file__).parents[2] / "data" / "counter_noise.json").read_text()
)["series"]
QUIET = sorted(name for name in NOISE if "thread" not in name)
CPU, CUDA = trend_policy("cpu"), trend_policy("cuda:0")


def points(values: Floats, at: Floats | None = None, policy: TrendPolicy = CPU) -> Points:
    track = Track(policy.warm_up)
    positions = np.arange(1, len(values) + 1) if at is None else at
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        track.add(position, int(value))
    return track.points()


def judged(values: Floats, policy: TrendPolicy = CPU) -> GrowthEstimate:
    return estimate(points(values, policy=policy), policy)


def noise(size: float, steps: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, size, steps)


STEP: Floats = np.arange(300, dtype=np.float64)


@pytest.mark.parametrize("steps", [12, 20, 30, 300, 3_000, 100_000])
@pytest.mark.parametrize("rate", [128 * KIB, MIB])
def test_steady_growth(steps: int, rate: int) -> None:
    growth = judged(10e9 + rate * np.arange(steps) + noise(100, steps))
    assert growth.state == "growing"
    assert growth.low <= rate <= growth.high
    assert growth.rate == pytest.approx(rate, rel=0.01)
    assert growth.period is None


@pytest.mark.parametrize("period", [2, 7, 25, 60])
def test_periodic_growth(period: int) -> None:
    growth = judged(STEP // period * MIB + noise(100, 300))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(MIB / period, rel=0.1)
    if period > 6:
        assert growth.period == pytest.approx(period, rel=0.02)


def test_the_interval_of_periodic_growth_is_as_wide_as_rises_differ() -> None:
    sizes = np.random.default_rng(0).uniform(0.95 * MIB, 1.05 * MIB, 40)
    growth = judged(np.repeat(np.cumsum(sizes), 15) + noise(100, 600))
    assert growth.period == pytest.approx(15, rel=0.02)
    assert growth.low <= sizes.mean() / 15 <= growth.high
    assert 0 < growth.high - growth.low < 0.1 * growth.rate


@pytest.mark.parametrize("onset", [60, 150, 200])
def test_a_late_onset(onset: int) -> None:
    growth = judged(np.maximum(0, STEP - onset) * 64 * KIB + noise(100, 300))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(64 * KIB, rel=0.02)
    assert growth.onset is not None
    assert min(onset, 150) - 15 <= growth.onset <= onset + 15


def test_growth_on_top_of_a_jump_of_a_release_and_of_a_saw_tooth() -> None:
    jump = judged((STEP > 150) * 1e9 + STEP * 64 * KIB)
    assert (jump.state, len(jump.jumps)) == ("growing", 1)
    assert jump.rate == pytest.approx(64 * KIB, rel=0.02)
    released = judged((STEP < 60) * 1e9 + STEP * 64 * KIB)
    assert released.state == "growing"
    assert released.rate == pytest.approx(64 * KIB, rel=0.02)
    teeth = judged(STEP % 20 * MIB + STEP * 512 * KIB)
    assert teeth.state == "growing"
    assert teeth.rate == pytest.approx(512 * KIB, rel=0.2)


HEALTHY: dict[str, Callable[[Floats], Floats]] = {
    "flat": lambda x: 0 * x,
    "a log": lambda x: 64 * x,
    "an optimizer's state": lambda x: (x > 0) * 1e9,
    "one jump": lambda x: (x > len(x) / 2) * 1e9,
    "two jumps": lambda x: (x > len(x) / 3) * 1e9 + (x > len(x) / 2) * 1.2e9,
    "an allocation after the last step": lambda x: (x == x[-1]) * 6e9,
    "a release": lambda x: (x < len(x) / 2) * 1e9,
    "a cache with a bound": lambda x: np.minimum(x, len(x) / 3) * MIB,
    "evaluations": lambda x: (x % 50 == 49) * 1e8,
    "garbage of 7 steps": lambda x: x % 7 * MIB,
    "garbage of a seventh of the run": lambda x: x % (len(x) // 7) * MIB,
    "garbage of a third of the run": lambda x: x % (len(x) // 3) * MIB,
    "varying lengths": lambda x: np.random.default_rng(1).uniform(0, 1e7, len(x)),
}


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("steps", [20, 60, 300, 5_000])
@pytest.mark.parametrize("policy", [CPU, CUDA], ids=["cpu", "cuda"])
def test_what_is_no_growth(shape: str, steps: int, policy: TrendPolicy) -> None:
    values = 1e10 + HEALTHY[shape](np.arange(steps, dtype=np.float64))
    assert judged(values, policy).state == "flat"


def test_growth_that_ended_has_a_last_position() -> None:
    growth = judged(np.minimum(STEP, 120) * 64 * KIB + noise(100, 300))
    assert growth.state == "flat"
    assert growth.until == pytest.approx(120, abs=10)
    assert growth.rate == pytest.approx(64 * KIB, rel=0.05)


@pytest.mark.parametrize("steps", [60, 300, 5_000])
@pytest.mark.parametrize("part", [0.8, 0.85, 0.9])
def test_growth_that_stopped_near_the_end_is_not_growing(steps: int, part: float) -> None:
    at = np.arange(steps, dtype=np.float64)
    growth = judged(np.minimum(at, part * steps) * 64 * KIB + noise(100, steps))
    assert growth.state != "growing"
    assert growth.until == pytest.approx(part * steps, abs=0.1 * steps)


@pytest.mark.parametrize("seed", [9, 15, 19])
@pytest.mark.parametrize("part", [0.75, 0.8, 1.0])
def test_growth_that_was_faster_now_and_slower_then_has_stopped_where_it_rests(
    part: float, seed: int
) -> None:
    """A cache of 40 s that fills at another speed every 2 s; readings get rarer, as over time."""
    speeds = np.random.default_rng(seed).uniform(0.5, 2, 20)
    at = np.concatenate((np.arange(0.1, 10, 0.1), 10 * 1.01 ** np.arange(140)))
    done = np.interp(at, np.arange(21) * 2.0, np.concatenate(([0], np.cumsum(speeds))))
    values = np.minimum(done, part * done[-1]) * MIB
    assert (estimate(Points(at, values, values), CUDA).state == "growing") == (part == 1)


def test_rises_that_do_not_come_any_more_are_not_growing() -> None:
    assert judged(np.minimum(STEP, 240) // 20 * MIB + noise(100, 300)).state != "growing"


@pytest.mark.parametrize("at", [100, 250, 290, 298])
def test_a_release_is_no_end_of_growth(at: int) -> None:
    growth = judged(STEP * 64 * KIB - (at <= STEP) * 1.0 * MIB + noise(100, 300))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(64 * KIB, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_rises_of_random_size_are_growth(seed: int) -> None:
    sizes = np.random.default_rng(seed).exponential(64 * KIB, 300)
    growth = judged(np.cumsum(sizes) + noise(100, 300))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(sizes.mean(), rel=0.2)


def test_regular_rises_are_growth_beside_a_cache_that_fills() -> None:
    at = np.arange(600.0)
    fills = 2 * MIB * (1 - np.exp(-at / 60))
    growth = judged(fills + 380 * KIB * (at // 90), CUDA)
    assert growth.state == "growing" and growth.period == pytest.approx(90, rel=0.02)
    assert growth.rate == pytest.approx(380 * KIB / 90, rel=0.05)
    assert judged(fills + 380 * KIB * (np.minimum(at, 400) // 90), CUDA).state != "growing"


@pytest.mark.parametrize("seed", range(5))
def test_growth_of_random_size_has_the_rate_of_its_total(seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = np.cumsum(chance.exponential(MIB, 140) ** 1.5)
    growth = judged(values, CUDA)
    mean = (values[-1] - values[3]) / 136
    assert growth.state == "growing" and growth.rate == pytest.approx(mean, rel=0.1)
    assert growth.low <= mean <= growth.high


@pytest.mark.parametrize("seed", [1, 8])
def test_a_rate_that_a_line_is_too_uncertain_of_is_that_of_the_total(seed: int) -> None:
    values = np.cumsum(np.random.default_rng(seed).exponential(MIB, 140) ** 1.5)
    growth = judged(values, CUDA)
    read = values[3:]
    assert growth.rate == pytest.approx((read[-1] - read[0]) / 136, rel=1e-6)
    largest = np.diff(read).max() / 136  # may have come once
    assert growth.high - growth.rate == pytest.approx(largest, rel=1e-6)
    assert growth.rate - growth.low == pytest.approx(largest, rel=1e-6)


def test_periodic_growth_that_noise_hides_in_part_is_growth() -> None:
    growth = judged(STEP // 20 * MIB + noise(200 * KIB, 300))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(MIB / 20, rel=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_leaks_above_the_limit_are_found_in_any_shape(seed: int) -> None:
    own = noise(20 * KIB, 300, seed)
    limit = detection_limit(points(own))
    assert limit is not None
    late, now_and_then = 2 * limit * np.maximum(0, STEP - 150), limit * 30 * (STEP // 30)
    assert judged(own + late).rate == pytest.approx(2 * limit, rel=0.2)
    assert judged(own + now_and_then).rate == pytest.approx(limit, rel=0.2)
    assert judged(own + late).state == judged(own + now_and_then).state == "growing"


@pytest.mark.parametrize("rate", [0, 64 * KIB, 5 * MIB])
def test_its_own_growth_does_not_raise_the_limit(rate: int) -> None:
    own = noise(20 * KIB, 300)
    without, limit = detection_limit(points(own)), detection_limit(points(own + rate * STEP))
    assert without is not None and limit == pytest.approx(without, rel=0.5)


def test_ended_growth_does_not_raise_the_later_limit() -> None:
    loading = np.minimum(STEP, 60) * 5 * MIB
    limit = detection_limit(points(loading + noise(100, 300)))
    assert limit is not None
    assert limit <= 2 * CPU.settles / 240


@pytest.mark.parametrize("filled", [0.8, 1.5, 3.0])
def test_cache_that_fills_more_slowly_is_undecided(filled: float) -> None:
    assert judged(1e9 * (1 - np.exp(-filled * STEP / 300)) + noise(100, 300)).state == "undecided"


def test_three_irregular_jumps_are_undecided() -> None:
    rises = (STEP > 60) * MIB + (STEP > 100) * MIB + (STEP > 210) * MIB
    assert judged(rises.astype(np.float64)).state == "undecided"


def test_eleven_steps_are_too_short_and_twelve_are_enough() -> None:
    assert judged(MIB * STEP[:11]).state == "too_short"
    assert detection_limit(points(MIB * STEP[:11])) is None
    assert judged(MIB * STEP[:12]).state == "growing"
    assert judged(0 * STEP).state == "flat"


@pytest.mark.parametrize("loop", QUIET)
@pytest.mark.parametrize(("steps", "limit"), [(30, 64 * KIB), (300, 4 * KIB)])
def test_limits_on_the_reference_loops(loop: str, steps: int, limit: int) -> None:
    values = np.array(NOISE[loop][:steps], dtype=np.float64)
    if len(values) < steps:
        pytest.skip("recorded for fewer steps")
    assert judged(values).state == "flat"
    stated = detection_limit(points(values))
    assert stated is not None
    assert stated <= limit


def test_limit_on_cuda_after_30_steps() -> None:
    stated = detection_limit(points(0 * STEP[:30], policy=CUDA), CUDA)
    assert stated is not None
    assert stated <= 512
    assert judged(512 * STEP[:30], CUDA).state == "growing"


@pytest.mark.parametrize("loop", sorted(NOISE))
@pytest.mark.parametrize("steps", [30, 100, 180])
def test_a_leak_at_the_limit_is_found_with_its_rate(loop: str, steps: int) -> None:
    values = np.array(NOISE[loop][:steps], dtype=np.float64)
    limit = detection_limit(points(values))
    assert limit is not None
    growth = judged(values + limit * np.arange(steps))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(limit, rel=0.2)


@given(st.integers(12, 400), st.integers(0, 1 << 20), st.integers(0, 99), st.integers(-(1 << 40), 1 << 40))
@settings(max_examples=50)
def test_a_constant_changes_nothing(steps: int, rate: int, seed: int, constant: int) -> None:
    values = rate * np.arange(steps) + noise(20 * KIB, steps, seed).round()
    here, there = judged(values), judged(values + constant)
    assert here.state == there.state
    assert there.rate == pytest.approx(here.rate, abs=1)


@given(st.integers(12, 400), st.integers(128 * KIB, 1 << 20), st.integers(0, 99), st.integers(2, 50))
@settings(max_examples=50)
def test_twice_the_bytes_are_twice_the_rate(steps: int, rate: int, seed: int, times: int) -> None:
    values = (rate * np.arange(steps) + noise(KIB, steps, seed)).round()
    here, there = judged(values), judged(values * times)
    assert here.state == there.state == "growing"
    assert there.rate == pytest.approx(times * here.rate)


@given(st.integers(12, 400), st.integers(64 * KIB, 1 << 20), st.floats(0.05, 20))
@settings(max_examples=50)
def test_a_rate_is_per_unit_of_position(steps: int, rate: int, unit: float) -> None:
    values = rate * np.arange(steps, dtype=np.float64)
    at = unit * np.arange(steps)
    policy = TrendPolicy(least=1, settles=1)
    assert estimate(points(values, at, policy), policy).rate == pytest.approx(rate / unit)


@given(st.integers(0, 1 << 40), st.integers(12, 2000))
def test_a_flat_series_never_grows(value: int, steps: int) -> None:
    assert judged(np.full(steps, float(value))).state == "flat"


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=6), st.integers(8, 60))
@settings(max_examples=50)
def test_what_comes_back_every_few_steps_never_grows(cycle: list[int], times: int) -> None:
    values = np.array(cycle * times, dtype=np.float64)
    if len(values) >= 12:
        assert judged(values, CUDA).state == "flat"


@given(st.integers(0, 99), st.sampled_from([12, 30, 100, 300, 1000]))
@settings(max_examples=30)
def test_a_longer_run_does_not_raise_the_limit_much(seed: int, steps: int) -> None:
    values = noise(50 * KIB, 3 * steps, seed)
    short, long = detection_limit(points(values[:steps])), detection_limit(points(values))
    assert short is not None
    assert long is not None
    assert long <= 1.6 * short  # two of the sizes that are tried


@given(st.integers(0, 99), st.floats(0.2, 0.9))
@settings(max_examples=30)
def test_marks_without_a_reading_do_not_change_the_answer(seed: int, read: float) -> None:
    steps = np.arange(400, dtype=np.float64)
    kept = np.random.default_rng(seed).random(400) < read
    kept[:20] = True
    values = 128 * KIB * steps + noise(KIB, 400, seed)
    growth = estimate(points(values[kept], steps[kept] + 1))
    assert growth.state == "growing"
    assert growth.rate == pytest.approx(128 * KIB, rel=0.02)


def test_growth_over_missing_readings_is_no_jump() -> None:
    steps = [4, 5, 6, *range(11, 18), 19, 20]  # what a census disturbs is left out
    track = Track()
    for step in steps:
        track.add(step, 100 * MIB + step * MIB + (400_000 if step > 6 else 0))
    grown = estimate(track.points())
    assert (grown.state, grown.jumps) == ("growing", ())
    assert grown.rate == pytest.approx(MIB, rel=0.1)


@pytest.mark.parametrize("readings", [20, 60])
def test_a_stretch_without_readings_leaves_a_limit(readings: int) -> None:
    at = np.concatenate([np.arange(readings // 3), readings + np.arange(2 * readings // 3)]) + 1
    still = noise(20 * KIB, len(at))
    limit = detection_limit(points(still, at))
    assert limit is not None
    assert estimate(points(still + 1.5 * limit * at, at)).state == "growing"
    assert estimate(points(still + 50 * MIB * (at > readings), at)).state != "growing"  # one rise meanwhile


@pytest.mark.parametrize(("before", "after"), [(60, 1), (60, 5), (100, 100), (12, 48)])
@pytest.mark.parametrize("pause", [20, 10_000])
def test_a_long_pause_of_the_program_is_no_growth_and_hides_none(before: int, after: int, pause: int) -> None:
    at = np.concatenate((np.arange(1.0, before + 1), before + pause + np.arange(1.0, after + 1)))
    noise = np.random.default_rng(before).normal(0, 2048, len(at))
    flat = points(1e8 + noise, at)
    assert estimate(flat, CPU).state == "flat"
    limit = detection_limit(flat, CPU)
    grown = estimate(points(1e8 + noise + 1e6 * at, at), CPU)
    if pause > 1000 and after < 48:  # it could have come at once, during the pause
        assert (limit, grown.state) == (None, "undecided")
    else:
        assert limit is not None
        assert grown.state == "growing" and grown.rate == pytest.approx(1e6, rel=0.01)


def test_lowest_points_tell_where_they_are_steadier_than_the_rest() -> None:
    """What comes and goes between two readings moves their means, and what is kept moves the floors."""
    at = np.arange(480.0)
    floors = 20 * KIB * at
    means = floors + 30 * MIB * np.random.default_rng(2).random(len(at))
    found = estimate(Points(at, means, floors), CPU)
    assert (found.state, found.rate) == ("growing", pytest.approx(20 * KIB))
    assert found.low == pytest.approx(found.high)
    assert estimate(Points(at, means, means), CPU).state == "flat"


# --- all of what is said ------------------------------------------------------------------------------------

GROWING: dict[str, Callable[[Floats], Floats]] = {
    "a leak": lambda x: x * 64 * KIB,
    "a leak under noise": lambda x: x * 64 * KIB + noise(MIB, len(x), 1),
    "a leak from the middle on": lambda x: np.maximum(0, x - len(x) // 2) * 64 * KIB,
    "a leak that ended": lambda x: np.minimum(x, 0.7 * len(x)) * MIB + noise(64 * KIB, len(x), 2),
    "a leak that ends": lambda x: np.minimum(x, 0.93 * len(x)) * MIB,
    "a leak beside a cache": lambda x: x * 32 * KIB + np.minimum(x, len(x) / 3) * 256 * KIB,
    "a leak that slows down": lambda x: np.sqrt(x) * MIB,
    "a leak that speeds up": lambda x: x * x * KIB,
    "an entry now and then": lambda x: x // 9 * 4 * MIB,
    "an entry each epoch, under noise": lambda x: x // (len(x) // 5) * 6 * MIB + noise(256 * KIB, len(x), 3),
    "entries of random size": lambda x: np.cumsum(np.random.default_rng(4).exponential(MIB, len(x))),
    "entries at random": lambda x: np.cumsum((np.random.default_rng(5).random(len(x)) < 0.08) * 8.0 * MIB),
    "a leak, and a release": lambda x: x * MIB - (x > 0.8 * len(x)) * 0.2 * len(x) * MIB,
    "a leak, and a jump": lambda x: x * 64 * KIB + (x > len(x) / 2) * 1e9,
    "a leak among evaluations": lambda x: x * 128 * KIB + (x % 10 == 9) * 5e8,
}


def test_all_of_an_estimate() -> None:
    rows = []
    for name, shape in {**GROWING, **HEALTHY}.items():
        for policy in (CPU, CUDA):
            for steps in (15, 24, 60, 400):
                found = judged(10e9 + shape(np.arange(steps, dtype=np.float64)), policy)
                rates = [f"{round(rate):.3g}" for rate in (found.rate, found.low, found.high)]
                places = [
                    None if place is None else f"{place:.4g}"
                    for place in (found.onset, found.period, found.until)
                ]
                jumps = [f"{at:.4g}: {nbytes:.3g}" for at, nbytes in found.jumps]
                rows.append([name, steps, policy.least, found.state, *rates, *places, found.slows, *jumps])
    assert_as_kept("growth_estimates", rows)


def test_all_limits() -> None:
    rows = []
    for name, shape in {**GROWING, **HEALTHY}.items():
        for steps in (15, 40):
            limit = detection_limit(points(10e9 + shape(np.arange(steps, dtype=np.float64))))
            rows.append([name, steps, None if limit is None else f"{limit:.3g}"])
    assert_as_kept("growth_limits", rows)
