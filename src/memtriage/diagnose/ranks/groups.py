"""Decide from the ranks' figures which ranks behave alike, and which stand out. Pure.

Groups first. A job has parts that differ by design: the stages of a pipeline hold different layers, and the
first and the last one hold more. So ranks are split at gaps of a figure, but only into parts that are large
enough to be a design. Single ranks that remain join the nearest part.

Then outliers: a rank is one if it is far from the median of its peers, compared both with the median itself
and with the peers' spread. Growth, steps and marks are the same on every rank of a healthy job: for these,
all others are peers. For sizes, the peers are the ranks of its group.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final, Literal

from memtriage.model.rank_groups import RankDifference, RankFigureName, RankFigures
from memtriage.model.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class FigurePolicy:
    """When one figure of a rank is far from its peers'.

    Attributes:
        name: the figure.
        read: takes it of a rank.
        floor: ranks with a smaller difference are alike.
        share: the same as a share of the peers' median, with many peers.
        share_of_few: the same with few peers.
        side: on which side of its peers a rank stands out.
    """

    name: RankFigureName
    read: Callable[[RankFigures], int | None]
    floor: int
    share: float
    share_of_few: float
    side: Literal["above", "below", "both"] = "both"


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """When ranks form a group, and when one is far from it.

    Attributes:
        few: the spread of fewer peers says little, so a rank must be further away (`share_of_few`).
        exact: with more peers, a rank is included in their spread: it makes no difference.
        deviations: how many median absolute deviations of its peers a rank must be away. 8 are 5.4 standard
            deviations of a normal distribution: of a thousand healthy ranks, less than one in 10,000 jobs.
        smallest_group: fewest ranks of a group. In a larger job it is the square root of the number of ranks
            (32 of 1,024), which is the usual size of a pipeline stage.
        strays: if more than this share of the ranks are between a figure's groups, it makes no groups.
        wide: ranks are not alike if their spread exceeds this share of the group's median.
    """

    few: int = 8
    exact: int = 64
    deviations: float = 8.0
    smallest_group: int = 2
    strays: float = 0.1
    wide: float = 0.25


POLICY: Final = GroupPolicy()


GROWTH: Final = FigurePolicy("growth", lambda figures: figures.growth, 64 * 1024, 0.0, 0.0, "above")
SIZES: Final = (
    FigurePolicy("allocated", lambda figures: figures.allocated, 64 * MIB, 0.02, 0.10),
    # These two depend on the longest batch that a rank happened to get.
    FigurePolicy("reserved", lambda figures: figures.reserved, 64 * MIB, 0.05, 0.10),
    FigurePolicy("peak", lambda figures: figures.peak, 64 * MIB, 0.05, 0.10),
    # One rank of a node may work for all of them (data, checkpoints), which adds to its resident set.
    FigurePolicy("resident", lambda figures: figures.resident, 2 * GIB, 0.25, 1.0),
)
COUNTS: Final = (
    FigurePolicy("steps", lambda figures: figures.steps, 2, 0.05, 0.10, "below"),
    FigurePolicy("marks", lambda figures: figures.marks, 16, 0.25, 0.50, "below"),
)
_BASE: Final = FigurePolicy("allocated", lambda figures: figures.base, 64 * MIB, 0.02, 0.10)
_SPLITTING: Final = (_BASE, *SIZES[1:])


@dataclass(slots=True)
class Grouping:
    """The decision.

    Attributes:
        groups: rank numbers of each group, ascending, including outliers; the largest group first.
        differences: the figures in which a rank stands out, by rank, the most important first.
    """

    groups: list[list[int]] = field(default_factory=list)
    differences: dict[int, list[RankDifference]] = field(default_factory=dict)


def group_ranks(ranks: Sequence[RankFigures]) -> Grouping:
    """Return which ranks belong together and which stand out; the order of `ranks` does not matter."""
    if len(ranks) < 2:
        return Grouping()
    compared = [figures for figures in ranks if figures.base is not None]
    uneven = _uneven(compared)
    groups = _split([figures for figures in compared if figures.rank not in uneven], len(compared))
    homes = [(figures, _home(figures, groups)) for figures in compared if figures.rank in uneven]
    for figures, group in homes:
        group.append(figures)
    differences: dict[int, list[RankDifference]] = {}
    for difference in (
        _outliers(GROWTH, compared, compared, len(compared)),
        *(
            _outliers(figure, group, [rank for rank in group if rank.rank not in uneven], len(ranks))
            for group in groups
            for figure in SIZES
        ),
        *(_outliers(figure, ranks, ranks, len(ranks)) for figure in COUNTS),
    ):
        for rank, rank_difference in difference.items():
            known = differences.setdefault(rank, [])
            if not (known and known[-1].figure == "steps"):  # fewer steps have fewer marks
                known.append(rank_difference)
    growing = {rank for rank, of_rank in differences.items() if of_rank[0].figure == GROWTH.name}
    for rank in uneven - growing:  # it grows less than the others, so it has less, which is not a problem
        of_counts = [
            rank_difference
            for rank_difference in differences.pop(rank, [])
            if rank_difference.figure in ("steps", "marks")
        ]
        if of_counts:
            differences[rank] = of_counts
    numbers = [sorted(figures.rank for figures in group) for group in groups if group]
    return Grouping(sorted(numbers, key=lambda group: (-len(group), group)), differences)


# Groups


def _split(ranks: Sequence[RankFigures], of: int) -> list[list[RankFigures]]:
    """Split ranks by one figure after the other; the job has `of` ranks."""
    groups = [list(ranks)]
    smallest = max(POLICY.smallest_group, math.isqrt(of))
    few = of <= POLICY.few
    for figure in _SPLITTING:
        groups = [part for group in groups for part in _split_by(figure, group, smallest, few)]
    return groups


def _split_by(
    figure: FigurePolicy, group: list[RankFigures], smallest: int, few: bool
) -> list[list[RankFigures]]:
    known = sorted(
        ((value, figures.rank, figures) for figures in group if (value := figure.read(figures)) is not None),
        key=lambda item: item[:2],
    )
    if len(known) < 2 * smallest:
        return [group]
    share = figure.share_of_few if few else figure.share
    parts = [[known[0]]]
    for before, after in pairwise(known):
        if after[0] - before[0] > max(figure.floor, share * before[0]):
            parts.append([])
        parts[-1].append(after)
    large = [part for part in parts if len(part) >= smallest]
    strays = [item for part in parts if len(part) < smallest for item in part]
    if len(large) < 2 or len(strays) > max(1, POLICY.strays * len(known)):
        return [group]
    middles = [median(value for value, _, _ in part) for part in large]
    joined = [[figures for _, _, figures in part] for part in large]
    for value, _, figures in strays:
        joined[min(range(len(middles)), key=lambda at: abs(middles[at] - value))].append(figures)
    unknown = [figures for figures in group if figure.read(figures) is None]
    max(joined, key=len).extend(unknown)
    return joined


def _home(figures: RankFigures, groups: Sequence[list[RankFigures]]) -> list[RankFigures]:
    """Return the group whose memory without growth is nearest to a rank's."""
    base = figures.base or 0

    def distance(group: Sequence[RankFigures]) -> tuple[float, int]:
        middle = median(figures.base or 0 for figures in group) if group else 0
        return abs(middle - base), -len(group)

    return min(groups, key=distance)


