"""Targets: met, missed, or not to be decided from what was measured."""

from collections.abc import Sequence

import pytest

from memtriage.model.trials import TargetRow
from memtriage.prove.judge import judge
from memtriage.prove.limits import METRICS, parse_limit
from memtriage.prove.reading import RankReading, TrialReading
from memtriage.prove.trials import Sense, Target

MIB = 1024**2
NAMES = ["base", "new"]
DIMENSIONS = {**METRICS, "loss": "number"}


def timed(*steps: float, loss: Sequence[str] = ("1.0",)) -> TrialReading:
    return TrialReading(ranks=[RankReading(rank=0, steps=list(steps))], values={"loss": list(loss)})


def sized(*ranks: Sequence[tuple[int | None, int]], peak: int = 0) -> TrialReading:
    return TrialReading(
        ranks=[
            RankReading(
                rank=number,
                steps=[1.0],
                at_mark={
                    "allocated": [None if one is None else one * MIB for one, _ in readings],
                    "reserved": [other * MIB for _, other in readings],
                },
                peaks={"peak_reserved": peak * MIB},
            )
            for number, readings in enumerate(ranks)
        ]
    )


def verdict(
    metric: str,
    limit: str,
    new: Sequence[TrialReading],
    base: Sequence[TrialReading] = (),
    *,
    sense: Sense = "at_most",
    unknown: str | None = None,
) -> TargetRow:
    target = Target(metric, "new", sense, parse_limit(limit, metric, NAMES, DIMENSIONS))
    readings = {"new": dict(enumerate(new)), "base": dict(enumerate(base))}
    return judge(target, readings, DIMENSIONS[metric], unknown)


def test_a_time_is_met_when_the_whole_interval_is() -> None:
    base = [timed(value) for value in (1.0, 1.1, 0.9, 1.0, 1.05)]
    new = [timed(1.005 * trial.steps[0]) for trial in base]
    row = verdict("time_per_step", "1.01 x base", new, base)
    assert row.verdict == "met"
    assert row.value == pytest.approx(1.005)
    assert row.limit == pytest.approx(1.01)
    assert row.spread is not None
    assert row.spread.high == pytest.approx(1.005 / 1.01)
    assert "94 %" in row.why


def test_a_time_is_missed_when_the_whole_interval_is_beyond() -> None:
    base = [timed(value) for value in (1.0, 1.1, 0.9, 1.0, 1.05)]
    new = [timed(1.02 * trial.steps[0]) for trial in base]
    assert verdict("time_per_step", "1.01 x base", new, base).verdict == "missed"
    assert verdict("time_per_step", "1.01 x base", new, base, sense="at_least").verdict == "met"


def test_noise_around_the_limit_decides_nothing() -> None:
    base = [timed(1.0)] * 5
    new = [timed(value) for value in (0.98, 1.0, 1.005, 1.02, 1.03)]
    row = verdict("time_per_step", "1.01 x base", new, base)
    assert row.verdict == "undecided"
    assert "within the limit, but the interval contains both" in row.why


def test_few_trials_are_judged_by_their_steps() -> None:
    base, new = [timed(1.0, 1.01, 0.99, 1.0, 1.0)], [timed(1.1, 1.11, 1.09, 1.1, 1.1)]
    row = verdict("time_per_step", "1.01 x base", new, base)
    assert row.verdict == "missed"
    assert "steps of 1 round" in row.why
    assert verdict("time_per_step", "1.2 x base", new, base).verdict == "met"
    assert verdict("time_per_step", "2 s", new).verdict == "met"
    assert verdict("time_per_step", "2 s", [timed(1.0)]).verdict == "undecided"


def test_only_rounds_that_both_finished_count() -> None:
    row = judge(
        Target("time_per_step", "new", "at_most", parse_limit("base", "time_per_step", NAMES, DIMENSIONS)),
        {"new": {0: timed(9.0), 1: timed(1.0)}, "base": {2: timed(1.0)}},
        "seconds",
    )
    assert (row.verdict, row.value) == ("undecided", None)


def test_sizes_must_hold_at_every_reading_of_every_rank() -> None:
    fits = sized([(100, 150), (200, 310)], [(100, 200), (10, 100)])
    row = verdict("reserved", "1.1 x allocated + 100 MiB", [fits, fits])
    assert row.verdict == "met"
    assert "8 readings" in row.why
    assert row.value is not None and row.limit is not None
    # The reading nearest to its limit is shown, with the limit of the same instant.
    assert (row.value / MIB, row.limit / MIB) == (310, pytest.approx(320))
    exceeds = sized([(100, 150), (200, 310)], [(100, 200), (10, 112)])
    row = verdict("reserved", "1.1 x allocated + 100 MiB", [fits, exceeds])
    assert row.verdict == "missed"
    assert "1 of 8 readings" in row.why
    assert "rank 1, round 2" in row.why


