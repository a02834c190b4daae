"""From a directory of trials to their report: figures by variant, against the baseline, targets, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from memtriage.difference.sources import of_run
from memtriage.difference.table import difference
from memtriage.model.difference import Difference
from memtriage.model.findings import Finding
from memtriage.model.trials import (
    AgainstBaseline,
    Failure,
    FailureKind,
    Figure,
    OutputValues,
    TargetRow,
    TrialRow,
    TrialsReport,
    TrialsVerdict,
    VariantRow,
)
from memtriage.model.units import size
from memtriage.prove.command import record_directory
from memtriage.prove.judge import Readings, first_difference, judge
from memtriage.prove.limits import METRICS, TIME
from memtriage.prove.reading import TrialReading, read_trial
from memtriage.prove.schedule import given_up, schedule
from memtriage.prove.state import ComparisonState
from memtriage.prove.statistics import CONFIDENCE, LEAST_TRIALS, median_interval, ratio
from memtriage.prove.trial import LOG, TrialEnd
from memtriage.prove.trials import Trials
from memtriage.store.reader import read_run

Trial = tuple[int, str]
"""Round and variant."""

_LEAST_FOR_CONFIDENCE: Final = 6
"""Trials from which on an interval of order statistics reaches `CONFIDENCE`: 1 - 2 x 0.5^6 = 97 %."""
_ALIKE_SHARE: Final = 0.10
"""Difference of a rank from the others' median, as a share of it, up to which they are alike."""
_ALIKE_BYTES: Final = 64 << 20
"""The same in bytes, whatever the share."""


def make_report(trials: Trials, state: ComparisonState) -> TrialsReport:
    """Read all that has run so far and judge it."""
    ends = state.ends()
    read: dict[str, dict[int, TrialReading]] = {name: {} for name in trials.names}
    for (number, name), end in ends.items():
        if end.outcome == "finished":
            read[name][number] = read_trial(trials, state.folder(name, number))
    readings: Readings = {
        name: {number: trial for number, trial in by_number.items() if trial.problem is None}
        for name, by_number in read.items()
    }
    failed = {
        (number, name): end.outcome != "finished" or read[name][number].problem is not None
        for (number, name), end in ends.items()
    }
    to_come = pending(trials, failed)
    rows = [_variant_row(trials, state, name, ends, read[name], readings, to_come) for name in trials.names]
    unknown = {
        name: _why_unknown(read[name], [variant for _, variant in to_come], name) for name in trials.names
    }
    targets = [
        judge(target, readings, trials.dimensions[target.metric], unknown[target.variant])
        for target in trials.targets
    ]
    return TrialsReport(
        verdict=_verdict(targets),
        name=trials.name,
        directory=str(state.directory),
        baseline=trials.baseline,
        mark=trials.mark,
        step=trials.step,
        warmup=trials.warmup,
        repeats=trials.repeats,
        ranks=trials.ranks,
        complete=not to_come,
        device="cuda"
        if any(trial.cuda for by_number in read.values() for trial in by_number.values())
        else "cpu",
        variants=rows,
        targets=targets,
        notes=_notes(trials, readings, ends, len(to_come)),
    )


def pending(trials: Trials, ended: Mapping[Trial, bool]) -> list[Trial]:
    """Return the trials that are still to run, in order: without those of variants that were given up.

    There are none if all variants have failed whenever they ran.

    Args:
        ended: for each trial that ended, whether it failed.
    """
    by_name: dict[str, dict[int, bool]] = {name: {} for name in trials.names}
    for (number, name), failed in ended.items():
        by_name[name][number] = failed
    if len(by_name) > 1 and all(rounds and all(rounds.values()) for rounds in by_name.values()):
        return []  # it is the script that fails
    gone = {name for name in trials.names if given_up(by_name[name], trials.give_up_after)}
    return [
        turn for turn in schedule(trials.names, trials.repeats) if turn not in ended and turn[1] not in gone
    ]


def _why_unknown(read: Mapping[int, TrialReading], to_come: Sequence[str], name: str) -> str | None:
    """Return why a variant without figures has missed nothing: it may still run, or ran without marks."""
    if read:
        return "its trials ran to their end, but brought no figures: see below"
    return "none of its trials has run yet" if name in to_come else None


def _verdict(targets: Sequence[TargetRow]) -> TrialsVerdict:
    verdicts = {target.verdict for target in targets}
    if not verdicts:
        return "no_targets"
    return "missed" if "missed" in verdicts else "undecided" if "undecided" in verdicts else "met"


