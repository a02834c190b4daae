"""Judge one device of a recording: the causes of all rules, each reported once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memtriage.allocator.settings import AllocatorSettings
from memtriage.model.findings import Finding
from memtriage.snapshots.growth import SiteGrowth
from memtriage.snapshots.leaks import GrowingSites, growths, leak_finding
from memtriage.snapshots.out_of_memory import oom_findings
from memtriage.snapshots.pools import pool_findings
from memtriage.snapshots.residue import find_residue, is_part_of, residue_finding
from memtriage.snapshots.stranding import (
    POLICY,
    LongPinnedSegment,
    fragmentation_findings,
    is_fragmented,
    pinned_for_long,
    stranded_by,
    strands_times,
)
from memtriage.snapshots.streams import stream_findings
from memtriage.snapshots.surplus import EXPANDABLE, surplus, surplus_finding, surplus_lines, tried
from memtriage.snapshots.view import DeviceView


def judge(view: DeviceView, growing: Sequence[SiteGrowth], settings: AllocatorSettings) -> list[Finding]:
    """Return the findings of a device: the out-of-memory error first, then the causes by bytes.

    One cause is one finding. Growth that is mostly residue is reported with the residue. Growth that strands
    far more than it holds is reported as fragmentation. Segments that a leak or a residue pins are not
    reported as fragmentation. Memory reserved beyond the peak of allocated is evidence of fragmentation where
    that is reported, and a finding of its own elsewhere.

    Args:
        view: the device.
        growing: the sites that grow from step to step.
        settings: of the allocator, as recorded.
    """
    causes = growths(view, growing)
    residue = find_residue(view, causes)
    pinned = pinned_for_long(view)
    parts = [cause for cause in causes if residue is not None and is_part_of(view, cause, residue)]
    alone = [cause for cause in causes if cause not in parts]
    strands = {cause.sites: strands_times(view, cause, pinned) for cause in alone}
    stranding = [cause for cause in alone if strands[cause.sites] >= POLICY.adds]

    findings: list[Finding] = []
    for cause in alone:
        if cause not in stranding:
            pinned = _without(pinned, stranded_by(view, pinned, cause.lives))
    if residue is not None:
        explained = stranded_by(view, pinned, residue.lives)
        pinned = _without(pinned, explained)
        findings.append(residue_finding(view, residue, parts, sum(segment.stranded for segment in explained)))
    as_fragmentation: list[GrowingSites] = []
    if is_fragmented(view, pinned):
        findings += fragmentation_findings(view, pinned, stranding, _expandable(view, settings))
        as_fragmentation = [cause for cause in stranding if strands[cause.sites] >= POLICY.dominates]
    findings += [leak_finding(view, cause) for cause in alone if cause not in as_fragmentation]
    if surplus(view):
        trial = tried(view, settings)
        fragmented = next((finding for finding in findings if finding.kind == "fragmentation"), None)
        if fragmented is None:
            findings.append(surplus_finding(view, trial))
        else:
            fragmented.evidence.extend(surplus_lines(view, trial))
    findings += stream_findings(view) + pool_findings(view)
    findings.sort(key=lambda finding: -(finding.bytes or 0))
    return oom_findings(view) + findings


def _expandable(view: DeviceView, settings: AllocatorSettings) -> tuple[int, int] | None:
    """Return bytes stranded in a replay as recorded and with expandable segments; None without events."""
    if not len(view.trace):
        return None
    trial = tried(view, settings)
    other = trial.others.get(EXPANDABLE)
    return None if other is None else (trial.same.end_stranded, other.end_stranded)


def _without(
    pinned: Sequence[LongPinnedSegment], explained: Sequence[LongPinnedSegment]
) -> list[LongPinnedSegment]:
    known = {segment.segment.address for segment in explained}
    return [segment for segment in pinned if segment.segment.address not in known]
