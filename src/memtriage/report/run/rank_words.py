"""What reports say of a run's ranks: the groups of those alike, and in what others stand out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from memtriage.diagnose.ranks.groups import POLICY
from memtriage.model.findings import GROWING
from memtriage.model.units import count, rank_list, rate, size

if TYPE_CHECKING:
    from memtriage.model.rank_groups import (
        RankDifference,
        RankFigureName,
        RankGroup,
        RankGroups,
        RankOutlier,
        RankSpan,
    )
    from memtriage.model.report import RunReport

_LONGEST_LIST: Final = 40
_IN_GROUP: Final = ("allocated", "reserved", "resident")
"""Figures that a group is described by."""

_ON_GPU: Final[dict[RankFigureName, str]] = {
    "allocated": "allocated",
    "reserved": "reserved",
    "peak": "at its peak",
    "resident": "resident on the host",
}
_ON_HOST: Final = _ON_GPU | {"allocated": "in use by malloc", "reserved": "held by malloc"}


def words_of(groups: RankGroups) -> dict[RankFigureName, str]:
    """Return what stands behind a size: what it is of."""
    return _ON_HOST if groups.device == "cpu" else _ON_GPU


@dataclass(frozen=True, slots=True)
class RankSentence:
    """One line on ranks.

    Attributes:
        who: the ranks, e.g. `rank 17` or `765 ranks alike`.
        what: what is to be said of them.
        ranks: their numbers.
        stands_out: they are no group but stand out.
    """

    who: str
    what: str
    ranks: list[int]
    stands_out: bool


def rank_lines(report: RunReport) -> list[RankSentence]:
    """Return a line for each group, then one for ranks that stand out in the same way; none for one rank."""
    groups = report.rank_groups
    if isinstance(groups, msgspec.UnsetType):
        return []
    leaking = {finding.rank for finding in report.findings if finding.kind in GROWING}
    words = words_of(groups)
    lines = [_group_line(group, words) for group in groups.groups if group.ranks]
    alike: dict[tuple[object, ...], list[RankOutlier]] = {}
    for outlier in groups.outliers:
        alike.setdefault(_way(outlier, outlier.rank in leaking), []).append(outlier)
    return lines + [_outlier_line(same, leaking, words) for same in alike.values()]


def heading(groups: RankGroups) -> str:
    """Return how many ranks stand out, and where they were compared."""
    alone = len(groups.outliers)
    said = f"{alone} of them stand{'s' * (alone == 1)} out" if alone else "none stands out"
    if groups.step is None:
        return said
    at = (
        f"the end of step {groups.step:,}"
        if groups.mark == "step"
        else f"{groups.mark!r} of step {groups.step:,}"
    )
    return f"{said}; compared at {at}"


def few_ranks(ranks: Collection[int]) -> str:
    """Return rank numbers, cut where there are many stretches of them.

    >>> few_ranks(range(0, 100, 2))
    '0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, ...'
    """
    text = rank_list(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST].rpartition(',')[0]}, ..."


def _group_line(group: RankGroup, words: Mapping[RankFigureName, str]) -> RankSentence:
    sizes = [group.figures[name] for name in ("allocated", "reserved") if name in group.figures]
    wide = any(span.high - span.low > POLICY.wide * span.usual for span in sizes)
    said = [f"{_span(group.figures[name])} {words[name]}" for name in _IN_GROUP if name in group.figures]
    growth = group.figures.get("growth")
    if growth is not None and growth.usual > 0:
        said.append(f"growing {rate(growth.usual, 'step')}")
    many = len(group.ranks) > 1
    how = "" if not many else " spread out" if wide else " alike"
    who = (
        f"{count(len(group.ranks), 'rank')}{how} ({few_ranks(group.ranks)})" if many else _ranks(group.ranks)
    )
    return RankSentence(who, ", ".join(said), group.ranks, stands_out=False)


def _span(span: RankSpan) -> str:
    low, high = size(span.low), size(span.high)
    return low if low == high else f"{low} to {high}"


def _way(outlier: RankOutlier, leaks: bool) -> tuple[object, ...]:
    return (
        outlier.killed,
        leaks,
        *((differ.figure, differ.value > differ.usual) for differ in outlier.differs),
    )


def _outlier_line(
    same: Sequence[RankOutlier], leaking: Collection[int | None], words: Mapping[RankFigureName, str]
) -> RankSentence:
    ranks = [outlier.rank for outlier in same]
    said = []
    if same[0].killed:
        steps = [outlier.last_step for outlier in same]
        said.append(f"killed at step {_counts(steps)}")
    for place, first in enumerate(same[0].differs):
        if not (same[0].killed and first.figure in ("steps", "marks")):
            differences = [outlier.differs[place] for outlier in same]
            said.append(_difference(differences, ranks[0] in leaking, words))
    return RankSentence(_ranks(ranks), "; ".join(said), ranks, stands_out=True)


def _difference(same: Sequence[RankDifference], leaks: bool, words: Mapping[RankFigureName, str]) -> str:
    first = same[0]
    values = [difference.value for difference in same]
    match first.figure:
        case "growth":
            low, high = min(values), max(values)
            amount = size(low) if size(low) == size(high) else f"{size(low)} to {size(high)}"
            return f"{'leaks' if leaks else 'grows'} {amount} per step"
        case "steps":
            return f"at step {_counts(values)} when the others were at {first.usual:,}"
        case "marks":
            return f"{_counts(values)} marks (readings of the counters) where the others have {first.usual:,}"
        case _:
            away = sorted((difference.value - difference.usual for difference in same), key=abs)
            low_text, high_text = (
                f"{'+' if change > 0 else '-'}{size(abs(change))}" for change in (away[0], away[-1])
            )
            amount = low_text if low_text == high_text else f"{low_text} to {high_text}"
            return f"{amount} {words[first.figure]}"


def _counts(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {few_ranks(ranks)}"
