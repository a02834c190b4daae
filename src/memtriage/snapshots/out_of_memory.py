"""Out-of-memory errors in a recording: why the request could not be met, from what was free then. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from memtriage.messages.grammar.message import OomFields
from memtriage.messages.judge import judge_figures
from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.explanation import Label
from memtriage.model.findings import Finding
from memtriage.model.recording import NO_FRAMES, FreeRange, OomEvent
from memtriage.model.units import count, size
from memtriage.playbook.snapshots import ADVICE, FREE_MEMORY, FreeMemory, SnapshotCause
from memtriage.snapshots.sites import alive_at, owned_bytes
from memtriage.snapshots.view import DeviceView

_SHOWN: Final = 5
_CAUSES: Final[Mapping[Label, SnapshotCause]] = {
    "driver_refused_though_free": "allocator limit",
    "fragmentation": "free in holes",
}
"""What is wrong by the figures of the failure; the device is full where it is none of these."""


def oom_findings(view: DeviceView) -> list[Finding]:
    """Return findings for the first error and for private pools that had the memory; later errors follow."""
    if not view.ooms:
        return []
    oom = view.ooms[0]
    return [_finding(view, oom), *_private_pools(view, oom)]


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
    advice = ADVICE["private pool"]
    return [
        Finding(
            kind="private_pool",
            device=view.device,
            bytes=total,
            mechanism=advice.why,
            fix=advice.fix,
            playbook=advice.entry,
            evidence=[
                f"{size(oom.requested)} was refused; {size(total)} was free in private pools: {pools}",
                f"the default pool had {size(usable)} free",
            ],
        )
    ]


def _finding(view: DeviceView, oom: OomEvent) -> Finding:
    usable = [
        free_range
        for free_range in oom.free
        if free_range.stream == oom.stream and free_range.pool == DEFAULT_POOL
    ]
    elsewhere = [free_range for free_range in oom.free if free_range not in usable]
    label = _label(oom, usable)
    alive = owned_bytes(alive_at(view.replayed, oom.event), view.replayed.size, view.owners, view.sites)
    site = view.stacks[oom.stack].site
    biggest = next((row.site for row in alive if row.site != NO_FRAMES), None)
    evidence = [
        f"requested {size(oom.requested)}; {size(oom.allocated)} allocated, {size(oom.reserved)} reserved",
        *_free_lines(oom, usable, elsewhere),
        *_driver_line(oom, refused=label == "driver_refused_though_free"),
        "alive then: "
        + ", ".join(
            f"{row.owner} at {row.site} {size(row.bytes)}" for row in itertools.islice(alive, _SHOWN)
        ),
    ]
    if site == NO_FRAMES:
        evidence.append("the request has no Python frames (autograd's thread): the site named holds the most")
    if len(view.ooms) > 1:
        evidence.append(f"{len(view.ooms)} errors in the recording; this is the first")
    free = _free_memory(oom, usable, elsewhere)
    advice = ADVICE[_CAUSES.get(label, "device full")]
    return Finding(
        kind="out_of_memory",
        device=view.device,
        bytes=oom.requested,
        allocated_at=biggest if site == NO_FRAMES else site,
        mechanism=advice.why.format(free=FREE_MEMORY[free]),
        fix=advice.fix,
        playbook=advice.entry,
        phase=view.facts[oom.stack].phase if view.facts[oom.stack].phase != "none" else None,
        step=sum(end <= oom.event for end in view.steps.ends),
        evidence=evidence,
    )


def _free_lines(oom: OomEvent, usable: list[FreeRange], elsewhere: list[FreeRange]) -> list[str]:
    total = sum(free_range.size for free_range in usable)
    if not usable:
        lines = ["the allocator had no free block for this stream"]
    else:
        largest = ", ".join(size(free_range.size) for free_range in usable[:_SHOWN])
        lines = [
            f"{size(total)} free in {count(len(usable), 'block')} for this stream, the largest {largest}: "
            + ("none is large enough" if usable[0].size < oom.requested else "see the driver's line")
        ]
    if elsewhere:
        free = sum(free_range.size for free_range in elsewhere)
        lines.append(f"{size(free)} more is free for other streams or private pools, which cannot lend it")
    return lines


def _driver_line(oom: OomEvent, *, refused: bool) -> list[str]:
    if oom.device_free is None:
        return []
    if refused:
        return [
            f"the driver had {size(oom.device_free)} free: a limit of the allocator, not the device, refused"
        ]
    return [f"the driver had {size(oom.device_free)} free"]


def _free_memory(oom: OomEvent, usable: list[FreeRange], elsewhere: list[FreeRange]) -> FreeMemory:
    if sum(free.size for free in usable) >= oom.requested:
        return "in holes"
    return "elsewhere" if sum(free.size for free in elsewhere) >= oom.requested else "too little"


def _label(oom: OomEvent, usable: Sequence[FreeRange]) -> Label:
    """Judge the failure as its message would be: what this stream can't use counts as allocated there."""
    holes, free = sum(free_range.size for free_range in usable), oom.device_free or 0
    figures = OomFields(
        requested=oom.requested,
        total=oom.reserved + free,
        free=free,
        allocated=oom.reserved - holes,
        reserved_unallocated=holes,
    )
    return judge_figures(figures)[0]
