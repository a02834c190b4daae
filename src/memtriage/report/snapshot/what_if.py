"""A recording under other allocator settings, on a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from memtriage.allocator.what_if import Scenario, WhatIfOutcome
from memtriage.model.units import count, size
from memtriage.report.console import Page
from memtriage.report.styles import PLAIN_BAD

Devices = Sequence[tuple[str, Sequence[Scenario]]]
"""Each device (`cuda:N`) with its scenarios."""

_LABELS: Final = 28


def as_json(devices: Devices) -> dict[str, Any]:
    """Return the outcomes as JSON has them, schema 1. Sizes are bytes."""
    outcomes = [
        {
            "device": device,
            "scenarios": [
                {"name": one.name, **asdict(one.outcome), "fits": one.outcome.fits} for one in scenarios
            ],
        }
        for device, scenarios in devices
    ]
    return {"schema": 1, "devices": outcomes}


def render(devices: Devices, console: Console) -> None:
    """Print a line for each setting: what it would have reserved, and whether memory would have sufficed."""
    page = Page(console)
    for device, scenarios in devices:
        page.heading(device, "the recorded allocations and frees, replayed under other settings")
        for scenario in scenarios:
            style = "" if scenario.outcome.fits else PLAIN_BAD
            page.field(scenario.name, _in_words(scenario.outcome), style=style, whole=True, labels=_LABELS)


def _in_words(outcome: WhatIfOutcome) -> str:
    if outcome.failed_at is not None:
        return f"out of memory at event {outcome.failed_at}"
    words = (
        f"peak {size(outcome.peak_reserved)} reserved; at the end {size(outcome.end_reserved)}, "
        f"of which {size(outcome.end_stranded)} stranded"
    )
    if not outcome.recorded_ooms:
        return words
    avoided = outcome.recorded_ooms - outcome.met_ooms
    met = f"; {count(outcome.met_ooms, 'out-of-memory error')} met" if outcome.met_ooms else ""
    return words + met + (f"; {count(avoided, 'out-of-memory error')} avoided" if avoided else "")
