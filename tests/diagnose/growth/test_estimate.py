"""One estimator of growth: what grows is found with its rate, and what fills, jumps, swings or ended is not.

Series are computed, with all parameters drawn, so that the truth is known.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.estimate import Growth, detection_limit, floor_rise, grow, policy_of
from memtriage.diagnose.growth.evidence import Counter
from memtriage.diagnose.growth.track import Floats, Points, Track
from support.series import GROWING, HEALTHY, KIB, MIB, NOISES, Computed, draw

CPU, CUDA = policy_of("cpu"), policy_of("cuda:0")
NOISE: dict[str, list[int]] = json.loads(
    (Path(__file__).parents[2] / "data" / "counter_noise.json").read_text()
)["series"]
QUIET = sorted(name for name in NOISE if "thread" not in name)
SEEDS = range(60)
STEP: Floats = np.arange(300, dtype=np.float64)


def points(values: Floats, warm_up: int = 3) -> Points:
    track = Track(warm_up)
    for position, value in enumerate(values.tolist(), 1):
        track.add(position, int(value))
    return track.points()


def noise(size: float, steps: int = 300, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, size, steps)


@cache
def judged(kind: str, loudest: float = 5.0) -> list[tuple[Computed, Growth]]:
    """Draw series of a kind and judge each."""
    drawn = [draw(kind, seed, longest=1500, loudest=loudest) for seed in SEEDS]
    return [(series, grow(series.points, CPU)) for series in drawn]


# --- laws over drawn series ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_does_not_go_on_is_never_growing(kind: str) -> None:
    assert [found.state for _, found in judged(kind)].count("growing") == 0


@pytest.mark.parametrize("kind", sorted(set(GROWING) - {"on teeth", "with a release"}))
def test_growth_far_above_its_noise_is_found(kind: str) -> None:
    found = [growth.state for _, growth in judged(kind, 0.01)]
    assert found.count("growing") >= 0.9 * len(found)


@pytest.mark.parametrize("kind", ["on teeth", "with a release"])
def test_growth_among_falls_is_found_unless_as_much_fell_as_had_grown(kind: str) -> None:
    found = [growth.state for _, growth in judged(kind, 0.01)]
    assert found.count("growing") >= 0.7 * len(found)


@pytest.mark.parametrize("kind", GROWING)
def test_the_rate_is_the_mean_since_the_onset(kind: str) -> None:
    wrong, outside, grows = 0, 0, 0
    for loudest in (5.0, 0.01):
        for series, found in judged(kind, loudest):
            if found.state != "growing":
                continue
            assert found.onset is not None
            least, most = series.rates_since(found.onset)
            grows += 1
            wrong += not 0.9 * least <= found.rate <= 1.1 * most
            outside += found.low > 1.01 * most or found.high < 0.99 * least
    assert grows >= len(SEEDS)
    assert wrong <= 0.05 * grows
    assert outside <= 0.05 * grows


@pytest.mark.parametrize("kind", ["quadratic", "exponential"])
def test_accelerating_growth_has_a_recent_rate_above_its_mean(kind: str) -> None:
    for _, found in judged(kind, 0.01):
        if found.shape == "accelerating":
            assert found.recent > found.rate


def test_periodic_growth_has_its_period() -> None:
    named = 0
    for series, found in judged("periodic", 0.01):
        assert series.shape.period is not None
        period = series.shape.period * (len(series.values) - 1)
        if found.period is not None:
            named += 1
            assert found.period == pytest.approx(period, rel=0.1)
        else:  # rises are too dense to be single ones, or too small for the noise
            assert period < 4 * max(3, len(series.values) / 256) or 30 * series.noise > series.shape.period
    assert named > 10


def test_late_growth_has_its_onset() -> None:
    for series, found in judged("late", 0.01):
        if found.shape == "late":
            assert found.onset is not None
            assert found.onset / len(series.values) == pytest.approx(series.shape.onset, abs=0.08)


@pytest.mark.parametrize("kind", ["bounded", "ended"])
def test_a_rise_is_flat_only_where_it_ended_or_is_a_jump(kind: str) -> None:
    for series, found in judged(kind, 0.01):
        if found.state == "flat":
            assert found.until is not None or found.jumps or series.shape.until < 0.25


@pytest.mark.parametrize("kind", sorted(set(GROWING) - {"on teeth"}))
def test_what_rises_far_above_its_noise_is_never_called_flat(kind: str) -> None:
    for series, found in judged(kind, 0.01):
        if len(series.values) >= 24 and series.shape.onset < 0.5:
            assert found.state != "flat" or found.until is not None or found.jumps


# --- single cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "swing"), [*product((30, 60, 300), (1, 20, 50))])
def test_a_saw_tooth_of_two_steps_hides_no_rise(steps: int, swing: int) -> None:
    at = np.arange(steps)
    found = grow(points(1e9 + 141 * KIB * at + swing * MIB * (at % 2)), CPU)
    assert found.state == "growing"
    assert found.rate == pytest.approx(141 * KIB, rel=0.02)


@pytest.mark.parametrize("part", [0.3, 0.4, 0.55, 0.7, 0.9])
@pytest.mark.parametrize(("steps", "read"), [(40, 1.0), (300, 1.0), (300, 0.3)])
def test_a_list_that_is_emptied_once_or_a_few_times_is_never_growing(
    steps: int, read: float, part: float
) -> None:
    """Also not if readings become slow, and so rare, before each time."""
    at = np.arange(float(steps))
    noise = np.random.default_rng(steps).normal(0, 8 * KIB, steps)
    values = 1024 * MIB + 128 * KIB * (at % (part * steps)) + noise
    known = at % (part * steps) < read * part * steps
    assert grow(Points(at[known], values[known], values[known])).state != "growing"


@pytest.mark.parametrize("steps", [12, 20, 30, 300, 3000])
@pytest.mark.parametrize("rate", [128 * KIB, MIB])
def test_steady_growth(steps: int, rate: int) -> None:
    found = grow(points(1e10 + rate * np.arange(steps) + noise(100, steps)), CPU)
    assert (found.state, found.shape) == ("growing", "steady")
    assert found.low <= rate <= found.high
    assert found.rate == pytest.approx(rate, rel=0.01) == pytest.approx(found.recent, rel=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_steady_growth_that_is_read_in_bursts(seed: int) -> None:
    """A slow counter is not read for a while, which no rise between two readings may be taken for."""
    drawn, rate = np.random.default_rng(seed), 16 * KIB
    gaps = np.where(drawn.random(100) < 0.04, drawn.integers(20, 500, 100), 1)
    at = np.cumsum([1, *gaps]).astype(np.float64)
    values = MIB + rate * at + noise(KIB, len(at), seed)
    growth = grow(Points(at, values, values), CPU)
    assert growth.state == "growing" and growth.rate == pytest.approx(rate, rel=0.05)


def test_several_rises_between_two_readings_are_no_jump() -> None:
    """1 MiB comes at every 20th step, and 85 steps are not read."""
    at = np.array([step for step in range(1, 400) if not 240 < step < 325], dtype=np.float64)
    values = MIB * (at // 20)
    growth = grow(Points(at, values, values), CPU)
    assert growth.jumps == () and growth.rate == pytest.approx(MIB / 20, rel=0.05)
    assert growth.state == "growing" and growth.low > 0.3 * growth.rate


def test_too_few_readings() -> None:
    assert grow(points(MIB * STEP[:11]), CPU).state == "too_short"
    assert detection_limit(points(MIB * STEP[:11]), CPU) is None
    assert grow(points(MIB * STEP[:12]), CPU).state == "growing"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("steps", [24, 60, 300, 3000])
def test_one_or_two_jumps_are_named(count: int, steps: int) -> None:
    at = np.arange(steps)
    jumps = [(steps // 3, 40 * MIB), (2 * steps // 3, 55 * MIB)][:count]
    found = grow(points(1e9 + sum((at >= where) * size for where, size in jumps) + noise(KIB, steps)), CPU)
    assert found.state == "flat"
    assert [size for _, size in found.jumps] == pytest.approx([size for _, size in jumps], rel=0.01)
    assert [at for at, _ in found.jumps] == pytest.approx([where for where, _ in jumps], abs=steps / 20 + 1)


def test_three_irregular_rises_are_uncertain() -> None:
    found = grow(points((STEP > 60) * 2.0 * MIB + (STEP > 100) * 3.0 * MIB + (STEP > 210) * 2.5 * MIB), CPU)
    assert found.state == "uncertain"


def test_growth_that_ended_has_a_last_position() -> None:
    found = grow(points(np.minimum(STEP, 120) * 64 * KIB + noise(100)), CPU)
    assert (found.state, found.recent) == ("flat", 0)
    assert found.until == pytest.approx(120, abs=10)
    assert found.rate == pytest.approx(64 * KIB, rel=0.05)


@pytest.mark.parametrize("times", [1.5, 2.0, 3.0])
def test_a_cache_that_fills_more_slowly_is_filling(times: float) -> None:
    found = grow(points(1e9 * (1 - np.exp(-times * STEP / 300)) + noise(100)), CPU)
    assert (found.state, found.shape) == ("filling", "slowing")
    assert found.recent < found.rate


@pytest.mark.parametrize("value", [0, 1 << 40])
@pytest.mark.parametrize("steps", [12, 47, 48, 511, 2000])
def test_a_constant_is_flat(value: int, steps: int) -> None:
    assert grow(points(np.full(steps, float(value))), CUDA) == Growth(
        "flat", onset=grow(points(np.full(steps, float(value))), CUDA).onset
    )


@pytest.mark.parametrize("kind", [*GROWING, *HEALTHY])
def test_a_constant_and_a_factor_change_nothing_else(kind: str) -> None:
    series = draw(kind, 1, longest=1000).points
    here = grow(series, CPU)
    there = grow(Points(series.at, 4 * series.means + 2**36, 4 * series.floors + 2**36), CPU)
    assert there.state == here.state
    assert there.rate == pytest.approx(4 * here.rate, rel=1e-3, abs=10)


# --- detection limit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", QUIET)
@pytest.mark.parametrize(("steps", "most"), [(30, 64 * KIB), (300, 4 * KIB)])
def test_limits_on_recorded_loops(loop: str, steps: int, most: int) -> None:
    recorded = points(np.array(NOISE[loop][: min(steps, len(NOISE[loop]))], dtype=np.float64))
    limit = detection_limit(recorded, CPU)
    assert limit is not None
    assert limit <= most * steps / min(steps, len(NOISE[loop]))
    assert grow(recorded, CPU).state == "flat"


@pytest.mark.parametrize("loop", sorted(NOISE))
@pytest.mark.parametrize("steps", [30, 180])
def test_a_leak_at_the_limit_is_found_with_its_rate(loop: str, steps: int) -> None:
    recorded = points(np.array(NOISE[loop][:steps], dtype=np.float64))
    limit = detection_limit(recorded, CPU)
    assert limit is not None
    found = grow(recorded.plus(limit * recorded.at), CPU)
    assert found.state == "growing"
    assert found.rate == pytest.approx(limit, rel=0.2)


@pytest.mark.parametrize("how", NOISES)
def test_leaks_above_the_limit_are_found_in_other_noise(how: str) -> None:
    chance = np.random.default_rng(3)
    limit = detection_limit(points(50 * KIB * NOISES[how](300, chance)), CPU)
    assert limit is not None
    leaks = (limit * STEP, limit * 30 * (STEP // 30), 2 * limit * np.maximum(0, STEP - 150))
    states = [
        grow(points(50 * KIB * NOISES[how](300, chance) + 1.3 * leak), CPU).state
        for leak in leaks
        for _ in range(10)
    ]
    assert states.count("growing") >= 0.8 * len(states)
    assert states.count("flat") == 0


@pytest.mark.parametrize("rate", [64 * KIB, 5 * MIB])
def test_its_own_growth_does_not_raise_the_limit(rate: int) -> None:
    without = detection_limit(points(noise(20 * KIB)), CPU)
    limit = detection_limit(points(noise(20 * KIB) + rate * STEP), CPU)
    assert without is not None
    assert limit == pytest.approx(without, rel=0.5)


# --- between two positions ----------------------------------------------------------------------------------


def counter(series: Points) -> Counter:
    return Counter("cpu", series, Growth("flat"), CPU)


def test_a_rise_contains_the_true_one() -> None:
    series = points(1e9 + 64 * KIB * STEP + noise(10 * KIB))
    inside = 0
    for start in range(10, 200, 10):
        rise = counter(series).rise(start + 0.5, start + 80)
        inside += abs(rise[0] - 79.5 * 64 * KIB) <= rise[1]
    assert inside >= 18


def test_a_rise_between_two_readings_is_uncertain_by_half() -> None:
    series = points(1e9 + (STEP >= 100) * 1.0 * MIB)
    assert counter(series).rise(50, 150) == (MIB, 0)
    assert counter(series).rise(50, 100.5) == (MIB / 2, MIB / 2)


@pytest.mark.parametrize(("start", "end"), [(60, 50), (-5, 0), (400, 500)])
def test_nothing_is_known_without_readings_between(start: float, end: float) -> None:
    assert counter(points(STEP)).rise(start, end) == (0, float("inf"))


# --- the rough figure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ([1, 3, 5, 2, 5, 5, 3, 5, 5], 2 / 6),  # from the first 1 to the 3 of the last third
        ([9, 9, 1, 2, 9, 9, 9, 9, 4], 3 / 6),
        ([1, 2, 3, 4, 5], None),
        ([1, 1, 2, 2, 3, 3], 2 / 4),
        ([1, 1, 2, 2, 2, 2], 0),
    ],
)
def test_a_floor_rises_from_its_first_low_to_the_first_low_of_the_last_third(
    values: list[int], rate: float | None
) -> None:
    assert floor_rise(list(enumerate(values))) == (None if rate is None else pytest.approx(rate))


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5), st.integers(10, 60))
def test_the_floor_of_a_flat_or_periodic_counter_never_rises(cycle: list[int], length: int) -> None:
    assert floor_rise(list(enumerate(cycle * length))) == 0


def test_readings_at_one_position_have_no_rate() -> None:
    assert floor_rise([(7, value) for value in range(9)]) == 0
