"""Findings and notes about host memory that is wasted or runs short although nothing leaks.

None of these changes a verdict. Each rule is a function of the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtriage.diagnose.host.evidence import (
    HostEvidence,
    PinnedBlock,
    PinnedUse,
    Population,
    WorkerGrowth,
)
from memtriage.model.blocks import pinned_block
from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.units import MIB, count, size
from memtriage.playbook import host as words


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """When host memory is worth a finding.

    Attributes:
        retained: bytes that malloc keeps idle; for less, a trim is not worth its page faults.
        retained_share: the same as a share of the resident set.
        copied: bytes that one worker un-shares, if the parent holds a large container of Python objects.
        copied_unexplained: the same if it holds none. One full garbage collection in a worker of a process
            that has imported torch un-shares 68 MiB (measured), in larger programs more.
        population: bytes of Python objects in one container that make it a large one.
        shared_memory_share: share of `/dev/shm` in use above which the next batches may not fit; that ends in
            a bus error. A default Docker container has 64 MiB.
        shared_memory_grown: bytes by which it must have grown during the run; the rest belongs to others.
        limit_share: share of the control group's limit in use, without page cache. It is lower than
            `near_limit` of `ranks/killed.py`, which is for processes that died, to leave time to act.
        limit_job_share: least share of the limit that this job itself must use.
        swapped: bytes swapped out: each page comes back by a page fault that waits for a disk.
        pinned_waste: bytes that rounding adds to page-locked memory.
        pinned_waste_share: the same as a share of the requested bytes.
        mapped_files: bytes by which resident mapped files must have grown to be mentioned.
        transient: bytes by which a peak must exceed all marks to be mentioned.
        transient_share: the same as a share of the highest mark.
    """

    retained: int = 192 * MIB
    retained_share: float = 0.2
    copied: int = 64 * MIB
    copied_unexplained: int = 192 * MIB
    population: int = 32 * MIB
    shared_memory_share: float = 0.8
    shared_memory_grown: int = 8 * MIB
    limit_share: float = 0.9
    limit_job_share: float = 0.25
    swapped: int = 64 * MIB
    pinned_waste: int = 64 * MIB
    pinned_waste_share: float = 0.1
    mapped_files: int = 256 * MIB
    transient: int = 256 * MIB
    transient_share: float = 0.25


POLICY: Final = HostPolicy()


def host_findings(evidence: HostEvidence) -> list[Finding]:
    """Return every finding about host memory that the evidence supports."""
    findings = [
        malloc_retention(evidence),
        worker_copy_on_write(evidence),
        shared_memory(evidence),
        host_limit(evidence),
        pinned_rounding(evidence.pinned),
    ]
    return [finding for finding in findings if finding is not None]


def malloc_retention(evidence: HostEvidence) -> Finding | None:
    """Freed memory that malloc keeps resident although the program will not need it soon.

    What a step frees and the next one takes again is not waste, and is subtracted.
    """
    kept = evidence.retention
    if kept is None:
        return None
    taken_again = evidence.taken_by_steps or 0
    idle = min(kept.resident - taken_again, kept.trimmable)
    if idle < max(POLICY.retained, POLICY.retained_share * kept.rss):
        return None
    reused = f"; steps reuse {size(taken_again)} of it" if taken_again else ""
    return Finding(
        kind="malloc_retention",
        device=DEVICE_HOST,
        bytes=idle,
        mechanism=words.RETENTION,
        fix=words.trim(idle),
        playbook="M3",
        step=kept.step,
        evidence=[
            f"{size(kept.resident)} free and resident in {count(kept.arenas, 'arena')} of malloc, of "
            f"{size(kept.rss)} resident{reused}",
            f"malloc_trim(0) would return {size(kept.trimmable)}; gc.collect() does not return it",
        ],
    )


def worker_copy_on_write(evidence: HostEvidence) -> Finding | None:
    """Workers that copy their parent's memory page by page, because reading an object writes its refcount."""
    large = evidence.population
    if large is not None and large.nbytes < POLICY.population:
        large = None
    floor = POLICY.copied_unexplained if large is None else POLICY.copied
    grown = [worker for worker in evidence.workers if worker.copied >= floor]
    if not grown:
        return None
    named = sorted({worker.name for worker in grown})
    return Finding(
        kind="worker_copy_on_write",
        device=DEVICE_HOST,
        bytes=sum(worker.copied for worker in grown),
        holder_path=None if large is None else large.path,
        mechanism=words.COPY_ON_WRITE,
        fix=words.SHARE_DATA,
        playbook="M3",
        evidence=[*_worker_lines(grown, named), *([] if large is None else [_population_line(large)])],
    )


