"""The catalogue of known holders on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from rich.console import Console

from memtriage.model.holders import HolderHere
from memtriage.report.console import Page

_LABELS: Final = 17
_NO_LIBRARY: Final = "any program"
_CONDITIONS: Final = {
    "graphs": "CUDA graphs are captured that may be replayed",
    "backward": "a backward is under way or pending",
}


def render(here: Sequence[HolderHere], console: Console, *, every: bool) -> None:
    """Print the entries.

    Args:
        here: the entries.
        console: where.
        every: those too that do not apply to what is installed.
    """
    page = Page(console)
    shown = [holder for holder in here if holder.applies or every]
    page.line(
        (f"{len(here)} known holders", "bold"),
        f", {sum(holder.applies for holder in here)} of them in what is installed here",
    )
    versions = {holder.library: holder.version for holder in here if holder.versions}
    for library, version in versions.items():
        if library != _NO_LIBRARY:
            page.field(library, version or "not installed", labels=28)
    for library, group in groupby(shown, key=lambda holder: holder.library):
        page.heading(library)
        for holder in group:
            _entry(page, holder)
    if not every and len(shown) < len(here):
        page.gap()
        page.line((f"{len(here) - len(shown)} more are not installed: `memtriage holders --all`", "dim"))


def _entry(page: Page, holder: HolderHere) -> None:
    page.gap()
    page.line((f"  {holder.name}", "bold"), f"  {holder.kind}, cleared: {holder.policy}")
    some, never = holder.versions != "all", holder.policy == "never"
    facts = {
        "symbol": holder.symbol,
        "keeps": holder.holds,
        "versions": holder.versions if some else "",
        "here": holder.reason if some else "",
        "cleared by": holder.clears,
        "not by itself" if holder.policy == "on request" else "never": holder.why,
        "not while": "" if never else conditions(holder.forbidden),
        "refills": holder.refills,
    }
    for label, value in facts.items():
        if value:
            page.field(label, value, labels=_LABELS)


def conditions(forbidden: Iterable[str]) -> str:
    """When an entry must not be cleared, in words; a capture under way forbids all."""
    return "; ".join([*(_CONDITIONS[each] for each in forbidden), "a capture is under way"])
