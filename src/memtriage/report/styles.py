"""The colors and weights of terminal reports, by what they say. The words are those of rich."""

from __future__ import annotations

from typing import Final, Literal

Severity = Literal["good", "warn", "bad"]
"""How much a verdict matters."""

GOOD: Final = "bold green"
WARN: Final = "bold yellow"
BAD: Final = "bold red"

SEVERITY_STYLES: Final[dict[Severity, str]] = {"good": GOOD, "warn": WARN, "bad": BAD}
"""Verdicts."""

PLAIN_GOOD: Final = "green"
PLAIN_WARN: Final = "yellow"
"""The same inside a report, where bold is for headings."""

HOLDER: Final = "cyan"
"""What keeps memory alive."""
FIX: Final = PLAIN_GOOD
"""What to change."""


def color_of(severity: Severity) -> str:
    """Return the style of a severity without its weight."""
    return SEVERITY_STYLES[severity].removeprefix("bold ")
