"""The catalogue of known holders on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.console import Console

from memtriage.model.holders import HolderHere
from memtriage.report.console import Page

_LABELS: Final = 17
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
        (f", {sum(holder.applies for holder in here)} of them in what is installed here", ""),
    )
    for library, version in _libraries(here):
        page.field(library, version or "not installed", labels=28)
    for library, group in groupby(shown, key=lambda holder: holder.library):
        page.heading(library)
        for holder in group:
            _entry(page, holder)
    if not every and len(shown) < len(here):
        page.gap()
        page.line((f"{len(here) - len(shown)} more are not installed: `memtriage holders --all`", "dim"))


def _libraries(here: Iterable[HolderHere]) -> Iterator[tuple[str, str | None]]:
    seen: dict[str, str | None] = {holder.library: holder.version for holder in here if holder.versions}
    return ((library, version) for library, version in seen.items() if library not in _NO_LIBRARY)


_NO_LIBRARY: Final = ("any program",)


def _entry(page: Page, holder: HolderHere) -> None:
    page.gap()
    page.line((f"  {holder.name}", "bold"), (f"  {holder.kind}, cleared: {holder.policy}", ""))
    page.field("symbol", holder.symbol, labels=_LABELS)
    page.field("keeps", holder.holds, labels=_LABELS)
    if holder.versions != "all":
        page.field("versions", holder.versions, labels=_LABELS)
        page.field("here", holder.reason, labels=_LABELS)
    if holder.clears:
        page.field("cleared by", holder.clears, labels=_LABELS)
    if holder.why:
        page.field("not by itself" if holder.policy == "on request" else "never", holder.why, labels=_LABELS)
    if holder.policy != "never":
        page.field("not while", conditions(holder.forbidden), labels=_LABELS)
    if holder.refills:
        page.field("refills", holder.refills, labels=_LABELS)


def conditions(forbidden: Iterable[str]) -> str:
    """When an entry must not be cleared, in words; a capture under way forbids all."""
    return "; ".join([*(_CONDITIONS[each] for each in forbidden), "a capture is under way"])
