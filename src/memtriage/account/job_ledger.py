"""The closed ledger of a whole job on one host: this process and its children, shared pages counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.units import size
from memtriage.observe.cgroup import CgroupMemory, cgroup_memory
from memtriage.observe.host import ChildSample, HostSample, ShmUse, children, dev_shm, host_sample


def job_ledger(
    own: HostSample,
    below: Iterable[ChildSample],
    shm: ShmUse | None,
    group: CgroupMemory | None,
    work: Mapping[int, str] = {},
) -> Ledger:
    """Divide the proportional set sizes of all processes into private pages and shares of common pages.

    Children that do the same work, or have one name, are one row. If the kernel does not report proportional
    set sizes, resident sets are taken, and shared pages count in every process.

    Args:
        own: `observe.host.host_sample()`.
        below: `observe.host.children()`.
        shm: `observe.host.dev_shm()`, to say what limits the job.
        group: `observe.cgroup.cgroup_memory()`, for the same.
        work: what children are for, by process, where that is known.
    """
    by_name: dict[str, list[ChildSample]] = defaultdict(list)
    for child in below:
        by_name[work.get(child.pid, child.name)].append(child)
    rows = _rows("this process", [own], "")
    for name, processes in by_name.items():
        count = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
        rows += _rows(name, processes, count)
    rows = [row for row in rows if row.bytes]
    return Ledger(device="job", total=sum(row.bytes for row in rows), source=_source(shm, group), rows=rows)


def take_job_ledger() -> Ledger:
    """Take the job's ledger now. The kernel walks the resident pages of every process: 10 ms per 4 GiB."""
    return job_ledger(host_sample(), children(), dev_shm(), cgroup_memory())


def _rows(name: str, processes: Iterable[HostSample | ChildSample], count: str) -> list[LedgerRow]:
    private = shared = 0
    for process in processes:
        proportional = process.pss if process.pss is not None else process.rss or 0
        unshared = min(process.uss or 0, proportional)
        private += unshared
        shared += proportional - unshared
    words = f"; {count}" if count else ""
    return [
        LedgerRow(row=f"{name}: pages of its own", bytes=private, detail=f"freed when it ends{words}"),
        LedgerRow(
            row=f"{name}: its share of common pages",
            bytes=shared,
            detail=f"mapped by several processes, counted once in all{words}",
        ),
    ]


def _source(shm: ShmUse | None, group: CgroupMemory | None) -> str:
    parts = ["smaps_rollup of every process"]
    if group is not None and group.usage is not None:
        limit = "no limit" if group.limit is None else f"limit {size(group.limit)}"
        cache = "" if group.inactive_file is None else f", {size(group.inactive_file)} of it page cache"
        kills = "" if not group.oom_kill else f", {group.oom_kill} kills for memory so far"
        parts.append(f"cgroup: {size(group.usage)} charged{cache}, {limit}{kills}")
    if shm is not None:
        parts.append(f"/dev/shm: {size(shm.used)} of {size(shm.total)} used")
    return "; ".join(parts)
