"""What a finished trial's records and log say: times of steps, counters at a mark, peaks, values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from memtriage.diagnose.ranks.merge import merge
from memtriage.model.findings import Finding
from memtriage.model.marks import Mark
from memtriage.model.units import count
from memtriage.prove.command import record_directory
from memtriage.prove.limits import AT_MARK, TIME
from memtriage.prove.table import STEP_MARK
from memtriage.prove.trial import LOG
from memtriage.prove.trials import Trials
from memtriage.store.locate import RecordError
from memtriage.store.reader import RankRecord, read_run

_RANK_TAG: Final = re.compile(r"\[[A-Za-z_]*(\d+)\]:")
"""Before each line that torchrun tees: `[default0]:`."""
_NAMES_TOLD: Final = 8


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank of a trial. Sizes in bytes.

    Attributes:
        rank: its number.
        steps: seconds of each step after the warm-up, without those in which a rank took a census.
        at_mark: for each metric its value at every occurrence of the mark after the warm-up; None where that
            counter was not read.
        peaks: highest values over the whole trial, by metric; None where unknown.
    """

    rank: int
    steps: list[float] = field(default_factory=list)
    at_mark: dict[str, list[int | None]] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)

    def figure(self, metric: str) -> float | None:
        """Return a metric's figure of this rank: of a counter the highest after the warm-up."""
        if metric in self.peaks:
            return self.peaks[metric]
        known = [value for value in self.at_mark.get(metric, []) if value is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class TrialReading:
    """All that a trial says.

    Attributes:
        ranks: by number.
        values: the course of each figure that was read from the output, text for text.
        findings: what `memtriage run` found in it.
        torch: version.
        cuda: a rank used CUDA.
        problem: why there are no times, or no figures at the mark, in a sentence; None when there are.
    """

    ranks: list[RankReading] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    torch: str | None = None
    cuda: bool = False
    problem: str | None = None

    @property
    def steps(self) -> list[float]:
        """Seconds of each step after the warm-up, on the rank that was slowest in it."""
        return [max(times) for times in zip(*(rank.steps for rank in self.ranks), strict=False)]

    def figure(self, metric: str) -> float | None:
        """Return a metric's figure: of time the median step, of a size the highest rank's."""
        if metric == TIME:
            return median(self.steps) if self.steps else None
        if metric in self.values:
            return _number(self.values[metric])
        known = [value for rank in self.ranks if (value := rank.figure(metric)) is not None]
        return max(known, default=None)


def read_trial(trials: Trials, folder: Path) -> TrialReading:
    """Read what a trial left in its folder. What cannot be read is told in `problem`."""
    values = read_values(_lines(folder / LOG), trials.values)
    try:
        run = read_run([record_directory(folder)])
    except RecordError as error:
        return TrialReading(values=values, problem=str(error))
    disturbed = set().union(*(_with_census(record, trials) for record in run.ranks))
    ranks = [_rank(record, trials, disturbed) for record in run.ranks]
    return TrialReading(
        ranks=ranks,
        values=values,
        findings=merge(run).findings,
        torch=run.ranks[0].start.torch,
        cuda=any(mark.device.startswith("cuda:") for record in run.ranks for mark in record.marks),
        problem=_problem(run.ranks, ranks, trials),
    )


def read_values(lines: Iterable[str], patterns: Mapping[str, re.Pattern[str]]) -> dict[str, list[str]]:
    """Return the course of each value in an output; of several ranks that print it, the lowest one's."""
    courses: dict[str, dict[int, list[str]]] = {name: {} for name in patterns}
    for line in lines:
        tag = _RANK_TAG.match(line)
        rank = int(tag[1]) if tag else 0
        text = line[tag.end() :] if tag else line
        for name, pattern in patterns.items():
            match = pattern.search(text)
            if match is not None and match[1] is not None:
                courses[name].setdefault(rank, []).append(match[1])
    return {name: by_rank[min(by_rank)] if by_rank else [] for name, by_rank in courses.items()}


def _lines(log: Path) -> Iterator[str]:
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class _MarkOfDevices:
    """One mark with the counters of all devices."""

    name: str
    step: int
    time_s: float
    marks: list[Mark]


def _instants(marks: Sequence[Mark]) -> list[_MarkOfDevices]:
    """Join the lines of one mark, one a device, which share name and time."""
    instants: list[_MarkOfDevices] = []
    for mark in marks:
        last = instants[-1] if instants else None
        if last is not None and (last.name, last.time_s) == (mark.name, mark.time_s):
            last.marks.append(mark)
        else:
            instants.append(_MarkOfDevices(mark.name, mark.step, mark.time_s, [mark]))
    return instants


def _ends(record: RankRecord, step: str) -> list[tuple[int, float]]:
    """Return number and time of each end of a step that is recorded.

    Long runs record only some of the optimizer's steps, each with its number; the program's own marks are
    all recorded, and so their place is their number.
    """
    ends = [instant for instant in _instants(record.marks) if instant.name == step]
    if step == STEP_MARK:
        return [(instant.step, instant.time_s) for instant in ends]
    return [(number, instant.time_s) for number, instant in enumerate(ends, 1)]


def _rank(record: RankRecord, trials: Trials, disturbed: Set[int]) -> RankReading:
    ends = _ends(record, trials.step)
    warm = [(number, time_s) for number, time_s in ends if number >= trials.warmup]
    times = {
        before: (later - earlier) / (number - before)
        for (before, earlier), (number, later) in pairwise(warm)
        if number > before
    }
    steps = [time for before, time in times.items() if before not in disturbed] or [*times.values()]
    begun = warm[0][1] if warm else None
    instants = _instants(record.marks)
    at_mark = [
        _counters(instant.marks)
        for instant in instants
        if begun is not None and instant.time_s > begun and instant.name == trials.mark
    ]
    return RankReading(
        rank=record.number,
        steps=steps,
        at_mark={metric: [counters[metric] for counters in at_mark] for metric in AT_MARK},
        peaks=_peaks(record, instants),
    )


def _with_census(record: RankRecord, trials: Trials) -> set[int]:
    """Return the ends of steps behind which a census was taken: it is in the time of the next step."""
    taken = [m.time_s for m in record.marks if m.name == STEP_MARK and m.step in record.census_steps]
    return {
        number
        for (number, earlier), (_, later) in pairwise(_ends(record, trials.step))
        if any(earlier <= time_s < later for time_s in taken)
    }


def _counters(marks: Sequence[Mark]) -> dict[str, int | None]:
    """Return a mark's counters: summed over the CUDA devices in use, or those of the CPU without any."""
    devices = [mark for mark in marks if mark.device.startswith("cuda:")] or list(marks)
    totals: dict[str, int | None] = {}
    for metric in AT_MARK:
        values = [getattr(mark, metric) for mark in devices]
        of_process = metric.startswith("host_")  # the same on each device's line
        known = [value for value in values if value is not None]
        totals[metric] = None if len(known) < len(values) else max(known) if of_process else sum(known)
    return totals


def _peaks(record: RankRecord, instants: Sequence[_MarkOfDevices]) -> dict[str, int | None]:
    """Return the allocator's own peaks, and where a mark saw more (the program reset them), that."""
    at_marks = [_counters(instant.marks) for instant in instants]

    def highest(metric: str, peak: int | None) -> int | None:
        values = [value for mark in at_marks if (value := mark[metric]) is not None]
        return max([*values, *([] if peak is None else [peak])], default=None)

    end = record.end
    return {
        "peak_allocated": highest("allocated", None if end is None else _sum(end.peak_allocated)),
        "peak_reserved": highest("reserved", None if end is None else _sum(end.peak_reserved)),
        "peak_host_rss": highest("host_rss", None if end is None else end.peak_rss),
    }


def _sum(by_device: Mapping[str, int]) -> int | None:
    return sum(by_device.values()) if by_device else None


def _problem(records: Sequence[RankRecord], ranks: Sequence[RankReading], trials: Trials) -> str | None:
    """Return why times or figures are missing; None when there are some."""
    for record, rank in zip(records, ranks, strict=True):
        seen = len(_ends(record, trials.step))
        if not rank.steps:
            if seen == 0:
                return f"no mark {trials.step!r} ends a step on {record.name}; it made {_made(record)}"
            return (
                f"{record.name} completed {count(seen, 'step')}; with {trials.warmup} of warm-up at least "
                f"{trials.warmup + 1} are needed"
            )
        if not any(rank.at_mark[metric] for metric in AT_MARK):
            return f"no mark {trials.mark!r} after the warm-up on {record.name}; it made {_made(record)}"
    return None


def _made(record: RankRecord) -> str:
    names = list(dict.fromkeys(mark.name for mark in record.marks))
    shown = ", ".join(map(repr, names[:_NAMES_TOLD])) or "no marks"
    return shown if len(names) <= _NAMES_TOLD else f"{shown} ..."


def _number(texts: Sequence[str]) -> float | None:
    """Return the last value as a number; None without one, or where it is not finite."""
    try:
        number = float(texts[-1])
    except (IndexError, ValueError):
        return None
    return number if abs(number) < float("inf") else None
