"""Compare the ranks of a run at the same mark: groups, outliers and their findings."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from memtriage.diagnose.growth.estimate import floor_rise
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.diagnose.ranks.groups import COUNTS, GROWTH, SIZES, Grouping, group_ranks
from memtriage.diagnose.ranks.killed import fate
from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.marks import Mark
from memtriage.model.rank_groups import (
    RankDifference,
    RankFigureName,
    RankFigures,
    RankGroup,
    RankGroups,
    RankOutlier,
    RankSpan,
)
from memtriage.model.units import size
from memtriage.playbook.entries import LEAKS
from memtriage.store.reader import RankRecord

_MARKS_TO_COMPARE: Final = ("step", "backward")
_DEVICE: Final = attrgetter("device")
_FIGURES: Final = (GROWTH, *SIZES, *COUNTS)


@dataclass(frozen=True, slots=True)
class RankPolicy:
    """Where ranks are compared.

    Attributes:
        reached: share of ranks that must have reached the step at which they are compared.
        slack: a rank's last mark may be earlier than that step by this share of the steps: long runs record
            only some of their marks, and each rank different ones.
    """

    reached: float = 0.75
    slack: float = 0.05


POLICY: Final = RankPolicy()


@dataclass(frozen=True, slots=True)
class _RankAtMark:
    """One rank at the mark where ranks are compared.

    Attributes:
        device: the device whose figures are compared; `cpu` without a GPU.
        step: its last step up to the one at which ranks are compared.
    """

    figures: RankFigures
    device: str = DEVICE_HOST
    step: int = 0


@dataclass(frozen=True, slots=True)
class RankComparison:
    """The ranks of a run, compared.

    Attributes:
        groups: what the report says about them; None for a run with one rank.
        findings: one for each rank whose memory stands out.
    """

    groups: RankGroups | None = None
    findings: list[Finding] = field(default_factory=list)


def compare_ranks(ranks: Sequence[RankRecord], *, live: bool = False) -> RankComparison:
    """Compare the ranks of a run.

    Args:
        ranks: their records, by rank.
        live: the run has not ended; see `memtriage.diagnose.ranks.killed.fate`.
    """
    if len(ranks) < 2:
        return RankComparison()
    name, step, standings = _ranks_at_mark(ranks, live)
    grouping = group_ranks([standing.figures for standing in standings])
    by_rank = {standing.figures.rank: standing for standing in standings}
    groups = _groups(grouping, by_rank)
    groups.mark, groups.step = name, step
    groups.figures = [standing.figures for standing in standings]
    devices = {
        standing.device.partition(":")[0] for standing in standings if standing.figures.base is not None
    }
    groups.device = devices.pop() if len(devices) == 1 else None
    peers = "other ranks" if len(grouping.groups) < 2 else "other ranks of its group"
    findings = [
        finding
        for outlier in groups.outliers
        if (finding := _finding(outlier, by_rank[outlier.rank], peers)) is not None
    ]
    return RankComparison(groups, findings)


# What is compared


def _ranks_at_mark(
    ranks: Sequence[RankRecord], live: bool
) -> tuple[str | None, int | None, list[_RankAtMark]]:
    """Return the name and the step of the marks at which most ranks can be compared, and all ranks there."""
    for name in _MARKS_TO_COMPARE:
        series = {rank.number: _main_device_marks(rank, name) for rank in ranks}
        last_steps = sorted((marks[-1].step for marks in series.values() if marks), reverse=True)
        if len(last_steps) < 2:
            continue
        common = last_steps[math.ceil(POLICY.reached * len(last_steps)) - 1]
        standings = []
        for rank in ranks:
            marks = series[rank.number]
            upto = marks[: bisect_right(marks, common, key=lambda mark: mark.step)]
            came_so_far = bool(upto) and upto[-1].step >= (1 - POLICY.slack) * common
            standings.append(_rank_at_mark(rank, upto if came_so_far else [], live))
        return name, common, standings
    return None, None, [_rank_at_mark(rank, [], live) for rank in ranks]


def _main_device_marks(rank: RankRecord, name: str) -> list[Mark]:
    """Return the marks of one name on the rank's fullest device, a GPU before the CPU."""
    named = [mark for mark in rank.marks if mark.name == name]
    last: dict[str, Mark] = {}
    for device in set(map(_DEVICE, named)):
        known = (mark for mark in reversed(named) if mark.device == device and mark.allocated is not None)
        if (mark := next(known, None)) is not None:
            last[device] = mark
    if not last:
        return []
    fullest = max(last, key=lambda device: (device.startswith("cuda"), last[device].allocated or 0))
    return [mark for mark in named if mark.device == fullest and mark.allocated is not None]


