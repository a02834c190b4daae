"""Judge one device of a recording: its out-of-memory error, and the causes of all rules, each once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from memtriage.allocator.settings import AllocatorSettings
from memtriage.messages.grammar.message import OomFields
from memtriage.messages.judge import judge_figures
from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.explanation import Label
from memtriage.model.findings import Finding
from memtriage.model.recording import NO_FRAMES, OomEvent
from memtriage.model.units import count, size
from memtriage.playbook.snapshots import ADVICE, FREE_MEMORY, FreeMemory, SnapshotCause
from memtriage.snapshots.leaks import (
    GrowingSites,
    find_residue,
    growths,
    is_part_of,
    leak_finding,
    residue_finding,
)
from memtriage.snapshots.owners import alive_at, owned_bytes
from memtriage.snapshots.stranding import (
    ADDS,
    DOMINATES,
    fragmentation_findings,
    is_fragmented,
    pinned_for_long,
    pool_findings,
    stranded_by,
    strands_times,
    stream_findings,
    surplus,
    surplus_finding,
    surplus_lines,
    tried,
)
from memtriage.snapshots.view import DeviceView


def judge(view: DeviceView, growing: Mapping[int, float], settings: AllocatorSettings) -> list[Finding]:
    """Return the findings of a device: the out-of-memory error first, then the causes by bytes.

    One cause is one finding. Growth that is mostly residue is reported with the residue. Growth that strands
    far more than it holds is reported as fragmentation. Segments that a leak or a residue pins are not
    reported as fragmentation. Memory reserved beyond the peak of allocated is evidence of fragmentation where
    that is reported, and a finding of its own elsewhere. `growing` has the bytes per step of sites.
    """
    causes = growths(view, growing)
    residue = find_residue(view, causes)
    pinned = pinned_for_long(view)
    parts = [cause for cause in causes if residue is not None and is_part_of(view, cause, residue)]
    alone = [cause for cause in causes if cause not in parts]
    strands = [(cause, strands_times(view, cause, pinned)) for cause in alone]
    stranding = [cause for cause, times in strands if times >= ADDS]

    findings: list[Finding] = []
    for cause in alone:
        if cause not in stranding:
            explained = stranded_by(view, pinned, cause.lives)
            pinned = [each for each in pinned if each not in explained]
    if residue is not None:
        explained = stranded_by(view, pinned, residue.lives)
        pinned = [each for each in pinned if each not in explained]
        findings.append(residue_finding(view, residue, parts, sum(segment.stranded for segment in explained)))
    as_fragmentation: list[GrowingSites] = []
    fragmented, above = is_fragmented(pinned), surplus(view) > 0
    trial = tried(view, settings) if len(view.trace) and (fragmented or above) else {}
    if fragmented:
        findings += fragmentation_findings(view, pinned, stranding, trial)
        as_fragmentation = [cause for cause, times in strands if times >= DOMINATES]
    findings += [leak_finding(view, cause) for cause in alone if cause not in as_fragmentation]
    if above and not fragmented:
        findings.append(surplus_finding(view, trial))
    elif above:
        first = next(finding for finding in findings if finding.kind == "fragmentation")
        first.evidence.extend(surplus_lines(view, trial))
    findings += stream_findings(view) + pool_findings(view)
    findings.sort(key=lambda finding: -(finding.bytes or 0))
    # Later errors follow from the first.
    errors = [_out_of_memory(view, view.ooms[0]), *_private_pools(view, view.ooms[0])] if view.ooms else []
    return errors + findings


# Out-of-memory errors: why the request could not be met, from what was free then

_SHOWN: Final = 5
_CAUSES: Final[Mapping[Label, SnapshotCause]] = {
    "driver_refused_though_free": "allocator limit",
    "fragmentation": "free in holes",
}
"""What is wrong by the figures of the failure; the device is full where it is none of these."""


def _private_pools(view: DeviceView, oom: OomEvent) -> list[Finding]:
    """Find private pools that had the requested bytes free while the default pool had not."""
    parked: Counter[tuple[int, int]] = Counter()
    for free_range in oom.free:
        parked[free_range.pool] += free_range.size
    usable = parked.pop(DEFAULT_POOL, 0)
    total = parked.total()
    if usable >= oom.requested or total < oom.requested:
        return []
    pools = ", ".join(f"pool {pool} {size(free)}" for pool, free in parked.most_common(_SHOWN))
    evidence = [
        f"{size(oom.requested)} was refused; {size(total)} was free in private pools: {pools}",
        f"the default pool had {size(usable)} free",
    ]
    return [view.finding("private_pool", "private pool", evidence, bytes=total)]


def _out_of_memory(view: DeviceView, oom: OomEvent) -> Finding:
    usable = [each.size for each in oom.free if each.stream == oom.stream and each.pool == DEFAULT_POOL]
    holes, free = sum(usable), oom.device_free or 0
    elsewhere = sum(each.size for each in oom.free) - holes
    # Judged as its message would be: what this stream can't use counts as allocated there.
    figures = OomFields(
        requested=oom.requested,
        total=oom.reserved + free,
        free=free,
        allocated=oom.reserved - holes,
        reserved_unallocated=holes,
    )
    label = judge_figures(figures)[0]
    alive = owned_bytes(alive_at(view.replayed, oom.event), view.replayed.size, view.owners, view.sites)
    site = view.stacks[oom.stack].site
    biggest = next((row.site for row in alive if row.site != NO_FRAMES), None)
    evidence = [
        f"requested {size(oom.requested)}; {size(oom.allocated)} allocated, {size(oom.reserved)} reserved",
        "the allocator had no free block for this stream",
    ]
    if usable:
        largest = ", ".join(map(size, usable[:_SHOWN]))
        fits = "none is large enough" if usable[0] < oom.requested else "see the driver's line"
        blocks = count(len(usable), "block")
        evidence[1] = f"{size(holes)} free in {blocks} for this stream, the largest {largest}: {fits}"
    if elsewhere:
        evidence.append(
            f"{size(elsewhere)} more is free for other streams or private pools, which cannot lend it"
        )
    if oom.device_free is not None:
        refused = label == "driver_refused_though_free"
        limit = ": a limit of the allocator, not the device, refused" if refused else ""
        evidence.append(f"the driver had {size(oom.device_free)} free{limit}")
    largest = ", ".join(f"{row.owner} at {row.site} {size(row.bytes)}" for row in alive[:_SHOWN])
    evidence.append(f"alive then: {largest}")
    if site == NO_FRAMES:
        evidence.append("the request has no Python frames (autograd's thread): the site named holds the most")
    if len(view.ooms) > 1:
        evidence.append(f"{len(view.ooms)} errors in the recording; this is the first")
    where: FreeMemory = "elsewhere" if elsewhere >= oom.requested else "too little"
    cause, phase = _CAUSES.get(label, "device full"), view.facts[oom.stack].phase
    return view.finding(
        "out_of_memory",
        cause,
        evidence,
        bytes=oom.requested,
        allocated_at=biggest if site == NO_FRAMES else site,
        mechanism=ADVICE[cause].why.format(free=FREE_MEMORY["in holes" if holes >= oom.requested else where]),
        phase=phase if phase != "none" else None,
        step=sum(end <= oom.event for end in view.steps.ends),
    )
