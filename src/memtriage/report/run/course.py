"""The course of a run's memory as charts' columns: one chart a device, in it one lane for each rank drawn.

A run of thousands of ranks has more marks than a page can hold. The ranks that matter are drawn (those with
findings first), each with the highest and the lowest figures of every stretch; a band spans all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.diagnose.ranks.killed import fate
from memtriage.diagnose.ranks.merge import process_courses
from memtriage.model.marks import Mark
from memtriage.model.units import count, devices_in_words, is_process
from memtriage.report.html.columns import pack
from memtriage.report.html.downsample import instants
from memtriage.report.run.words import COURSE_MARKS
from memtriage.store.reader import RankRecord

HOST: Final = "host"
UNNAMED_MARKS: Final = frozenset({"start", "end", "time", *COURSE_MARKS})
"""Names that memtriage itself gives to marks; all others are the program's own."""

_CHARACTERS: Final = 700_000
"""What all packed columns of a page may take, about."""
_MOST_ROWS: Final = 3000
"""Rows of a lane; more would only be drawn upon each other."""
_FEWEST_ROWS: Final = 60
_ENDS: Final = frozenset({"start", "end"})
_LONGEST_TITLE: Final = 24
_MOST_NAMES: Final = 60
"""Names of marks on a page; a program can make one up for every mark."""
_MOST_APART: Final = 12
"""Names of marks whose extremes are kept apart; those of all others are kept together."""
_LONGEST_NAME: Final = 80
_OTHER_NAMES: Final = "other marks"
_BAND_STRETCHES: Final = 400
"""Stretches of steps of which a band has one lowest and one highest figure."""
_UNKNOWN: Final = -1
"""Stands for a figure that was not read; no counter goes below zero."""
_THOUSANDTHS: Final = 1000
_STEP: Final = attrgetter("step")
_VALUE_BITS: Final = 53
"""Bits of a figure on a page (exact in a browser's double); the rest of 63 are left for its place."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A counter that a chart draws; the first of a chart is on top.

    Attributes:
        key: its name in the page's data.
        name: its name for readers.
        color, fill: its line's color and that of the area below, in `assets/page.css`; no area without.
        read: the counter at a mark.
    """

    key: str
    name: str
    color: str
    fill: str | None
    read: Callable[[Mark], int | None]


_DEVICE: Final = (
    Measure("allocated", "allocated", "hue-1", "wash-1", attrgetter("allocated")),
    Measure("reserved", "reserved", "ink-3", "releasable", attrgetter("reserved")),
)
_OF_HOST: Final = (
    Measure("pinned", "pinned", "hue-8", None, attrgetter("host_pinned")),
    Measure("malloc", "malloc in use", "hue-1", "wash-1", attrgetter("allocated")),
    Measure("held", "malloc holds", "hue-2", None, attrgetter("reserved")),
    Measure("rss", "resident", "hue-9", "wash-9", attrgetter("host_rss")),
)
_OF_PROCESSES: Final = (Measure("allocated", "anonymous memory", "hue-1", "wash-1", attrgetter("allocated")),)
_FIRST: Final = {"cpu": "malloc", HOST: "rss"}
"""The host's counter in which a finding on a device shows."""


@dataclass(frozen=True, slots=True)
class _DeviceMarks:
    """One device's marks on one rank, in the order of time."""

    rank: RankRecord
    device: str
    marks: list[Mark]


