"""The page of a comparison: one HTML file, to be opened anywhere, that loads nothing.

It says what the terminal says, and draws every measured step and the memory of every variant.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from memtriage.model.trials import TargetRow, TrialsReport, VariantRow
from memtriage.model.version import __version__
from memtriage.report.html.shell import report_page
from memtriage.report.trials.words import (
    MEMORY,
    TIME,
    VERDICTS,
    cells,
    facts,
    legend,
    remarks,
    sentence,
    target,
    target_result,
    trial_counts,
    values,
)

_DRAWN_STEPS: Final = 20_000
"""Steps that the chart draws, of all trials together; with more each trial is thinned evenly."""
_LEVELS: Final = {"met": "good", "missed": "bad", "undecided": "warn"}
_ABOUT: Final = (
    "Each trial is a fresh process. Time per step: the median over steps after the warm-up of the slowest "
    "rank's time, then the median over trials. Ratios are taken within rounds; their interval is that of the "
    "median by order statistics, which assumes no distribution.",
    "Sizes are the highest after the warm-up, of the highest rank, in binary units.",
    "Everything on this page is in this file; it loads nothing.",
)


def html(report: TrialsReport) -> str:
    """Return the page of a comparison."""
    return report_page(report.name, _data(report), "trials.js")


def _data(report: TrialsReport) -> dict[str, Any]:
    word, level = VERDICTS[report.verdict]
    return {
        "brand": f"memtriage {__version__} · compare",
        "title": report.name,
        "facts": " · ".join(facts(report)),
        "verdict": {"level": level, "word": word, "text": sentence(report)},
        "legend": legend(report),
        "columns": [cell.column for cell in cells(report, report.variants[0])],
        "mark": report.mark,
        "variants": [_variant(report, row) for row in report.variants],
        "values": [
            {
                "name": name,
                "rows": [
                    [row.name, values(row, name, report.baseline)] for row in report.variants if row.finished
                ],
            }
            for name in report.variants[0].values
        ],
        "targets": [_target(row) for row in report.targets],
        "remarks": remarks(report),
        "about": list(_ABOUT),
    }


def _variant(report: TrialsReport, row: VariantRow) -> dict[str, Any]:
    time = row.figures.get(TIME)
    memory = [row.figures.get(metric) for metric in MEMORY[report.device]]
    ranks = [() if figure is None else figure.by_rank.values() for figure in memory]
    every = max(1, -(-sum(variant.steps for variant in report.variants) // _DRAWN_STEPS))
    return {
        "name": row.name,
        "baseline": row.baseline,
        "trials": trial_counts(row),
        "cells": [[cell.value, cell.text, cell.below.replace("\n", ", ")] for cell in cells(report, row)],
        "interval": None if time is None or time.spread is None else [time.spread.low, time.spread.high],
        "ranks": [[min(values), max(values)] if len(values) > 1 else None for values in ranks],
        "steps": [[round(step, 9) for step in islice(trial.steps, 0, None, every)] for trial in row.trials],
    }


def _target(row: TargetRow) -> dict[str, Any]:
    return {
        "level": _LEVELS[row.verdict],
        "verdict": row.verdict,
        "words": target(row),
        "result": target_result(row),
    }
