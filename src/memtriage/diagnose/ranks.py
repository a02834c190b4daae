"""Ranks of a run that differ from the others at the same mark."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from memtriage.diagnose.growth import POLICY as GROWTH_POLICY
from memtriage.diagnose.growth import Series, floor_growth
from memtriage.model import Finding, Mark
from memtriage.model.units import size
from memtriage.store.reader import RankRecord

_MARKS_TO_COMPARE: Final = ("step", "backward")


@dataclass(frozen=True, slots=True)
class RankPolicy:
    """When a rank counts as different from the others.

    Attributes:
        share: difference from the others' median, as a share of it, below which ranks are alike.
        floor: bytes below which they are alike, whatever the share.
        growth_floor: bytes a step that one rank must grow more than the others.
        deviations: how many median absolute deviations of the others it must lie away.
        reached: share of ranks that must have come as far as the step at which they are compared.
        slack: share of the steps by which a rank's last mark may lie before that step: long runs record
            some of their marks only, and each rank others.
    """

    share: float = 0.10
    floor: int = 64 * 1024**2
    growth_floor: int = 64 * 1024
    deviations: float = 6.0
    reached: float = 0.75
    slack: float = 0.05


POLICY: Final = RankPolicy()


@dataclass(frozen=True, slots=True)
class _Standing:
    """One rank's figures at the mark where ranks are compared."""

    rank: int
    mark: Mark
    growth: int


def rank_differences(ranks: Sequence[RankRecord], policy: RankPolicy) -> list[Finding]:
    """Return a finding for each rank that is far from the median of the others at the same mark."""
    if len(ranks) < 2:
        return []
    standings = _standings(ranks, policy)
    columns = [_Column(metric, standings) for metric in _METRICS]
    found = [
        finding
        for one in standings
        if (finding := _difference(one, columns, len(standings), policy)) is not None
    ]
    # Half the ranks on either side (two pipeline stages) are two groups, and none of them stands out.
    return found if len(standings) == 2 or 2 * len(found) < len(standings) else []


def _standings(ranks: Sequence[RankRecord], policy: RankPolicy) -> list[_Standing]:
    """Return the ranks' figures at the last step that most of them reached, where they have a mark."""
    for name in _MARKS_TO_COMPARE:
        series = {rank.number: _main_device_marks(rank, name) for rank in ranks}
        series = {number: marks for number, marks in series.items() if marks}
        if len(series) < 2:
            continue
        last_steps = sorted((marks[-1].step for marks in series.values()), reverse=True)
        common = last_steps[math.ceil(policy.reached * len(last_steps)) - 1]
        standings = []
        for number, marks in series.items():
            upto = marks[: bisect_right(marks, common, key=lambda mark: mark.step)]
            if upto and upto[-1].step >= (1 - policy.slack) * common:
                standings.append(_Standing(number, upto[-1], _growth(upto)))
        return standings
    return []


def _main_device_marks(rank: RankRecord, name: str) -> list[Mark]:
    """Return the marks of one name on the rank's fullest device, a GPU before the CPU."""
    marks = [mark for mark in rank.marks if mark.name == name and mark.allocated is not None]
    devices = {mark.device for mark in marks}
    if len(devices) < 2:
        return marks
    last = {mark.device: mark for mark in marks}
    fullest = max(devices, key=lambda device: (device.startswith("cuda"), last[device].allocated or 0))
    return [mark for mark in marks if mark.device == fullest]


def _growth(marks: Sequence[Mark]) -> int:
    """Return the bytes a step by which allocated keeps rising after warm-up, 0 when it does not."""
    settled = marks[GROWTH_POLICY.warm_up :]
    series = Series([mark.step for mark in settled], [mark.allocated or 0 for mark in settled])
    return round(floor_growth(series) or 0)