def charts(
    ranks: Sequence[RankRecord],
    drawn: Sequence[RankRecord],
    labels: Callable[[int, bool], str | None],
    interest: str | None,
) -> list[dict[str, Any]]:
    """Return the charts of a run: those of interest, GPUs (each rank's first together), then the host.

    Args:
        ranks: all of the run.
        drawn: those that get a lane; a chart with few ranks has all.
        labels: what is said of a rank, given its number and whether the host's memory is meant.
        interest: the device of the first finding, or what its processes do.
    """
    planned = [plan for courses in _slots(drawn) if (plan := _plan(courses)) is not None]
    limit = min(_MOST_ROWS, max((len(lane.at) for plan in planned for lane in plan.lanes), default=0))
    while True:
        packed = [[lane.packed(limit) for lane in plan.lanes] for plan in planned]
        size = sum(lane.pop("characters") for lanes in packed for lane in lanes)
        if size <= _CHARACTERS or limit <= _FEWEST_ROWS:
            break
        limit = max(_FEWEST_ROWS, limit * _CHARACTERS * 9 // (size * 10))

    made = [
        {
            **_heading(plan, interest),
            "lanes": [
                {**lane, "label": labels(of.course.rank.number, plan.of_host)}
                for of, lane in zip(plan.lanes, lanes, strict=True)
            ],
            "band": band,
        }
        for plan, lanes, band in zip(planned, packed, _bands(ranks, planned), strict=True)
    ]
    return sorted(made, key=lambda chart: not chart["of_interest"])


def _slots(drawn: Sequence[RankRecord]) -> list[list[_DeviceMarks]]:
    """Return the courses that share a chart: every rank's first GPU, every rank's second, ..., the hosts."""
    slots: dict[int, list[_DeviceMarks]] = defaultdict(list)
    hosts = []
    for rank in drawn:
        by_device: dict[str, list[Mark]] = defaultdict(list)
        for mark in rank.marks:
            by_device[mark.device].append(mark)
        host = by_device.pop("cpu", None)
        for slot, device in enumerate(sorted(by_device, key=lambda name: (len(name), name))):
            slots[slot].append(_DeviceMarks(rank, device, by_device[device]))
        if host:
            hosts.append(_DeviceMarks(rank, HOST, host))
    processes = [
        [_DeviceMarks(rank, group, marks)] for rank in drawn for group, marks in process_courses(rank).items()
    ]
    return [*(slots[slot] for slot in sorted(slots)), *([hosts] if hosts else []), *processes]


@dataclass(frozen=True, slots=True)
class _Columns:
    """A course as columns.

    Attributes:
        values: figures by the measure's key, `_UNKNOWN` where one was not read.
        kinds: which of the chart's names each mark has.
        at: places on the axis of steps, in thousandths.
        time: thousandths of a second.
    """

    course: _DeviceMarks
    values: dict[str, NDArray[np.int64]]
    kinds: NDArray[np.int64]
    at: NDArray[np.int64]
    time: NDArray[np.int64]

    def packed(self, limit: int) -> dict[str, Any]:
        """Return about `limit` rows: those that keep the extremes of each name of marks."""
        rows = _kept(self.kinds, list(self.values.values()), limit)
        columns = {"at": pack(self.at[rows]), "time": pack(self.time[rows]), "kind": pack(self.kinds[rows])}
        values = {key: pack(column[rows]) for key, column in self.values.items()}
        few = f"{len(rows):,} of {count(len(self.at), 'mark')}: the highest and the lowest of every stretch"
        return {
            **columns,
            "values": values,
            "characters": sum(len(packed["base64"]) for packed in (*columns.values(), *values.values())),
            "left_out": None if len(rows) == len(self.at) else few,
            "rank": self.course.rank.start.rank,
            "device": self.course.device,
            "limit": _limit(self.course),
            "end": _end(self.course.rank),
        }


@dataclass(frozen=True, slots=True)
class _Chart:
    """What a chart draws.

    Attributes:
        measures: those of which anything is known.
        counts: how often a lane has marks of a name, at the most.
        names: those that the page tells apart.
        usual: the name whose course shows most; None when no usual one occurs twice.
    """

    lanes: list[_Columns]
    measures: list[Measure]
    counts: dict[str, int]
    names: list[str]
    usual: str | None

    @property
    def of_host(self) -> bool:
        return self.lanes[0].course.device == HOST


def _plan(courses: Sequence[_DeviceMarks]) -> _Chart | None:
    """Return what to draw of courses on one chart; None where that is nothing, or no more than a point."""
    of_processes = _OF_PROCESSES if is_process(courses[0].device) else _DEVICE
    known = _OF_HOST if courses[0].device == HOST else of_processes
    measures = [
        measure for measure in known if any(measure.read(mark) for course in courses for mark in course.marks)
    ]
    if not measures or all(len(course.marks) < 2 for course in courses):
        return None
    counts = _names(courses)
    names = _shown_names(counts)
    usual = next((name for name in COURSE_MARKS if counts.get(name, 0) > 1), None)
    return _Chart([_lane(course, measures, names) for course in courses], measures, counts, names, usual)


def _heading(plan: _Chart, interest: str | None) -> dict[str, Any]:
    devices = {lane.course.device for lane in plan.lanes}
    keys = [measure.key for measure in plan.measures]
    focus = _FIRST.get(interest or "") if plan.of_host else None
    compared = focus or ("rss" if plan.of_host else "allocated")
    return {
        "title": _title(plan, devices),
        "of_interest": interest in devices or focus is not None,
        "measures": [
            {"key": measure.key, "name": measure.name, "color": measure.color, "fill": measure.fill}
            for measure in plan.measures
        ],
        "focus": focus if focus in keys else None,
        "compared": compared if compared in keys else keys[0],
        "names": [name[:_LONGEST_NAME] for name in plan.names],
        "often": [
            place
            for place, name in enumerate(plan.names)
            if plan.counts.get(name, 2) > 1 and name not in _ENDS
        ],
        "own": [place for place, name in enumerate(plan.names) if name not in UNNAMED_MARKS],
        "usual": None if plan.usual is None else plan.names.index(plan.usual),
    }


def _title(plan: _Chart, devices: set[str]) -> str:
    if plan.of_host:
        return "Host memory over the run"
    if is_process(name := next(iter(devices))):
        return f"Memory of {'' if name.startswith('/') else 'the '}{name} over the run"
    words = devices_in_words(devices)
    return f"Memory of {words if len(words) <= _LONGEST_TITLE else 'GPUs'} over the run"


def _names(courses: Iterable[_DeviceMarks]) -> dict[str, int]:
    """Return how often the course that has most marks of a name has it, the usual names first."""
    most: dict[str, int] = {}
    for course in courses:
        own: dict[str, int] = defaultdict(int)
        for mark in course.marks:
            own[mark.name] += 1
        for name, times in own.items():
            most[name] = max(times, most.get(name, 0))
    ordered = sorted(most, key=lambda name: (name not in COURSE_MARKS, name in UNNAMED_MARKS))
    return {name: most[name] for name in ordered}


def _shown_names(counts: dict[str, int]) -> list[str]:
    """Return at most `_MOST_NAMES` names; `_OTHER_NAMES` stands for the rest."""
    names = list(counts)
    return names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], _OTHER_NAMES]


