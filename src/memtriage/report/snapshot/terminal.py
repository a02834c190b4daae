"""A recording on a terminal: what is wrong first, then what was alive, and what strands memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
from rich.console import Console

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.findings import Finding
from memtriage.model.recording import DeviceRecording, OwnedBytes, PinnedSegment, Recording
from memtriage.model.units import count, size
from memtriage.report.console import BULLET, Page
from memtriage.report.labels import KINDS
from memtriage.report.plot import area
from memtriage.report.snapshot.json_form import stranded_by
from memtriage.report.snapshot.words import PRIVATE_FREE, amount, facts, level, verdict
from memtriage.report.styles import SEVERITY_STYLES

_LABELS: Final = 20
_OWNERS: Final = 12
_SITES: Final = 12
_SEGMENTS: Final = 5
_PINS: Final = 3


def render(recording: Recording, console: Console) -> None:
    """Print a recording, device by device."""
    page = Page(console)
    page.line((recording.path, "bold"))
    for note in recording.notes:
        page.field("note", note, labels=_LABELS)
    for device in recording.devices:
        _device(page, device)


def _device(page: Page, device: DeviceRecording) -> None:
    facts = [count(len(device.events), "event"), count(len(device.segments), "segment")]
    if device.steps.count:
        facts.append(f"{count(device.steps.count, 'step')} (by {device.steps.source})")
    page.heading(device.device, page.dot.join(facts))
    weight, word, sentence = verdict(device)
    page.verdict(word, SEVERITY_STYLES[weight], sentence)
    for number, finding in enumerate(device.findings, start=1):
        _finding(page, number, finding)
    _figures(page, device)
    _owners(page, "At the peak", device.peak.owners, _peak_detail(page, device))
    _owners(page, "At the snapshot", device.owners, f"{size(device.end.allocated)} allocated")
    _sites(page, device)
    _labelled(page, device)
    _stranded(page, device.pinned)
    page.bullets("Notes", device.notes)


def _finding(page: Page, number: int, finding: Finding) -> None:
    style = SEVERITY_STYLES[level(finding)]
    page.line((f"  {number}. {KINDS[finding.kind]}", style), f"  {amount(finding)}")
    for fact in facts(finding, page.dot):
        page.fact(fact, labels=_LABELS)


def _figures(page: Page, device: DeviceRecording) -> None:
    end = device.end
    page.heading("Memory at the snapshot")
    for label, nbytes, words in (
        ("reserved", end.reserved, ""),
        ("allocated", end.allocated, f"{size(end.requested)} asked for, {size(end.rounding)} rounding"),
        ("awaiting streams", end.awaiting, ""),
        ("releasable", end.releasable, "what empty_cache() returns"),
        ("stranded", end.stranded, "free, but pinned by live blocks in the same segment"),
        ("private pools", end.private_pools, "part of reserved"),
        ("private and free", end.private_pools_free, PRIVATE_FREE),
    ):
        if nbytes or label in ("reserved", "allocated"):
            page.named(label, size(nbytes), words=words)
    if len(device.events) > 1:
        _chart(page, device)


def _chart(page: Page, device: DeviceRecording) -> None:
    allocated = device.timeline.allocated
    low, high = int(allocated.min()), int(allocated.max())
    width = max(10, page.width - _LABELS)
    columns = [int(part.max()) for part in np.array_split(allocated, min(width, len(allocated)))]
    lines = area(columns, width=width, ascii_only=page.ascii_only)
    page.field("allocated", *lines, labels=_LABELS, whole=True)
    page.field("", f"{size(low)} to {size(high)}, event by event", labels=_LABELS)


def _peak_detail(page: Page, device: DeviceRecording) -> str:
    peak = device.peak
    figures = (("allocated", peak.allocated), ("reserved", peak.reserved), ("stranded", peak.stranded))
    words = [f"{size(amount)} {word}" for word, amount in figures]
    if peak.event < 0:
        words.append("before the first event")
    return page.dot.join(words)


def _owners(page: Page, title: str, rows: Iterable[OwnedBytes], detail: str) -> None:
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.owner] += row.bytes
    page.heading(title, detail)
    for owner, total in totals.most_common(_OWNERS):
        page.named(owner, size(total))


def _labelled(page: Page, device: DeviceRecording) -> None:
    if not device.labels:
        return
    page.heading("Labels of the program", "at the peak, at the snapshot")
    for row in device.labels[:_SITES]:
        page.sized([size(row.at_peak), size(row.at_end)], f"{row.label}  ({count(row.blocks, 'block')})")


def _sites(page: Page, device: DeviceRecording) -> None:
    page.heading("Allocation sites", "at the peak, at the snapshot, more each step")
    for row in device.sites[:_SITES]:
        growth = f"+{size(row.per_step)}" if row.per_step else ""
        page.sized([size(row.at_peak), size(row.at_end), growth], f"{row.site}  ({row.owner})")
    if len(device.sites) > _SITES:
        page.line((f"  {count(len(device.sites) - _SITES, 'more site')}", "dim"))


def _stranded(page: Page, pinned: tuple[PinnedSegment, ...]) -> None:
    if not pinned:
        return
    total = sum(segment.stranded for segment in pinned)
    page.heading("Stranded", f"{size(total)} in {count(len(pinned), 'segment')}, the worst first")
    groups = stranded_by(pinned)
    if len(groups) > 1:
        for (stream, pool), amount in groups:
            words = "" if pool == DEFAULT_POOL else f", private pool {pool}"
            page.sized([size(amount)], f"stream {stream:#x}{words}")
    for segment in pinned[:_SEGMENTS]:
        pins = [
            f"{size(pin.size)} at {pin.address:#x}, {owner}, {pin.site or 'site not recorded'}"
            for pin, owner in list(zip(segment.pins, segment.owners, strict=True))[:_PINS]
        ]
        if len(segment.pins) > _PINS:
            pins.append(f"{len(segment.pins) - _PINS} more")
        where = f"{size(segment.stranded)} of {size(segment.segment.size)} at {segment.segment.address:#x}"
        page.line(f"  {where}, pinned by", indent=4)
        for pin in pins:
            page.line(f"    {BULLET}{pin}", indent=6)