def _rank_at_mark(rank: RankRecord, marks: Sequence[Mark], live: bool) -> _RankAtMark:
    """Return a rank's figures, given its marks up to the one where ranks are compared."""
    killed = fate(rank, live=live) == "killed"
    if not marks:
        return _RankAtMark(
            RankFigures(rank=rank.number, steps=rank.last_step, marks=len(rank.marks), killed=killed)
        )
    mark, warm = marks[-1], marks[min(WARM_UP, len(marks) - 1)]
    growth = round(floor_rise([(mark.step, mark.allocated or 0) for mark in marks[WARM_UP:]]) or 0)
    allocated = mark.allocated or 0
    figures = RankFigures(
        rank=rank.number,
        steps=rank.last_step,
        marks=len(rank.marks),
        killed=killed,
        growth=growth,
        base=max(0, allocated - growth * (mark.step - warm.step)),
        allocated=allocated,
        reserved=mark.reserved,
        peak=None if rank.end is None else rank.end.peak_allocated.get(mark.device),
        resident=mark.host_rss,
    )
    return _RankAtMark(figures, mark.device, mark.step)


# What the report says


def _groups(grouping: Grouping, standings: dict[int, _RankAtMark]) -> RankGroups:
    killed = {number for number, standing in standings.items() if standing.figures.killed}
    killed_alone = killed if 2 * len(killed) < len(standings) else set()
    home = {number: place for place, group in enumerate(grouping.groups) for number in group}
    outliers = [
        RankOutlier(
            rank=number,
            group=home.get(number),
            killed=number in killed,
            last_step=standings[number].figures.steps,
            differs=grouping.differences.get(number, []),
        )
        for number in sorted({*grouping.differences, *killed_alone})
    ]
    apart = {outlier.rank for outlier in outliers}
    groups = [[number for number in group if number not in apart] for group in grouping.groups]
    return RankGroups(
        groups=[
            RankGroup(ranks=group, figures=_spans([standings[number].figures for number in group]))
            for group in groups
        ],
        outliers=outliers,
    )


def _spans(ranks: Sequence[RankFigures]) -> dict[str, RankSpan]:
    spans: dict[str, RankSpan] = {}
    for figure in _FIGURES:
        values = sorted(value for rank in ranks if (value := figure.read(rank)) is not None)
        if values:
            spans[figure.name] = RankSpan(low=values[0], usual=values[len(values) // 2], high=values[-1])
    return spans


@dataclass(frozen=True, slots=True)
class _Words:
    """What a finding says about a figure that differs."""

    mechanism: str
    fix: str
    playbook: str


_WORDS: Final[dict[RankFigureName, _Words]] = {
    "growth": _Words(
        "Only this rank keeps something from every step, or keeps more of it than the others.",
        "Look at what only this rank does: logging, metrics, evaluation, the last pipeline stage's loss.",
        LEAKS,
    ),
    "allocated": _Words(
        "This rank's live tensors take more or less than its peers' at the same mark: an uneven "
        "shard, another pipeline stage, or work that only it does.",
        "Compare its ledger with another rank's; even out the shards or stages, or move the extra work.",
        "M18",
    ),
    "reserved": _Words(
        "Live tensors are alike on all ranks but this rank's allocator took more or less from the "
        "driver: its peak differs, or its memory is in more pieces.",
        "Look at this rank's peak: a longer batch, an evaluation, a checkpoint that only it writes.",
        "M18",
    ),
    "peak": _Words(
        "This rank's highest use differs from its peers', but what stays from step to step is alike.",
        "Look at what only this rank does at times: a longer batch, an evaluation, a checkpoint gathered.",
        "M18",
    ),
    "resident": _Words(
        "This rank's process holds a different amount of host memory than its peers.",
        "Look at what only this rank keeps on the host: data for its node, a checkpoint, logs; compare its "
        "host ledger with another rank's.",
        "M3",
    ),
}


def _finding(outlier: RankOutlier, standing: _RankAtMark, peers: str) -> Finding | None:
    """Return the finding for a rank whose memory stands out; None if only its end or its counts do."""
    differs = [differ for differ in outlier.differs if differ.figure in _WORDS]
    if not differs:
        return None
    first = differs[0]
    words = _WORDS[first.figure]
    figures = standing.figures
    return Finding(
        kind="rank_differs",
        device=DEVICE_HOST if first.figure == "resident" else standing.device,
        rank=outlier.rank,
        bytes=figures.allocated if first.figure == "growth" else first.value,
        bytes_per_step=first.value if first.figure == "growth" else None,
        mechanism=words.mechanism,
        fix=words.fix,
        playbook=words.playbook,
        step=standing.step,
        evidence=[_compare(differ, standing.step, peers) for differ in differs],
    )


def _compare(difference: RankDifference, step: int, peers: str) -> str:
    """Return a comparison in words."""
    growing = difference.figure == GROWTH.name
    per = " per step" if growing else ""
    when = "" if difference.figure == "peak" else f" at step {step}"
    own = f"{difference.figure}{when}: {size(difference.value)}{per}"
    if difference.peers == 1:
        return f"{own}; the other rank has {size(difference.usual)}{per}"
    others = "other ranks" if growing else peers
    return (
        f"{own}; the median of the {difference.peers} {others} is {size(difference.usual)}{per}, "
        f"their median absolute deviation {size(difference.spread)}"
    )