# Variants


def _variant_row(
    trials: Trials,
    state: ComparisonState,
    name: str,
    ends: Mapping[Trial, TrialEnd],
    read: Mapping[int, TrialReading],
    readings: Readings,
    to_come: Sequence[Trial],
) -> VariantRow:
    own = readings[name]
    ended = {number: end for (number, variant), end in ends.items() if variant == name}
    still = sum(variant == name for _, variant in to_come)
    figures = {metric: _figure(metric, name, trials.baseline, readings) for metric in trials.dimensions}
    return VariantRow(
        name=name,
        baseline=name == trials.baseline,
        planned=trials.repeats,
        finished=len(own),
        pending=still,
        skipped=trials.repeats - len(ended) - still,
        steps=sum(len(trial.steps) for trial in own.values()),
        figures={metric: figure for metric, figure in figures.items() if figure is not None},
        values={value: _values(value, name, trials.baseline, readings) for value in trials.values},
        trials=[_trial_row(trials, ended[number], trial) for number, trial in own.items()],
        failures=_failure_rows(state, ended, read),
        findings=_findings(own),
        difference=_difference(state, name, trials.baseline, readings),
    )


def _difference(state: ComparisonState, name: str, baseline: str, readings: Readings) -> Difference | None:
    both = sorted(readings[name].keys() & readings[baseline].keys())
    if name == baseline or not both:
        return None
    folders = {each: record_directory(state.folder(each, both[0])) for each in (baseline, name)}
    before, after = (of_run(read_run([folder]).ranks, each) for each, folder in folders.items())
    return difference(before, after)


def _figure(metric: str, name: str, baseline: str, readings: Readings) -> Figure | None:
    figures = (trial.figure(metric) for trial in readings[name].values())
    values = [figure for figure in figures if figure is not None]
    if not values:
        return None
    by_rank = _by_rank(metric, list(readings[name].values()))
    return Figure(
        value=median(values),
        lowest=min(values),
        highest=max(values),
        spread=median_interval(values),
        by_rank=by_rank,
        differing_ranks=_differing(by_rank),
        against_baseline=None if name == baseline else _against(metric, name, baseline, readings),
    )


def _by_rank(metric: str, trials: Sequence[TrialReading]) -> dict[int, float]:
    if METRICS.get(metric) != "bytes":
        return {}
    figures: dict[int, list[float]] = {}
    for trial in trials:
        for rank in trial.ranks:
            value = rank.figure(metric)
            if value is not None:
                figures.setdefault(rank.rank, []).append(value)
    return {rank: median(values) for rank, values in sorted(figures.items())}


def _differing(by_rank: Mapping[int, float]) -> list[int]:
    """Return the ranks far from the median of the others; of two ranks the higher."""
    differing = []
    for rank, value in by_rank.items():
        others = [other for number, other in by_rank.items() if number != rank]
        if not others:
            continue
        usual = median(others)
        if abs(value - usual) > max(_ALIKE_BYTES, _ALIKE_SHARE * abs(usual)):
            differing.append(rank)
    if len(by_rank) == 2 and differing:
        return [max(by_rank, key=lambda rank: by_rank[rank])]
    # Half the ranks on either side are two groups, and none of them stands out.
    return differing if 2 * len(differing) < len(by_rank) else []


def _against(metric: str, name: str, baseline: str, readings: Readings) -> AgainstBaseline | None:
    both = [number for number in readings[name] if number in readings[baseline]]
    own = [_measurements(metric, readings[name][number]) for number in both]
    other = [_measurements(metric, readings[baseline][number]) for number in both]
    pairs = [(mine, theirs) for mine, theirs in zip(own, other, strict=True) if mine and theirs]
    estimate = ratio([mine for mine, _ in pairs], [theirs for _, theirs in pairs])
    if estimate is None:
        return None
    value, interval = estimate
    within = None if interval is None else interval.low <= 1.0 <= interval.high
    return AgainstBaseline(ratio=value, spread=interval, within_noise=within)


def _measurements(metric: str, trial: TrialReading) -> list[float]:
    if metric == TIME:
        return trial.steps
    figure = trial.figure(metric)
    return [] if figure is None else [figure]


