"""Whether a target is met: times by their interval, sizes at every single reading, values text for text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from msgspec.structs import replace

from memtriage.model.trials import Spread, TargetRow, TargetVerdict
from memtriage.model.units import count, size
from memtriage.prove.limits import AT_MARK, Dimension, Limit, Term
from memtriage.prove.reading import RankReading, TrialReading
from memtriage.prove.statistics import LEAST_TRIALS, paired
from memtriage.prove.trials import Target

Readings = Mapping[str, Mapping[int, TrialReading]]
"""Of each variant the trials that have figures, by round."""

_NOISE: Final = "use more repeats or longer steps"


@dataclass(frozen=True, slots=True)
class _Measured:
    """A measurement and the limit that goes with it: of the same round, step or instant."""

    value: float
    limit: float
    rank: int = 0
    round: int = 0

    @property
    def above(self) -> float:
        return self.value - self.limit


def judge(target: Target, readings: Readings, dimension: Dimension, unknown: str | None = None) -> TargetRow:
    """Return the verdict on a target.

    Args:
        unknown: why it is no fault of the judged variant if it has no figures; None when it is.
    """
    if not readings[target.variant]:
        if unknown is not None:
            return _row(target, "undecided", unknown)
        return _row(target, "missed", f"no trial of {target.variant!r} brought figures")
    if target.equals is not None:
        return _judge_equality(target, readings, target.equals)
    assert target.limit is not None
    for name in target.limit.variants:
        if not readings[name]:
            return _row(target, "undecided", f"no trial of {name!r} brought figures to compare with")
    if dimension == "bytes":
        return _judge_sizes(target, target.limit, readings)
    return _judge_figures(target, target.limit, readings, dimension)


def limit_value(limit: Limit, of: Callable[[Term], float | None]) -> float | None:
    """Return a limit's amount, given what each metric in it amounts to; None when one is unknown."""
    total = 0.0
    for term in limit.terms:
        amount = 1.0 if term.metric is None else of(term)
        if amount is None:
            return None
        total += term.factor * amount
    return total


# Times and values


def _judge_figures(target: Target, limit: Limit, readings: Readings, dimension: Dimension) -> TargetRow:
    rounds = (
        _step_pairs(target, limit, readings) if dimension == "seconds" else _pairs(target, limit, readings)
    )
    pairs = [pair for round_pairs in rounds for pair in round_pairs]
    if not pairs:
        return _row(target, "undecided", f"no round in which all have a figure of {target.metric}")
    # Relative where that can be: a step that does twice the work may be over by twice as much.
    relative = all(pair.limit > 0 for pair in pairs)
    sign = -1.0 if target.sense == "at_least" else 1.0

    def over(pair: _Measured) -> float:
        return pair.value / pair.limit - 1 if relative else pair.above

    estimate = paired([[over(pair) for pair in round_pairs] for round_pairs in rounds])
    assert estimate is not None
    middle, interval = estimate
    if dimension == "number" and len(rounds) < LEAST_TRIALS:  # a value is what it is: nothing is drawn
        each = [over(pair) for pair in pairs]
        interval = Spread(low=min(each), high=max(each), confidence=0.0, basis="trials")
    verdict, why = _by_interval(interval, sign, middle, len(rounds))
    around = None if interval is None or not relative or interval.confidence == 0 else interval
    return _row(
        target,
        verdict,
        why,
        value=median(median(pair.value for pair in round_pairs) for round_pairs in rounds if round_pairs),
        limit=median(median(pair.limit for pair in round_pairs) for round_pairs in rounds if round_pairs),
        spread=None if around is None else replace(around, low=1 + around.low, high=1 + around.high),
    )


def _pairs(target: Target, limit: Limit, readings: Readings) -> list[list[_Measured]]:
    """Return figure and limit of every round in which all that the limit needs was measured."""
    pairs = []
    for number, own in readings[target.variant].items():

        def of(term: Term, number: int = number) -> float | None:
            trial = readings[term.variant or target.variant].get(number)
            return None if trial is None or term.metric is None else trial.figure(term.metric)

        value, bound = own.figure(target.metric), limit_value(limit, of)
        if value is not None and bound is not None:
            pairs.append([_Measured(value, bound)])
    return pairs


def _step_pairs(target: Target, limit: Limit, readings: Readings) -> list[list[_Measured]]:
    """Return, for every such round, time and limit of each step that all completed."""
    names = {term.variant for term in limit.terms if term.variant is not None} | {target.variant}
    rounds = []
    for number in readings[target.variant]:
        trials = {name: readings[name].get(number) for name in names}
        steps = {name: trial.steps for name, trial in trials.items() if trial is not None}
        if len(steps) < len(names):
            continue
        pairs = []
        for place in range(min(map(len, steps.values()))):

            def of(term: Term, steps: Mapping[str, list[float]] = steps, place: int = place) -> float:
                return steps[term.variant or target.variant][place]

            bound = limit_value(limit, of)
            assert bound is not None
            pairs.append(_Measured(steps[target.variant][place], bound))
        rounds.append(pairs)
    return rounds