def test_the_worst_reading_below_a_least_size_is_named() -> None:
    row = verdict("reserved", "100 MiB", [sized([(1, 150), (1, 90)], [(1, 95)])], sense="at_least")
    assert (row.verdict, row.value, row.limit) == ("missed", 90 * MIB, 100 * MIB)
    assert row.why == "does not hold at 2 of 3 readings, by 10.0 MiB at worst (rank 0, round 1)"
    row = verdict("reserved", "100 MiB", [sized([(1, 150), (1, 100)])], sense="at_least")
    assert (row.verdict, row.value, row.why) == ("met", 100 * MIB, "holds at all 2 readings")


def test_another_variants_size_is_that_of_the_same_rank() -> None:
    base = [sized([(100, 0)], [(300, 0)]), sized([(102, 0)], [(302, 0)])]
    assert verdict("allocated", "base", [sized([(101, 0)], [(301, 0)])], base).verdict == "met"
    row = verdict("allocated", "base", [sized([(250, 0)], [(260, 0)])], base)
    assert row.verdict == "missed"
    assert "rank 0" in row.why


def test_peaks_are_one_reading_a_trial() -> None:
    row = verdict("peak_reserved", "1.5 x allocated", [sized([(100, 0), (90, 0)], peak=150)])
    assert row.verdict == "met"
    assert "1 reading" in row.why
    assert verdict("peak_reserved", "1.4 x allocated", [sized([(100, 0)], peak=150)]).verdict == "missed"


def test_sizes_that_were_not_read_decide_nothing() -> None:
    assert verdict("allocated", "1 GiB", [sized([(None, 1)])]).verdict == "undecided"
    assert verdict(
        "requested", "1 GiB", [TrialReading(ranks=[RankReading(0, at_mark={"requested": []})])]
    ).verdict == ("undecided")


def test_a_variant_without_figures_misses_unless_it_may_still_run() -> None:
    assert verdict("reserved", "1 GiB", []).verdict == "missed"
    row = verdict("reserved", "1 GiB", [], unknown="none of its trials has run yet")
    assert (row.verdict, row.why) == ("undecided", "none of its trials has run yet")
    row = verdict("time_per_step", "base", [timed(1.0)], [])
    assert row.verdict == "undecided"
    assert "'base'" in row.why


def test_values_against_an_amount() -> None:
    assert verdict("loss", "1.5", [timed(1.0, loss=["3", "1.25"])]).verdict == "met"
    assert verdict("loss", "1.5", [timed(1.0, loss=["3", "1.75"])]).verdict == "missed"
    mixed = [timed(1.0, loss=["1"]), timed(1.0, loss=["2"])]
    assert verdict("loss", "1.5", mixed).verdict == "undecided"
    assert verdict("loss", "1.5", [timed(1.0, loss=[])]).verdict == "undecided"


@pytest.mark.parametrize(("new", "expected"), [("-1", "met"), ("0", "met"), ("1", "missed")])
def test_values_against_zero_are_compared_by_their_difference(new: str, expected: str) -> None:
    row = verdict("loss", "base", [timed(1.0, loss=[new])], [timed(1.0, loss=["0"])])
    assert (row.verdict, row.value, row.limit, row.spread) == (expected, float(new), 0.0, None)


@pytest.mark.parametrize(
    ("new", "expected"), [("-3", "met"), ("-2", "met"), ("-1", "missed"), ("1", "missed")]
)
def test_values_below_zero_are_compared_by_their_difference(new: str, expected: str) -> None:
    row = verdict("loss", "base", [timed(1.0, loss=[new])], [timed(1.0, loss=["-2"])])
    assert (row.verdict, row.spread) == (expected, None)
    assert row.why == ("holds in the only trial" if expected == "met" else "exceeded in the only trial")


def test_trials_that_agree_are_counted() -> None:
    assert verdict("loss", "1.5", [timed(1.0, loss=["1"])] * 2).why == "holds in each of 2 trials"
    mixed = [timed(1.0, loss=["1"]), timed(1.0, loss=["2.5"])]
    assert "the median is beyond the limit" in verdict("loss", "1.5", mixed).why


def equality(new: Sequence[Sequence[str]], base: Sequence[Sequence[str]]) -> TargetRow:
    target = Target("loss", "new", "equals", equals="base")
    return judge(
        target,
        {
            "new": {number: timed(1.0, loss=course) for number, course in enumerate(new)},
            "base": {number: timed(1.0, loss=course) for number, course in enumerate(base)},
        },
        "number",
    )


def test_values_text_for_text() -> None:
    assert equality([["1", "2"], ["1", "2"]], [["1", "2"]]).verdict == "met"
    row = equality([["1", "2"], ["1", "2.0"]], [["1", "2"]])
    assert (row.verdict, row.why) == ("missed", "value 2 is 2.0, not 2 (round 2)")
    assert row.limit_text == "base"
    assert "is nothing, not 2" in equality([["1"]], [["1", "2"]]).why
    assert "is 3, not nothing" in equality([["1", "3"]], [["1"]]).why


def test_a_reference_that_differs_by_itself_decides_nothing() -> None:
    row = equality([["1"]], [["1"], ["2"]])
    assert row.verdict == "undecided"
    assert "differ among themselves" in row.why
    assert equality([["1"]], [[]]).verdict == "undecided"
    assert equality([["1"]], []).verdict == "undecided"
