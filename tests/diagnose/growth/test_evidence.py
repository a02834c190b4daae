"""Evidence of a record is that of the run which wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtriage.diagnose.growth.evidence import ENOUGH_MARKS, WARM_UP, Comparison, Evidence
from memtriage.diagnose.growth.judgment import judge
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen, Readings, Role, Situation
from memtriage.model.position import TrainingPosition
from support.observed import data, held, observed, position

MIB = 1024**2
LENGTHS = st.integers(10, 400) | st.integers(401, 5000)


def stored(lines: list[Readings]) -> list[Readings]:
    """The lines as a record returns them."""
    return msgspec.json.decode(msgspec.json.encode(lines), type=list[Readings])


def random_values(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 40, length).tolist()


def both(values: Sequence[int], writes: set[int], *, last: bool) -> tuple[Comparison, Comparison]:
    """A comparison that was fed live, and one made from the lines that it wrote after some readings."""
    live, lines = Evidence(), list[Readings]()
    comparison = live.run["step"]
    for at, value in enumerate(values, 1):
        comparison.read(at, {"cpu": value})
        if at in writes:
            lines += comparison.new_readings()
    if last:
        lines += comparison.new_readings(last=True)
    return comparison, Evidence.of(stored(lines)).run["step"]


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sets(st.integers(1, 5000), max_size=30))
@example(length=4096, seed=0, writes=set())  # the block that is being filled comes after as many as are kept
def test_readings_are_those_of_the_run_whenever_they_were_written(
    length: int, seed: int, writes: set[int]
) -> None:
    live, again = both(random_values(length, seed), writes, last=True)
    expected, points = live.tracks["cpu"].points(), again.tracks["cpu"].points()
    assert np.array_equal(points.floors, expected.floors)
    assert np.allclose(points.at, expected.at, rtol=0, atol=0.002)
    assert np.allclose(points.means, expected.means, rtol=0, atol=2)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sets(st.integers(1, 5000), min_size=1, max_size=30))
def test_a_killed_run_has_all_whole_blocks_up_to_its_last_line(
    length: int, seed: int, writes: set[int]
) -> None:
    written = max((at for at in writes if at <= length), default=0)
    values = random_values(length, seed)
    _, again = both(values, writes, last=False)
    if written <= WARM_UP:
        assert not again.tracks
        return
    points = again.tracks["cpu"].points()
    whole = both(values[:written], {written}, last=False)[1].tracks["cpu"].points()
    assert np.array_equal(points.floors, whole.floors)
    assert np.allclose(points.at, whole.at, rtol=0, atol=0.002)


def test_a_reading_is_written_once() -> None:
    comparison = Evidence().run["step"]
    for at in range(1, 21):
        comparison.read(at, {"cpu": at})
    (line,) = comparison.new_readings()
    assert (line.at, line.means, line.width) == ([*range(WARM_UP + 1, 21)],) * 2 + (1,)
    assert list(comparison.new_readings(last=True)) == []


def test_readings_within_a_step_belong_to_that_step() -> None:
    live = Evidence()
    for microbatch in range(1, 9):
        live.of_step(7).read(microbatch, {"cpu": MIB * microbatch})
    again = Evidence.of(stored(list(live.of_step(7).new_readings(last=True))))
    assert list(again.steps) == [7]
    assert again.steps[7].tracks["cpu"].points().means.tolist() == [MIB * at for at in range(1, 9)]
    assert not again.run["microbatch"].tracks


# --- censuses -----------------------------------------------------------------------------------------------


def census(at: int, *holders: HolderSeen, gone: Sequence[int] = (), between: bool = True) -> CensusSeen:
    return CensusSeen(position=position(at), holders=list(holders), gone=list(gone), between=between)


def sizes(*censuses: CensusSeen) -> list[list[tuple[float, int]]]:
    """Position and bytes of each holder."""
    comparison = Evidence.of(censuses).run["step"]
    return [[(each.at, each.seen.nbytes) for each in series] for series in comparison.series()]


def test_a_holder_that_a_census_does_not_repeat_is_as_it_was() -> None:
    first, other, grown = held(1, number=1), held(5, number=2), held(3, number=1)
    assert sizes(census(4, first, other), census(8), census(12, grown)) == [
        [(4, 1), (8, 1), (12, 3)],
        [(4, 5), (8, 5), (12, 5)],
    ]


def test_a_holder_that_is_gone_and_comes_back_begins_again() -> None:
    assert sizes(census(4, held(1)), census(8, gone=[1]), census(12, held(9))) == [[(12, 9)]]
    assert sizes(census(4, held(1)), census(8, gone=[1])) == []


def test_a_holder_that_is_gone_at_the_end_keeps_its_earlier_sizes() -> None:
    """Functions have returned: it shows nothing."""
    censuses = census(4, held(1)), census(8, held(2)), census(9, gone=[1], between=False)
    assert sizes(*censuses) == [[(4, 1), (8, 2)]]


def test_a_census_of_a_part_shows_only_what_it_lists() -> None:
    own, other = held(1, number=1), held(5, number=2)
    part = CensusSeen(position=position(8), partial=True, holders=[held(3, number=1)])
    whole = census(12, held(4, number=1), held(9, number=2))
    assert sizes(census(4, own, other), part, whole) == [[(4, 1), (8, 3), (12, 4)], [(4, 5), (12, 9)]]
    empty = CensusSeen(position=position(8), partial=True, gone=[1])
    assert sizes(census(4, own, other), empty, census(12)) == [[(4, 5), (12, 5)]]


def test_of_two_censuses_at_one_position_the_later_counts() -> None:
    assert sizes(census(4, held(1)), census(8, held(2)), census(8, held(3))) == [[(4, 1), (8, 3)]]


def test_a_census_at_the_position_of_the_last_one_ends_no_series_of_ordinary_data() -> None:
    lines = [CensusSeen(position=position(at), data=[data(10 * at, 100)]) for at in (4, 8, 12)]
    (series,) = Evidence.of([*lines[:2], census(8), lines[2]]).run["step"].series()
    assert [(each.at, each.seen.entries) for each in series] == [(4, 40), (8, 80), (12, 120)]


def test_ordinary_data_begins_with_what_it_had_before_it_was_followed() -> None:
    lines = [
        census(4),
        CensusSeen(position=position(8), data=[data(80, 100, before=40)]),
        CensusSeen(position=position(12), data=[data(120, 100, before=80)]),
    ]
    (series,) = Evidence.of(lines).run["step"].series()
    assert [(each.at, each.seen.entries) for each in series] == [(4, 40), (8, 80), (12, 120)]
    lines.append(census(16))
    assert Evidence.of(lines).run["step"].series() == []


def test_a_census_of_the_run_counts_on_all_scales_and_one_within_a_step_only_there() -> None:
    at = TrainingPosition(step=3, microbatch=2, backwards=14, time_s=9.0)
    evidence = Evidence.of(
        [CensusSeen(position=at, work_s=8.0), CensusSeen(position=at, within_step=True, work_s=8.5)]
    )
    assert {scale: each.positions for scale, each in evidence.run.items()} == {
        "step": [3],
        "microbatch": [14],
        "second": [8.0],
    }
    assert [(step, of.positions) for step, of in evidence.steps.items()] == [(3, [2])]


def test_series_are_those_of_the_run_after_a_record() -> None:
    rng = np.random.default_rng(3)
    found = {
        at: [held(rng.integers(1, 99), number=int(number)) for number in rng.choice(9, 5, replace=False)]
        + [data(at, 10, number=2)]
        for at in range(1, 30)
    }
    live = observed({"cpu": [MIB] * 30}, found.__getitem__, range(1, 30))
    lines = live.run["step"].censuses
    again = Evidence.of(msgspec.json.decode(msgspec.json.encode(lines), type=list[CensusSeen])).run["step"]
    assert again.series() == live.run["step"].series()
    assert {type(series[0].seen) for series in again.series()} == {HolderSeen, DataSeen}


# --- the scale to judge on ----------------------------------------------------------------------------------


def read(evidence: Evidence, scale: str, count: int) -> None:
    for at in range(1, count + 1):
        evidence.run[scale].read(at, {"cpu": MIB})  # type: ignore[index]


def test_growth_is_judged_over_steps_if_there_are_any() -> None:
    evidence = Evidence()
    read(evidence, "second", 40)
    read(evidence, "microbatch", ENOUGH_MARKS - 1)
    assert evidence.main.scale == evidence.judged_on.scale == "second"
    read(evidence, "microbatch", ENOUGH_MARKS)
    assert evidence.main.scale == "microbatch"
    read(evidence, "step", 2)
    assert (evidence.main.scale, evidence.judged_on.scale) == ("step", "microbatch")
    read(evidence, "step", ENOUGH_MARKS)
    assert evidence.judged_on.scale == "step"


def test_a_loop_that_was_seen_after_all_censuses_but_one_is_judged_over_time() -> None:
    role = Evidence(Role(role="rank 0", where="child"))
    for at in range(40):
        role.run["second"].read(float(at), {"cpu": at * MIB})
        if at >= 20:
            role.run["step"].read(at, {"cpu": at * MIB})
    for at in (15, 20, 25):
        assert role.main.scale == ("second" if at == 25 else "step")
        role.add(CensusSeen(position=TrainingPosition(time_s=at, step=at * (at > 20)), work_s=at))
    role.add(CensusSeen(position=TrainingPosition(time_s=30, step=30), work_s=30))
    assert role.main.scale == "step"


@pytest.mark.parametrize("seed", range(20))
def test_what_grows_from_call_to_call_is_certain_at_any_pace(seed: int) -> None:
    """8 KiB at each call of a model, and now few calls between two readings, now many."""
    comparison = Comparison("second")
    total = np.cumsum(np.random.default_rng(seed).choice([2, 5, 20, 80, 200], 40)).tolist()
    for at, number in enumerate(total, 1):
        comparison.read(at, {"cpu": MIB + 8192 * number, "call": number})
    growth = comparison.counters["cpu"].growth
    grown = 8192 * (total[-1] - total[WARM_UP]) / (len(total) - WARM_UP - 1)
    assert (growth.state, growth.rate) == ("growing", pytest.approx(grown, rel=0.01))


def test_the_limit_of_few_long_steps_is_for_a_step() -> None:
    def limit(steps: int) -> int:
        evidence = Evidence()
        read(evidence, "microbatch", 12 * ENOUGH_MARKS)
        read(evidence, "step", steps)
        at = TrainingPosition(
            step=steps, backwards=12 * ENOUGH_MARKS, microbatches_per_step=12 if steps else 0
        )
        evidence.add(Situation(position=at, readable={"cpu": True}))
        found = judge(evidence).judged["cpu"].limit
        assert found is not None and found.per == "step"
        return found.bytes

    assert limit(steps=3) == 12 * limit(steps=0)