def _by_interval(
    interval: Spread | None, sign: float, middle: float, rounds: int
) -> tuple[TargetVerdict, str]:
    if interval is None:
        return "undecided", "too few steps for an interval"
    if interval.confidence == 0.0:
        sure = "in the only trial" if rounds == 1 else f"in each of {rounds} trials"
    else:
        of = count(rounds, "round")
        of = of if interval.basis == "trials" else f"the steps of {of}"
        sure = f"with {100 * interval.confidence:.0f} % confidence from {of}"
    worst, best = sorted((sign * interval.low, sign * interval.high), reverse=True)
    if worst <= 0:
        return "met", f"holds {sure}"
    if best > 0:
        return "missed", f"exceeded {sure}"
    side = "within" if sign * middle <= 0 else "beyond"
    return "undecided", f"the median is {side} the limit, but the interval contains both: {_NOISE}"


# Sizes: every reading


def _judge_sizes(target: Target, limit: Limit, readings: Readings) -> TargetRow:
    judged = [
        reading
        for number, trial in readings[target.variant].items()
        for rank in trial.ranks
        for reading in _of_rank(target, limit, rank, number, readings)
    ]
    if not judged:
        return _row(target, "undecided", f"{target.metric} was not read, or what its limit needs")
    sign = -1.0 if target.sense == "at_least" else 1.0
    worst = max(judged, key=lambda reading: sign * reading.above)
    failing = sum(sign * reading.above > 0 for reading in judged)
    readings_of = count(len(judged), "reading")
    if not failing:
        return _row(target, "met", f"holds at all {readings_of}", value=worst.value, limit=worst.limit)
    where = f"rank {worst.rank}, round {worst.round + 1}"
    by = f"by {size(abs(worst.above))} at worst ({where})"
    why = f"does not hold at {failing} of {readings_of}, {by}"
    return _row(target, "missed", why, value=worst.value, limit=worst.limit)


def _of_rank(
    target: Target, limit: Limit, rank: RankReading, number: int, readings: Readings
) -> list[_Measured]:
    """Return a rank's readings of the metric: one a mark for counters at the mark, one a trial for peaks."""
    if target.metric in AT_MARK:
        values: Sequence[float | None] = rank.at_mark[target.metric]
    else:
        values = [rank.figure(target.metric)]
    judged = []
    for place, value in enumerate(values):

        def of(term: Term, place: int = place) -> float | None:
            assert term.metric is not None
            if term.variant is not None and term.variant != target.variant:
                return _usual(readings[term.variant], term.metric, rank.rank)
            if target.metric in AT_MARK and term.metric in AT_MARK:
                return rank.at_mark[term.metric][place]
            return rank.figure(term.metric)

        bound = limit_value(limit, of)
        if value is not None and bound is not None:
            judged.append(_Measured(value, bound, rank.rank, number))
    return judged


def _usual(trials: Mapping[int, TrialReading], metric: str, rank: int) -> float | None:
    """Return a metric's figure on a rank, the median over the trials."""
    known = [
        value
        for trial in trials.values()
        for reading in trial.ranks
        if reading.rank == rank and (value := reading.figure(metric)) is not None
    ]
    return median(known) if known else None


# Values: text for text


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Return the place of the first value that differs or is missing; None when there is none."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _judge_equality(target: Target, readings: Readings, other: str) -> TargetRow:
    if not readings[other]:
        return _row(target, "undecided", f"no trial of {other!r} brought figures to compare with")
    expected = [trial.values[target.metric] for trial in readings[other].values()]
    if not expected[0]:
        return _row(target, "undecided", f"{other!r} printed no {target.metric}")
    if any(course != expected[0] for course in expected):
        return _row(target, "undecided", f"the trials of {other!r} differ among themselves")
    for number, trial in readings[target.variant].items():
        course = trial.values[target.metric]
        place = first_difference(course, expected[0])
        if place is not None:
            mine = course[place] if place < len(course) else "nothing"
            theirs = expected[0][place] if place < len(expected[0]) else "nothing"
            why = f"value {place + 1} is {mine}, not {theirs} (round {number + 1})"
            return _row(target, "missed", why)
    trials = count(len(readings[target.variant]), "trial")
    return _row(target, "met", f"all values are the same in {trials}, {len(expected[0])} in each")


def _row(
    target: Target,
    verdict: TargetVerdict,
    why: str,
    *,
    value: float | None = None,
    limit: float | None = None,
    spread: Spread | None = None,
) -> TargetRow:
    return TargetRow(
        metric=target.metric,
        variant=target.variant,
        sense=target.sense,
        limit_text=target.limit.text if target.limit is not None else target.equals or "",
        verdict=verdict,
        value=value,
        limit=limit,
        spread=spread,
        why=why,
    )