def _worker_lines(grown: list[WorkerGrowth], names: list[str]) -> list[str]:
    least, most = min(worker.copied for worker in grown), max(worker.copied for worker in grown)
    each = size(most) if least == most else f"{size(least)} to {size(most)}"
    count = "1 process" if len(grown) == 1 else f"{len(grown)} processes"
    private = max(worker.private for worker in grown)
    return [
        f"{count} ({', '.join(names)}) un-shared {each} each while watched; pages of their own now: up to "
        f"{size(private)} each"
    ]


def _population_line(population: Population) -> str:
    about = size(population.nbytes)
    return f"the parent's {population.kind} has {population.entries:,} entries, about {about}"


def shared_memory(evidence: HostEvidence) -> Finding | None:
    """`/dev/shm` is nearly full, and this job uses it."""
    use = evidence.shared_memory
    if use is None or use.grown < POLICY.shared_memory_grown:
        return None
    if use.used < POLICY.shared_memory_share * use.total:
        return None
    return Finding(
        kind="shared_memory",
        device=DEVICE_HOST,
        bytes=use.used,
        mechanism=words.SHARED_MEMORY,
        fix=words.MORE_SHARED_MEMORY,
        playbook="M3",
        evidence=[
            f"/dev/shm was at {size(use.used)} of {size(use.total)}, {100 * use.used / use.total:.0f} %",
            f"{size(use.grown)} of it came while this job was watched",
        ],
    )


def host_limit(evidence: HostEvidence) -> Finding | None:
    """The control group's limit is near, or memory was swapped out."""
    lines: list[str] = []
    nbytes = 0
    near = evidence.pressure
    if (
        near is not None
        and near.usage >= POLICY.limit_share * near.limit
        and near.job >= POLICY.limit_job_share * near.limit
    ):
        nbytes = near.job
        lines.append(
            f"the control group was at {size(near.usage)} of {size(near.limit)}, page cache left out; "
            f"{size(near.limit - near.usage)} were left, though the machine had {size(near.available)} "
            "available: tools that ask the machine do not see this limit"
        )
    if evidence.swapped >= POLICY.swapped:
        nbytes = nbytes or evidence.swapped
        lines.append(f"{size(evidence.swapped)} of this process and its children were swapped out")
    if not lines:
        return None
    return Finding(
        kind="host_limit",
        device=DEVICE_HOST,
        bytes=nbytes,
        mechanism=words.HOST_LIMIT,
        fix=words.HOLD_LESS,
        playbook="M3",
        evidence=lines,
    )


def pinned_rounding(use: PinnedUse | None) -> Finding | None:
    """Page-locked memory that only exists because torch rounds blocks up to powers of two."""
    if use is None:
        return None
    asked = sum(block.nbytes for block in use.blocks)
    by_rule = sum(rounding(block) for block in use.blocks)
    waste = min(by_rule, max(use.owned - asked, 0))  # a setting may have switched the rounding off
    if waste < max(POLICY.pinned_waste, POLICY.pinned_waste_share * asked):
        return None
    largest = max(use.blocks, key=rounding)
    return Finding(
        kind="pinned_rounding",
        device=DEVICE_HOST,
        bytes=waste,
        holder_path=largest.path,
        mechanism=words.PINNED_ROUNDING,
        fix=words.pinned_remedy(use.torch_version),
        playbook="M3",
        evidence=[
            f"{size(asked)} asked for by {len(use.blocks)} tensors, {size(use.owned)} taken from the driver",
            f"the largest part: {size(largest.nbytes)} rounded up to "
            f"{size(largest.nbytes + rounding(largest))}",
        ],
    )


def rounding(block: PinnedBlock) -> int:
    """Bytes that torch's allocator adds to a block.

    >>> rounding(PinnedBlock(3 << 20, None)) == 1 << 20, rounding(PinnedBlock(1 << 20, None))
    (True, 0)
    """
    return pinned_block(block.nbytes) - block.nbytes


def host_notes(evidence: HostEvidence) -> list[str]:
    """Notes on what looks like a problem but is not, and on peaks that marks do not show."""
    notes = []
    files, before = evidence.mapped_files, evidence.mapped_files_first
    if files is not None and before is not None and files - before >= POLICY.mapped_files:
        notes.append(
            f"{size(files)} of the resident set are mapped files, {size(files - before)} more than at first: "
            "page cache that the kernel takes back when memory is short, not a leak"
        )
    peak, high = evidence.peak_rss, evidence.highest_rss
    if peak is not None and high is not None:
        above = peak - high
        if above >= max(POLICY.transient, POLICY.transient_share * high):
            notes.append(
                f"host memory peaked at {size(peak)}, {size(above)} above the highest reading between steps "
                f"({size(high)}): a transient, as of loading or copying; memtriage.host_step() shows which "
                "call makes it"
            )
    return notes
