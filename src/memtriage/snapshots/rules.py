"""The findings of one device of a recording: each rule's causes, without telling one cause twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memtriage.model.findings import Finding
from memtriage.snapshots.growth import SiteGrowth
from memtriage.snapshots.leaks import GrowingSites, growths, leak_finding
from memtriage.snapshots.out_of_memory import oom_findings
from memtriage.snapshots.residue import find_residue, is_part_of, residue_finding
from memtriage.snapshots.stranding import (
    POLICY,
    LongPinnedSegment,
    fragmentation_finding,
    is_fragmented,
    pinned_for_long,
    stranded_by,
    strands_times,
    unused_streams,
)
from memtriage.snapshots.view import DeviceView


def judge(view: DeviceView, growing: Sequence[SiteGrowth]) -> list[Finding]:
    """What is wrong with a device: the error first, then the causes by bytes.

    One cause is one finding. What grows and stays with much else is a part of the residue; a growth that
    strands far more than it holds is told as fragmentation; segments that a leak or a residue pins are no
    fragmentation of their own.

    Args:
        view: the device.
        growing: the sites that grow from step to step.
    """
    causes = growths(view, growing)
    residue = find_residue(view, causes)
    pinned = pinned_for_long(view)
    parts = [cause for cause in causes if residue is not None and is_part_of(view, cause, residue)]
    alone = [cause for cause in causes if cause not in parts]
    strands = {one.sites: strands_times(view, one, pinned) for one in alone}
    stranding = [one for one in alone if strands[one.sites] >= POLICY.adds]

    findings: list[Finding] = []
    for one in alone:
        if one not in stranding:
            pinned = _without(pinned, stranded_by(view, pinned, one.lives))
    if residue is not None:
        explained = stranded_by(view, pinned, residue.lives)
        pinned = _without(pinned, explained)
        findings.append(residue_finding(view, residue, parts, sum(one.stranded for one in explained)))
    told: list[GrowingSites] = []
    if is_fragmented(view, pinned):
        findings.append(fragmentation_finding(view, pinned, stranding))
        told = [one for one in stranding if strands[one.sites] >= POLICY.dominates]
    findings += [leak_finding(view, one) for one in alone if one not in told]
    findings += unused_streams(view)
    findings.sort(key=lambda one: -(one.bytes or 0))
    return oom_findings(view) + findings


def _without(
    pinned: Sequence[LongPinnedSegment], explained: Sequence[LongPinnedSegment]
) -> list[LongPinnedSegment]:
    known = {segment.segment.address for segment in explained}
    return [segment for segment in pinned if segment.segment.address not in known]
