"""The ranks of a run, compared, as a page draws them: a dot for each, and what is to be said in lines."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec
import numpy as np

from memtriage.diagnose.ranks.groups import COUNTS, GROWTH, SIZES
from memtriage.model.rank_groups import RankFigureName, RankFigures, RankGroups
from memtriage.model.report import RunReport
from memtriage.model.units import count
from memtriage.report.html.columns import pack
from memtriage.report.run.rank_words import heading, rank_lines, words_of

_PLOTTED: Final = 4096
"""Ranks that a plot has dots for; of more, those that stand out and every so many of the others."""
_LINES: Final = 40
_UNKNOWN: Final = -1
_ORDER: Final[tuple[RankFigureName, ...]] = (
    "allocated",
    "reserved",
    "peak",
    "growth",
    "resident",
    "steps",
    "marks",
)
_OWN_NAMES: Final[dict[RankFigureName, str]] = {
    "peak": "peak",
    "growth": "growth per step",
    "steps": "steps",
    "marks": "marks",
}


def compared_ranks(report: RunReport) -> dict[str, Any] | None:
    """Return what `assets/ranks.js` draws, with the lines above it; None for a run of one rank."""
    groups = report.rank_groups
    if isinstance(groups, msgspec.UnsetType) or not (groups.groups or groups.outliers):
        return None
    lines = rank_lines(report)
    what = {rank: line.what for line in lines if line.stands_out for rank in line.ranks}
    every = -(-len(groups.figures) // _PLOTTED)
    shown = [rank for at, rank in enumerate(groups.figures) if at % every == 0 or rank.rank in what]
    more = sum(len(line.ranks) for line in lines[_LINES:])
    return {
        "heading": heading(groups),
        "lines": [
            {"who": line.who, "what": line.what, "stands_out": line.stands_out} for line in lines[:_LINES]
        ],
        "more": f"and {count(more, 'more rank')}" if more else None,
        "plot": _plot(groups, shown, what),
    }


def _plot(groups: RankGroups, shown: list[RankFigures], what: dict[int, str]) -> dict[str, Any] | None:
    """Return the columns of the plot; None where no figure differs from rank to rank."""
    figures = []
    names = words_of(groups) | _OWN_NAMES
    for figure in sorted((GROWTH, *SIZES, *COUNTS), key=lambda figure: _ORDER.index(figure.name)):
        values = [_UNKNOWN if (value := figure.read(rank)) is None else value for rank in shown]
        if len(set(values) - {_UNKNOWN}) > 1:
            counts = figure in COUNTS
            packed = pack(np.asarray(values, np.int64))
            figures.append(
                {"key": figure.name, "name": names[figure.name], "counts": counts, "values": packed}
            )
    if not figures:
        return None
    group_of = {rank: place for place, group in enumerate(groups.groups, 1) for rank in group.ranks}
    said = Counter(str(differ.figure) for outlier in groups.outliers for differ in outlier.differs)
    chosen = max((str(figure["key"]) for figure in figures), key=lambda key: (said[key], key == "allocated"))
    return {
        "ranks": pack(np.asarray([rank.rank for rank in shown], np.int64)),
        "groups": pack(np.asarray([group_of.get(rank.rank, 0) for rank in shown], np.int64)),
        "figures": figures,
        "outliers": [{"rank": rank, "what": words} for rank, words in what.items()],
        "chosen": chosen,
    }