# Outliers


def _uneven(ranks: Sequence[RankFigures]) -> set[int]:
    """Return the ranks that grow much more or much less than the others: their sizes cannot be compared."""
    column = _SortedFigure(GROWTH, ranks)
    return {rank.rank for rank in ranks if (value := rank.growth) is not None and column.is_far(value)}


def _outliers(
    figure: FigurePolicy,
    judged: Sequence[RankFigures],
    peers: Sequence[RankFigures],
    ranks: int,
) -> dict[int, RankDifference]:
    """Return the ranks of `judged` whose figure is far from that of `peers`.

    Two ranks are equally far from each other: only the one with more memory is returned or, for counts, the
    one with fewer. If half of the ranks or more would be outliers, none is.
    """
    column = _SortedFigure(figure, peers)
    among = {peer.rank for peer in peers}
    differences = {}
    for figures in judged:
        value = figure.read(figures)
        if value is None or not column.is_far(value, is_peer=figures.rank in among):
            continue
        above = value > column.usual(value, is_peer=figures.rank in among)
        side = "above" if ranks == 2 and figure.side == "both" else figure.side
        if side == "both" or above == (side == "above"):
            differences[figures.rank] = column.difference(value, is_peer=figures.rank in among)
    return differences if ranks == 2 or 2 * len(differences) < len(judged) else {}


class _SortedFigure:
    """One figure of all peers, sorted once: each of thousands of ranks may be compared with all others."""

    def __init__(self, figure: FigurePolicy, peers: Sequence[RankFigures]) -> None:
        self._figure = figure
        self._ordered = sorted(value for peer in peers if (value := figure.read(peer)) is not None)
        self._spread_of_all = self._spread(self._ordered) if len(self._ordered) > POLICY.exact else None

    def is_far(self, value: int, *, is_peer: bool = True) -> bool:
        """Whether a rank with this value is far from the peers, or from the others if it is one of them."""
        others = len(self._ordered) - is_peer
        if others < 1:
            return False
        middle = self.usual(value, is_peer=is_peer)
        share = self._figure.share_of_few if others < POLICY.few else self._figure.share
        distance = abs(value - middle)
        # The floor comes first: nearly all ranks are below it, and the spread may need a pass over all.
        if distance < max(self._figure.floor, share * middle):
            return False
        spread = self._spread_of_all
        if spread is None:
            spread = self._spread(self._without(value, is_peer))
        return distance > POLICY.deviations * spread

    def usual(self, value: int, *, is_peer: bool) -> float:
        """Return the median of the peers, without the rank that has this value if it is one of them."""
        gap = bisect_left(self._ordered, value) if is_peer else len(self._ordered)
        rest = len(self._ordered) - is_peer
        low, high = (rest - 1) // 2, rest // 2
        return (self._ordered[low + (low >= gap)] + self._ordered[high + (high >= gap)]) / 2

    def difference(self, value: int, *, is_peer: bool) -> RankDifference:
        """Return the comparison."""
        others = self._without(value, is_peer)
        return RankDifference(
            figure=self._figure.name,
            value=value,
            usual=round(median(others)),
            spread=round(self._spread(others)),
            peers=len(others),
        )

    def _without(self, value: int, is_peer: bool) -> list[int]:
        gap = bisect_left(self._ordered, value)
        return self._ordered[:gap] + self._ordered[gap + is_peer :]

    @staticmethod
    def _spread(values: Sequence[int]) -> float:
        middle = median(values)
        return float(median(abs(value - middle) for value in values))