def _values(value: str, name: str, baseline: str, readings: Readings) -> OutputValues:
    courses = [trial.values[value] for trial in readings[name].values()]
    expected = [trial.values[value] for trial in readings[baseline].values()]
    first = courses[0] if courses else []
    differences: list[int | None] = []
    if name != baseline and expected and expected[0]:
        differences = [first_difference(course, expected[0]) for course in courses]
    return OutputValues(
        count=len(first),
        first=first[0] if first else None,
        last=first[-1] if first else None,
        same_in_all_trials=None if len(courses) < 2 else all(course == first for course in courses),
        same_as_baseline=None if not differences else all(place is None for place in differences),
        first_difference=min((place for place in differences if place is not None), default=None),
    )


def _trial_row(trials: Trials, end: TrialEnd, trial: TrialReading) -> TrialRow:
    order = [name for number, name in schedule(trials.names, trials.repeats) if number == end.round]
    return TrialRow(
        round=end.round,
        place=order.index(end.variant),
        seconds=end.seconds,
        host=end.host,
        devices=end.devices,
        steps=trial.steps,
        allocated=_highest_rank(trial, "allocated"),
        reserved=_highest_rank(trial, "reserved"),
    )


def _highest_rank(trial: TrialReading, metric: str) -> list[int | None]:
    columns = zip(*(rank.at_mark[metric] for rank in trial.ranks), strict=False)
    return [max((value for value in column if value is not None), default=None) for column in columns]


def _failure_rows(
    state: ComparisonState, ended: Mapping[int, TrialEnd], read: Mapping[int, TrialReading]
) -> list[Failure]:
    """Return what went wrong, like with like."""
    rounds_by_failure: dict[tuple[FailureKind, str], list[int]] = {}
    for number, end in ended.items():
        if end.outcome != "finished":
            rounds_by_failure.setdefault((end.outcome, end.error or ""), []).append(number)
        elif read[number].problem is not None:
            rounds_by_failure.setdefault(("no_figures", read[number].problem or ""), []).append(number)
    return [
        Failure(
            kind=kind,
            rounds=rounds,
            error=error,
            log=str(state.folder(ended[rounds[0]].variant, rounds[0]) / LOG),
        )
        for (kind, error), rounds in rounds_by_failure.items()
    ]


def _findings(trials: Mapping[int, TrialReading]) -> list[str]:
    lines = (_finding(finding) for trial in trials.values() for finding in trial.findings)
    return list(dict.fromkeys(lines))


def _finding(finding: Finding) -> str:
    holder = f", kept alive by {finding.holder}" if finding.holder else ""
    if finding.bytes_per_step is not None:
        return f"{finding.kind} on {finding.device}: {size(finding.bytes_per_step)} per step{holder}"
    return f"{finding.kind} on {finding.device}: {size(finding.bytes)}{holder}"


# Notes


def _notes(trials: Trials, readings: Readings, ends: Mapping[Trial, TrialEnd], to_come: int) -> list[str]:
    notes = []
    if to_come:
        notes.append(
            f"{to_come} of {trials.repeats * len(trials.names)} trials are still to come: run the "
            "same command again to continue"
        )
    rounds = min((len(reading) for reading in readings.values() if reading), default=0)
    if 0 < rounds < LEAST_TRIALS:
        notes.append(
            f"with fewer than {LEAST_TRIALS} trials per variant, the intervals of ratios are over steps and "
            "leave out differences between processes"
        )
    elif 0 < rounds < _LEAST_FOR_CONFIDENCE:
        notes.append(
            f"intervals from {rounds} trials are the lowest and the highest, with "
            f"{100 * (1 - 2 * 0.5**rounds):.0f} % confidence; {100 * CONFIDENCE:.0f} % takes at least "
            f"{_LEAST_FOR_CONFIDENCE} trials"
        )
    notes += _differing_places(readings, ends)
    return notes


def _differing_places(readings: Readings, ends: Mapping[Trial, TrialEnd]) -> list[str]:
    """Say where trials ran under different conditions, which are in every difference between them then."""
    notes = []
    torches = sorted(
        {trial.torch for reading in readings.values() for trial in reading.values() if trial.torch}
    )
    hosts = sorted({end.host for end in ends.values()})
    devices = sorted({end.devices for end in ends.values() if end.devices is not None})
    if len(torches) > 1:
        notes.append(f"trials ran with different versions of torch: {', '.join(torches)}")
    if len(hosts) > 1:
        notes.append(
            f"times come from different machines ({', '.join(hosts)}): their differences are in them"
        )
    if len(devices) > 1:
        notes.append(
            f"times come from different devices (CUDA_VISIBLE_DEVICES {' | '.join(devices)}): differences "
            f"between devices are in them"
        )
    return notes
