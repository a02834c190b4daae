"""The page of a memory snapshot: one HTML file, to be opened anywhere, that loads nothing.

The numbers of a recording of a million events do not fit into a page, nor can anybody see them all: charts
get the instants that matter (`report/html/downsample.py`), tables the biggest rows, and each says what it
leaves out. The limits below keep the file under `html.shell.LARGEST` bytes; devices share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.findings import Finding
from memtriage.model.recording import (
    NO_FRAMES,
    OWNERS,
    DeviceRecording,
    FreeRange,
    OomEvent,
    Recording,
    SiteRow,
)
from memtriage.model.units import count, duration, size
from memtriage.model.version import __version__
from memtriage.report.html.columns import Texts
from memtriage.report.html.shell import report_page
from memtriage.report.labels import KINDS
from memtriage.report.snapshot.map import segment_map
from memtriage.report.snapshot.timeline import timeline
from memtriage.report.snapshot.words import (
    OWNER_LOOKS,
    PRIVATE_FREE,
    amount,
    facts,
    level,
    verdict,
    where,
)

_TIMELINE_CHARACTERS: Final = 750_000
_MAP_PARTS: Final = 28_000
_SITE_ROWS: Final = 1200
_TEXT_CHARACTERS: Final = 300_000
"""Characters of sites and frames after which call stacks are left out."""
_OOMS: Final = 3
_FREE_ROWS: Final = 40

_ABOUT: Final = (
    "Sizes are bytes in binary units. Allocated: blocks in use. Reserved: what the allocator has from the "
    "driver. Stranded: free, but it cannot go back to the driver, because a block in use pins its segment. "
    "Releasable: free, and empty_cache() returns it.",
    "Everything on this page is in this file; it loads nothing.",
)

_LABELS: Final = 12


def html(recording: Recording) -> str:
    """Return the page of a recording: at most `html.shell.LARGEST` bytes for a million events."""
    name = Path(recording.path).name
    return report_page(name, _data(recording, name), "map.js", "snapshot_segments.js", "snapshot.js")


def _data(recording: Recording, name: str) -> dict[str, Any]:
    texts = Texts()
    share = max(1, len(recording.devices))
    devices = [_device(recording, device, texts, share) for device in recording.devices]
    return {
        "brand": f"memtriage {__version__} · memory snapshot",
        "title": name,
        "facts": " · ".join(_facts(recording)),
        "owners": [{"name": owner, "color": OWNER_LOOKS[owner].color} for owner in OWNERS],
        "devices": devices,
        "about": [*recording.notes, *_ABOUT],
        "texts": texts.all,
    }


def _facts(recording: Recording) -> list[str]:
    facts = []
    ends = [int(device.events.time_us[-1]) for device in recording.devices if len(device.events)]
    if any(ends):  # older releases of torch recorded no times
        facts.append(f"recorded until {datetime.fromtimestamp(max(ends) / 1e6, UTC):%Y-%m-%d %H:%M} UTC")
    facts.append(count(sum(len(device.events) for device in recording.devices), "event"))
    conf = str(recording.settings.get("PYTORCH_CUDA_ALLOC_CONF") or "default settings")
    facts.append(f"allocator: {conf}")
    return facts


def _device(recording: Recording, device: DeviceRecording, texts: Texts, share: int) -> dict[str, Any]:
    weight, word, sentence = verdict(device)
    return {
        "device": device.device,
        "verdict": {"level": weight, "word": word, "text": sentence},
        "summary": f"{word}: {sentence}.",
        "steps": device.steps.count,
        "findings": [_finding(finding) for finding in device.findings],
        "tiles": _tiles(device),
        "timeline": timeline(device, _TIMELINE_CHARACTERS // share),
        "owners": _owners(device),
        "sites": _sites(recording, device, texts, _SITE_ROWS // share),
        "map": segment_map(device, texts, _MAP_PARTS // share),
        "ooms": [_oom(recording, device, oom, texts) for oom in device.ooms[:_OOMS]],
        "notes": [*_labels(device), *device.notes],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "level": level(finding),
        "words": KINDS[finding.kind],
        "amount": amount(finding),
        "facts": facts(finding, " · "),
    }


def _tiles(device: DeviceRecording) -> list[dict[str, str | None]]:
    end, peak = device.end, device.peak
    began = int(device.events.time_us[0]) if len(device.events) else peak.time_us
    when = "before the first event" if peak.event < 0 else f"after {duration((peak.time_us - began) / 1e6)}"
    tiles = [
        ("peak allocated", peak.allocated, f"{when}, {size(peak.reserved)} reserved"),
        ("allocated", end.allocated, f"{size(end.requested)} asked for, {size(end.rounding)} rounding"),
        ("reserved", end.reserved, count(len(device.segments), "segment")),
        ("stranded", end.stranded, f"free, pinned in {count(len(device.pinned), 'segment')}"),
        ("releasable", end.releasable, "empty_cache() returns it"),
    ]
    if end.awaiting:
        tiles.append(("awaiting a stream", end.awaiting, "freed, but a stream still uses it"))
    if end.private_pools:
        tiles.append(("private pools", end.private_pools, "of reserved, outside the default pool"))
    if end.private_pools_free:
        tiles.append(("private and free", end.private_pools_free, PRIVATE_FREE))
    return [{"label": label, "value": size(value), "detail": detail} for label, value, detail in tiles]


def _owners(device: DeviceRecording) -> list[dict[str, Any]]:
    at_peak: Counter[str] = Counter()
    at_end: Counter[str] = Counter()
    for total, rows in ((at_peak, device.peak.owners), (at_end, device.owners)):
        for row in rows:
            total[row.owner] += row.bytes
    return [
        {
            "name": owner,
            **OWNER_LOOKS[owner]._asdict(),
            "at_peak": at_peak[owner],
            "at_end": at_end[owner],
        }
        for owner in dict.fromkeys((*OWNERS, *at_peak, *at_end))
        if at_peak[owner] or at_end[owner]
    ]


def _labels(device: DeviceRecording) -> Iterator[str]:
    for row in device.labels[:_LABELS]:
        blocks = f"labelled {row.label} ({count(row.blocks, 'block')})"
        yield f"{blocks}: {size(row.at_peak)} at the peak, {size(row.at_end)} at the snapshot"


def _sites(recording: Recording, device: DeviceRecording, texts: Texts, limit: int) -> dict[str, Any]:
    shown, rest = device.sites[:limit], device.sites[limit:]
    note = count(len(device.sites), "site")
    if rest:
        alive = size(sum(row.at_end for row in rest))
        note = f"the {len(shown):,} biggest of {note}; the rest holds {alive} at the snapshot"
    return {"rows": [_site(recording, row, texts) for row in shown], "note": note}


def _site(recording: Recording, row: SiteRow, texts: Texts) -> list[Any]:
    """Return a row of the table, in the order in which `assets/snapshot.js` reads it."""
    frames: tuple[str, ...] = ()
    if 0 <= row.stack < len(recording.stacks) and texts.characters < _TEXT_CHARACTERS:
        frames = recording.stacks[row.stack].frames
    return [
        texts.add(row.site),
        OWNERS.index(row.owner),
        row.at_peak,
        row.at_end,
        row.count_at_end,
        row.allocations,
        row.allocated,
        row.per_step,
        [texts.add(frame) for frame in frames],
    ]


def _oom(recording: Recording, device: DeviceRecording, oom: OomEvent, texts: Texts) -> dict[str, Any]:
    after = (oom.time_us - int(device.events.time_us[0])) / 1e6
    site = recording.stacks[oom.stack].site if oom.stack >= 0 else NO_FRAMES
    fits = sum(block.size >= oom.requested for block in oom.free)
    free = f"{size(sum(block.size for block in oom.free))} in {count(len(oom.free), 'free block')}"
    return {
        "when": f"after {duration(after)}, event {oom.event:,}",
        "requested": oom.requested,
        "site": texts.add(site),
        "device_free": oom.device_free,
        "allocated": oom.allocated,
        "reserved": oom.reserved,
        "free_words": f"{free}; {fits:,} of them {'is' if fits == 1 else 'are'} big enough",
        "free": [
            {
                "size": block.size,
                "where": where(block.pool, block.stream),
                "remark": _remark(block, oom),
            }
            for block in oom.free[:_FREE_ROWS]
        ],
    }


def _remark(block: FreeRange, oom: OomEvent) -> str:
    """Return why a free block did not help."""
    remarks = []
    if block.stream != oom.stream:
        remarks.append("kept for another stream")
    if block.pool != DEFAULT_POOL:
        remarks.append("of a private pool")
    if block.whole:
        remarks.append("a whole segment")
    return ", ".join(remarks)