def _lane(course: _DeviceMarks, measures: Sequence[Measure], names: list[str]) -> _Columns:
    marks = course.marks
    index = {name: place for place, name in enumerate(names)}
    times = np.asarray([round(mark.time_s * _THOUSANDTHS) for mark in marks], np.int64)
    return _Columns(
        course,
        values={measure.key: _figures(marks, measure) for measure in measures},
        kinds=np.asarray([index.get(mark.name, len(names) - 1) for mark in marks], np.int64),
        at=_positions(marks),
        time=np.maximum.accumulate(times),
    )


def _figures(marks: Sequence[Mark], measure: Measure) -> NDArray[np.int64]:
    try:  # a million at times: no step of Python for each
        return np.fromiter(map(measure.read, marks), np.int64, len(marks))
    except TypeError:  # a None: not known at every mark
        values = [_UNKNOWN if value is None else value for value in map(measure.read, marks)]
        return np.asarray(values, np.int64)


def _positions(marks: Sequence[Mark]) -> NDArray[np.int64]:
    """Return where marks are on the axis of steps, in thousandths: those within a step evenly behind it."""
    steps = np.maximum.accumulate(np.asarray([mark.step for mark in marks], np.int64))
    _, first, lengths = np.unique(steps, return_index=True, return_counts=True)
    inside = np.arange(len(marks)) - np.repeat(first, lengths)
    positions: NDArray[np.int64] = steps * _THOUSANDTHS + _THOUSANDTHS * inside // np.repeat(lengths, lengths)
    return positions


