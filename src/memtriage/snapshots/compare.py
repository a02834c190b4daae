"""Compare two recordings: which owners and allocation sites hold more or less, which findings are gone.

A site is the same in both when file, function and line agree. Where the line moved, because the program was
changed above it, file and function are enough if both recordings have only one such site left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from memtriage.model.comparison import (
    DeviceChange,
    FigureChange,
    OwnerChange,
    RecordingChange,
    SiteChange,
    ValueChange,
)
from memtriage.model.findings import Finding
from memtriage.model.recording import OWNERS, DeviceRecording, OwnedBytes, Recording, SiteRow

_LINE: Final = re.compile(r":\d+ in ")


def compare(before: Recording, after: Recording) -> RecordingChange:
    """Return what changed from `before` to `after`, by device, owner and allocation site."""
    first = {device.device: device for device in before.devices}
    second = {device.device: device for device in after.devices}
    return RecordingChange(
        before=before.path,
        after=after.path,
        devices=[_device(name, first.get(name), second.get(name)) for name in {**first, **second}],
    )


def _device(name: str, before: DeviceRecording | None, after: DeviceRecording | None) -> DeviceChange:
    pairs = _paired(before.sites if before else (), after.sites if after else ())
    moved = {new.site: old.site for old, new in pairs if old is not None and new is not None}
    old, new = (list(device.findings) if device else [] for device in (before, after))
    known = {_identity(finding, {}) for finding in old}
    kept = {_identity(finding, moved) for finding in new}
    sites = [_site(*pair, before, after) for pair in pairs]
    changed = [site for site in sites if _differs(site.at_peak, site.at_end, site.per_step)]
    return DeviceChange(
        device=name,
        in_before=before is not None,
        in_after=after is not None,
        figures=_figures(before, after),
        owners=_owners(before, after),
        sites=sorted(
            changed, key=lambda site: (-_largest(site.at_peak, site.at_end, site.per_step), site.site)
        ),
        gone=[finding for finding in old if _identity(finding, {}) not in kept],
        new=[finding for finding in new if _identity(finding, moved) not in known],
        same=[finding for finding in new if _identity(finding, moved) in known],
    )


def _identity(finding: Finding, moved: dict[str, str]) -> tuple[str, str | None]:
    site = finding.allocated_at
    return finding.kind, moved.get(site, site) if site is not None else None


def _figures(before: DeviceRecording | None, after: DeviceRecording | None) -> list[FigureChange]:
    old, new = _figures_of(before), _figures_of(after)
    return [
        FigureChange(name=name, bytes=ValueChange(before=old.get(name), after=new.get(name)))
        for name in {**old, **new}
    ]


def _figures_of(device: DeviceRecording | None) -> dict[str, int]:
    if device is None:
        return {}
    end, peak = device.end, device.peak
    return {
        "peak allocated": peak.allocated,
        "peak reserved": peak.reserved,
        "peak stranded": peak.stranded,
        "allocated": end.allocated,
        "reserved": end.reserved,
        "requested": end.requested,
        "rounding": end.rounding,
        "awaiting": end.awaiting,
        "releasable": end.releasable,
        "private and free": end.private_pools_free,
        "stranded": end.stranded,
        "private pools": end.private_pools,
    }


def _owners(before: DeviceRecording | None, after: DeviceRecording | None) -> list[OwnerChange]:
    old_peak, new_peak = (_by_owner(device.peak.owners) if device else None for device in (before, after))
    old_end, new_end = (_by_owner(device.owners) if device else None for device in (before, after))
    rows = [
        OwnerChange(
            owner=owner,
            at_peak=_change(old_peak, new_peak, owner),
            at_end=_change(old_end, new_end, owner),
        )
        for owner in OWNERS
    ]
    changed = [row for row in rows if _differs(row.at_peak, row.at_end)]
    return sorted(changed, key=lambda row: -_largest(row.at_peak, row.at_end))


def _by_owner(rows: Iterable[OwnedBytes]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total[row.owner] += row.bytes
    return total


def _change(before: Counter[str] | None, after: Counter[str] | None, key: str) -> ValueChange:
    return ValueChange(
        before=None if before is None else before[key], after=None if after is None else after[key]
    )


def _paired(
    before: Sequence[SiteRow], after: Sequence[SiteRow]
) -> list[tuple[SiteRow | None, SiteRow | None]]:
    """Return each site of either recording with its counterpart; None where there is none."""
    old = {row.site: row for row in before}
    new = {row.site: row for row in after}
    pairs: list[tuple[SiteRow | None, SiteRow | None]] = [
        (row, new[name]) for name, row in old.items() if name in new
    ]
    only_old, only_new = (
        _by_place(row for name, row in rows.items() if name not in counterparts)
        for rows, counterparts in ((old, new), (new, old))
    )
    for place in {**only_old, **only_new}:
        old_rows, new_rows = only_old.get(place, []), only_new.get(place, [])
        if len(old_rows) == len(new_rows) == 1:
            pairs.append((old_rows[0], new_rows[0]))
        else:
            pairs += [(row, None) for row in old_rows]
            pairs += [(None, row) for row in new_rows]
    return pairs


def _by_place(rows: Iterable[SiteRow]) -> dict[str, list[SiteRow]]:
    """Group sites by file and function."""
    places: dict[str, list[SiteRow]] = {}
    for row in rows:
        places.setdefault(_LINE.sub(" in ", row.site, count=1), []).append(row)
    return places


def _site(
    old: SiteRow | None, new: SiteRow | None, before: DeviceRecording | None, after: DeviceRecording | None
) -> SiteChange:
    row = new or old
    assert row is not None
    return SiteChange(
        site=row.site,
        was=old.site if old and new and old.site != new.site else None,
        owner=row.owner,
        at_peak=ValueChange(before=_held(old, before, "at_peak"), after=_held(new, after, "at_peak")),
        at_end=ValueChange(before=_held(old, before, "at_end"), after=_held(new, after, "at_end")),
        per_step=ValueChange(before=_growth(old, before), after=_growth(new, after)),
        allocations=ValueChange(
            before=_held(old, before, "allocations"), after=_held(new, after, "allocations")
        ),
    )


def _held(row: SiteRow | None, device: DeviceRecording | None, name: str) -> int | None:
    if device is None:
        return None
    return 0 if row is None else int(getattr(row, name))


def _growth(row: SiteRow | None, device: DeviceRecording | None) -> int | None:
    if row is not None:
        return row.per_step
    return 0 if device is not None and device.steps.count else None


def _differs(*changes: ValueChange) -> bool:
    """Whether a figure changed. One that only one recording has counts unless it is 0."""
    return any(change.before != change.after and (change.before or change.after) for change in changes)


def _largest(*changes: ValueChange) -> int:
    """Bytes of the largest change; a figure that a recording does not have counts as 0."""
    return max(abs((change.after or 0) - (change.before or 0)) for change in changes)
