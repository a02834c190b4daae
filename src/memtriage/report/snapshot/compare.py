"""Two recordings side by side, on a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final

import msgspec
from rich.console import Console

from memtriage.model.comparison import DeviceChange, RecordingChange, SiteChange, ValueChange
from memtriage.model.findings import Finding
from memtriage.report.console import Page
from memtriage.report.snapshot.words import amount
from memtriage.report.styles import PLAIN_BAD, PLAIN_GOOD, PLAIN_WARN
from memtriage.report.text import KINDS, UNKNOWN, count, size

_SITES: Final = 20
_LABELS: Final = 22
_AMOUNT: Final = 10


def write_json(change: RecordingChange, stream: BinaryIO) -> None:
    """Write a comparison as one line of JSON, schema 1."""
    stream.write(msgspec.json.encode(change))
    stream.write(b"\n")
    stream.flush()


def render(change: RecordingChange, console: Console) -> None:
    """Print a comparison: findings first, then totals, then what changed by owner and by site."""
    page = Page(console)
    page.field("before", change.before, whole=True)
    page.field("after", change.after, whole=True)
    for device in change.devices:
        _device(page, device)


def _device(page: Page, device: DeviceChange) -> None:
    page.heading(device.device, _presence(device))
    for word, style, findings in (
        ("gone", PLAIN_GOOD, device.gone),
        ("new", PLAIN_BAD, device.new),
        ("still there", PLAIN_WARN, device.same),
    ):
        for finding in findings:
            page.field(word, _finding(finding), style=style, labels=_LABELS)
    _rows(
        page,
        (
            (figure.name, figure.bytes)
            for figure in device.figures
            if figure.bytes.before or figure.bytes.after
        ),
    )
    for title, rows in (
        ("By owner, at the peak", [(owner.owner, owner.at_peak) for owner in device.owners]),
        ("By owner, at the snapshot", [(owner.owner, owner.at_end) for owner in device.owners]),
    ):
        changed = [(name, held) for name, held in rows if held.before != held.after]
        if changed:
            page.heading(title)
            _rows(page, changed)
    _sites(page, device.sites)


def _presence(device: DeviceChange) -> str:
    if device.in_before and device.in_after:
        return ""
    return "in the first recording only" if device.in_before else "in the second recording only"


def _finding(finding: Finding) -> str:
    site = f" at {finding.allocated_at}" if finding.allocated_at else ""
    return f"{KINDS[finding.kind]}: {amount(finding)}{site}"


def _sites(page: Page, sites: Sequence[SiteChange]) -> None:
    if not sites:
        page.heading("By site", "nothing changed")
        return
    left_out = len(sites) - _SITES
    page.heading("By site", f"the {_SITES} biggest of {count(len(sites), 'change')}" if left_out > 0 else "")
    for site in sites[:_SITES]:
        page.gap()
        page.line((site.site, "cyan"), (f"  {site.owner}", "dim"))
        if site.was is not None:
            page.field("was", site.was, whole=True, labels=_LABELS)
        rows = (
            ("at the peak", site.at_peak),
            ("at the snapshot", site.at_end),
            ("growth per step", site.per_step),
        )
        _rows(page, ((name, held) for name, held in rows if held.before or held.after))


def _rows(page: Page, rows: Iterable[tuple[str, ValueChange]]) -> None:
    for name, change in rows:
        page.field(name, _in_words(change), labels=_LABELS)


def _in_words(change: ValueChange) -> str:
    course = f"{size(change.before):>{_AMOUNT}} -> {size(change.after):>{_AMOUNT}}"
    if change.by is None:
        return course if change.before is not None or change.after is not None else UNKNOWN
    return f"{course}  {_signed(change.by):>{_AMOUNT}}"


def _signed(by: int) -> str:
    return "the same" if by == 0 else f"{'+' if by > 0 else ''}{size(by)}"