def _difference(one: _Standing, columns: Sequence[_Column], count: int, policy: RankPolicy) -> Finding | None:
    """Return the finding for one rank: its growth if that differs, else what it has allocated or reserved."""
    differs = [column for column in columns if column.is_far(one, policy)]
    if not differs:
        return None
    first = differs[0]
    # Of two ranks the smaller is as far from the larger: only the one that needs more memory is named. And
    # a rank that grows less than the others is no trouble.
    if (count == 2 or first.metric.per_step) and not first.is_above(one):
        return None
    reserved = first.metric.name == "reserved"
    return Finding(
        kind="rank_differs",
        device=one.mark.device,
        rank=one.rank,
        bytes=one.mark.reserved if reserved else one.mark.allocated,
        bytes_per_step=one.growth if first.metric.per_step else None,
        mechanism=first.metric.mechanism,
        fix=first.metric.fix,
        playbook=first.metric.playbook,
        step=one.mark.step,
        evidence=[column.compare(one) for column in differs],
    )


@dataclass(frozen=True, slots=True)
class _Metric:
    """A figure by which ranks are compared."""

    name: str
    value: Callable[[_Standing], int | None]
    per_step: bool
    mechanism: str
    fix: str
    playbook: str


_METRICS: Final = (
    _Metric(
        "growth",
        lambda standing: standing.growth,
        per_step=True,
        mechanism="Only this rank keeps something from every step, or keeps more of it than the others.",
        fix="Look at what only this rank does: logging, metrics, evaluation, the last pipeline stage's loss.",
        playbook="M20",
    ),
    _Metric(
        "allocated",
        lambda standing: standing.mark.allocated,
        per_step=False,
        mechanism="This rank's live tensors take more or less than its peers' at the same mark: an uneven "
        "shard, another pipeline stage, or work that only it does.",
        fix="Compare its ledger with another rank's; even out the shards or stages, or move the extra work.",
        playbook="M18",
    ),
    _Metric(
        "reserved",
        lambda standing: standing.mark.reserved,
        per_step=False,
        mechanism="Live tensors are alike on all ranks but this rank's allocator took more or less from the "
        "driver: its peak was another, or its memory is in more pieces.",
        fix="Look at this rank's peak: a longer batch, an evaluation, a checkpoint that only it writes.",
        playbook="M18",
    ),
)


class _Column:
    """One figure of all ranks, sorted once: with thousands of ranks each is held against all others."""

    def __init__(self, metric: _Metric, standings: Sequence[_Standing]) -> None:
        self.metric = metric
        self._ordered = sorted(value for one in standings if (value := metric.value(one)) is not None)

    def is_far(self, one: _Standing, policy: RankPolicy) -> bool:
        """Whether a rank is far from the median of the others."""
        value = self.metric.value(one)
        if value is None or len(self._ordered) < 2:
            return False
        middle = self._median_without(value)
        floor = policy.growth_floor if self.metric.per_step else max(policy.floor, policy.share * middle)
        distance = abs(value - middle)
        # The floor first: nearly all ranks stop there, and the spread takes a pass over the others.
        return distance >= floor and distance > policy.deviations * self._spread_without(value)

    def is_above(self, one: _Standing) -> bool:
        """Whether a rank that has the figure lies above the median of the others."""
        value = self.metric.value(one)
        return value is not None and value > self._median_without(value)

    def compare(self, one: _Standing) -> str:
        """Return the comparison in words."""
        value = self.metric.value(one)
        if value is None:
            return f"{self.metric.name} unknown"
        per = " per step" if self.metric.per_step else ""
        middle = size(self._median_without(value))
        own = f"{self.metric.name} at step {one.mark.step}: {size(value)}{per}"
        others = len(self._ordered) - 1
        if others == 1:
            return f"{own}; the other rank has {middle}{per}"
        return (
            f"{own}; the median of the {others} other ranks is {middle}{per}, "
            f"their median absolute deviation {size(self._spread_without(value))}"
        )

    def _median_without(self, value: int) -> float:
        """Return the median of all ranks but one that has `value`."""
        gap = bisect_left(self._ordered, value)
        rest = len(self._ordered) - 1
        low, high = ((rest - 1) // 2, rest // 2)
        return (self._ordered[low + (low >= gap)] + self._ordered[high + (high >= gap)]) / 2

    def _spread_without(self, value: int) -> float:
        """Return the median absolute deviation of all ranks but one that has `value`."""
        middle = self._median_without(value)
        gap = bisect_left(self._ordered, value)
        return median(abs(other - middle) for other in self._ordered[:gap] + self._ordered[gap + 1 :])