def _kept(kinds: NDArray[np.int64], columns: Sequence[NDArray[np.int64]], limit: int) -> NDArray[np.int64]:
    if len(kinds) <= limit:
        return np.arange(len(kinds), dtype=np.int64)
    kinds = np.minimum(kinds, _MOST_APART - 1)
    present = np.unique(kinds)
    share = max(limit // len(present), 2 + 2 * len(columns))
    rows = [np.flatnonzero(kinds == kind) for kind in present]
    return np.sort(
        np.concatenate([own[instants([column[own] for column in columns], share)] for own in rows])
    )


def _limit(course: _DeviceMarks) -> int | None:
    """Return the bytes at which memory runs out there."""
    if course.device == HOST:
        return course.rank.start.host_limit
    return course.rank.device_limits.get(course.device)


def _end(rank: RankRecord) -> str | None:
    """Return how a rank ended where it did not end well."""
    if rank.end is None:
        return "killed" if fate(rank) == "killed" else None
    if rank.end.verdict == "out_of_memory":
        return "out of memory"
    return "exception" if rank.end.exception is not None else None


def _bands(ranks: Sequence[RankRecord], plans: Sequence[_Chart]) -> list[dict[str, Any] | None]:
    """Return each chart's band over all ranks; None where each has a lane.

    Rank by rank: a million marks are scattered over hundreds of megabytes, and each is fetched once this way.
    """
    bands = [_Band.of(plan) if len(plan.lanes) < len(ranks) else None for plan in plans]
    for rank in ranks:
        by_device = cache(partial(_by_device, rank.marks))
        for band in filter(None, bands):
            for device, marks in by_device(band.name).items():
                if device.partition(":")[0] == band.device:
                    band.add(marks)
    return [None if band is None else band.packed(len(ranks)) for band in bands]


def _by_device(marks: Sequence[Mark], name: str) -> dict[str, list[Mark]]:
    groups: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        if mark.name == name:
            groups[mark.device].append(mark)
    return groups


class _Band:
    """Lowest, median and highest figures of all ranks, by stretch of steps.

    Attributes:
        name: of the marks that count.
        device: `cuda` or `cpu`.
    """

    def __init__(self, name: str, device: str, measures: Sequence[Measure]) -> None:
        self.name = name
        self.device = device
        self._steps: list[NDArray[np.int64]] = []
        self._values: dict[Measure, list[NDArray[np.int64]]] = {measure: [] for measure in measures}

    @classmethod
    def of(cls, plan: _Chart) -> _Band | None:
        """Return the band of a chart, empty; None where no usual mark occurs twice."""
        if plan.usual is None:
            return None
        device = "cpu" if plan.of_host else plan.lanes[0].course.device.partition(":")[0]
        return cls(plan.usual, device, plan.measures)

    def add(self, marks: Sequence[Mark]) -> None:
        """Take in a device's marks on one rank."""
        self._steps.append(np.fromiter(map(_STEP, marks), np.int64, len(marks)))
        for measure, values in self._values.items():
            values.append(_figures(marks, measure))

    def packed(self, ranks: int) -> dict[str, Any]:
        steps = np.concatenate(self._steps)
        wide = -(-(int(steps.max()) + 1) // _BAND_STRETCHES)
        places = steps // wide
        stretches = np.flatnonzero(np.bincount(places))
        spans = {
            measure.key: _span(np.concatenate(values), places, stretches)
            for measure, values in self._values.items()
        }
        return {
            "ranks": ranks,
            "at": pack(stretches * wide * _THOUSANDTHS),
            "values": {key: [pack(edge) for edge in span] for key, span in spans.items()},
        }


def _span(
    values: NDArray[np.int64], places: NDArray[np.int64], wanted: NDArray[np.intp]
) -> list[NDArray[np.int64]]:
    """Return the lowest, the median and the highest of the known values that fall on each place wanted."""
    known = (values >= 0) & (values < 1 << _VALUE_BITS)
    if not known.any():
        return [np.full(len(wanted), _UNKNOWN)] * 3
    # One sort of plain integers, by place and then by value, is much faster than one by two keys.
    ordered = np.sort(places[known] << _VALUE_BITS | values[known])
    first = np.searchsorted(ordered, wanted << _VALUE_BITS)
    last = np.searchsorted(ordered, (wanted + 1) << _VALUE_BITS) - 1
    figures = ordered & ((1 << _VALUE_BITS) - 1)
    empty = last < first
    return [
        np.where(empty, _UNKNOWN, figures[np.where(empty, 0, at)])
        for at in (first, (first + last) // 2, last)
    ]
