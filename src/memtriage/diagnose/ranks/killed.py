"""How ranks ended: which were killed, and whether the host was short of memory when they died."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.units import size
from memtriage.store.reader import RankRecord
from memtriage.store.records import HostSampleLine

Fate = Literal["ended", "running", "killed"]


@dataclass(frozen=True, slots=True)
class DeathPolicy:
    """When a rank's death is attributed to host memory although no kill was counted.

    Attributes:
        samples: last samples before its death to look at: memory may be freed between the last and the kill.
        near_limit: share of a limit in use; a process that is killed at its limit is rarely sampled there.
    """

    samples: int = 3
    near_limit: float = 0.95


POLICY: Final = DeathPolicy()


def fate(rank: RankRecord, *, live: bool = False) -> Fate:
    """Return how a rank ended. If it is on another machine and wrote no end, it was killed, unless `live`."""
    if rank.end is not None:
        return "ended"
    if rank.alive or (live and rank.alive is None):
        return "running"
    return "killed"


def host_limit_finding(rank: RankRecord, ranks: Sequence[RankRecord]) -> Finding | None:
    """Return a finding if host memory was short when the rank died; SIGKILL alone does not prove that."""
    before_death = rank.host[-POLICY.samples :]
    evidence = [line for sample in before_death[-1:] for line in _figures(sample)]
    strikes = _oom_kills(rank, ranks)
    pressure = max((_pressure(sample, rank.start.host_limit) for sample in before_death), default=0.0)
    if strikes:
        evidence.append(f"the cgroup's count of out-of-memory kills rose by {strikes} during the run")
        mechanism = "Host memory ran out: the kernel's out-of-memory killer struck in this process's cgroup."
    elif pressure >= POLICY.near_limit:
        evidence.append(f"at most {100 * (1 - pressure):.0f} % of the limit was left just before it died")
        mechanism = (
            "The process was killed while host memory was at its limit; who killed it is not in the record."
        )
    else:
        return None
    return Finding(
        kind="host_limit",
        device=DEVICE_HOST,
        rank=rank.start.rank,
        bytes=_held(before_death[-1]) if before_death else None,
        mechanism=mechanism,
        fix="Hold less in host memory (fewer or leaner DataLoader workers, smaller prefetch, less pinned or "
        "offloaded memory) or raise the limit; the kernel log or the scheduler's says what was killed.",
        playbook="M3",
        step=rank.last_step,
        evidence=evidence,
    )


def killed_note(rank: RankRecord, ranks: Sequence[RankRecord]) -> str:
    """Return what is known about the end of a killed rank, in a sentence."""
    seen = f"last seen at step {rank.last_step}, {rank.last_time_s:.0f} s after the start"
    figures = "; ".join(_figures(rank.host[-1])) if rank.host else "no host figures recorded"
    judged = "" if host_limit_finding(rank, ranks) else "; what killed it is not in the record"
    return f"{rank.name} was killed: {seen}; {figures}{judged}"


def _oom_kills(rank: RankRecord, ranks: Sequence[RankRecord]) -> int:
    """Return how many out-of-memory kills the surviving ranks of the machine counted."""
    own = [sample.oom_kill for sample in rank.host if sample.oom_kill is not None]
    if not own:
        return 0
    seen = [
        sample.oom_kill
        for peer in ranks
        if peer.start.host == rank.start.host
        for sample in peer.host
        if sample.oom_kill is not None
    ]
    return max(seen) - own[0]


def _pressure(sample: HostSampleLine, host_limit: int | None) -> float:
    """Return the share in use of a limit: of the cgroup, the machine, or the process itself."""
    shares = [0.0]
    if sample.cgroup_limit and sample.cgroup_usage is not None:
        shares.append((sample.cgroup_usage - (sample.cgroup_reclaimable or 0)) / sample.cgroup_limit)
    if host_limit and sample.available is not None:
        shares.append(1 - sample.available / host_limit)
    if host_limit and sample.pss is not None:
        shares.append((sample.pss + (sample.children_pss or 0)) / host_limit)
    return min(1.0, max(shares))


def _held(sample: HostSampleLine) -> int | None:
    own = sample.pss if sample.pss is not None else sample.rss
    return None if own is None else own + (sample.children_pss or 0)


def _figures(sample: HostSampleLine) -> list[str]:
    """Return the host figures of a sample in words."""
    when = "" if sample.time_s is None else f" {sample.time_s:.0f} s after the start"
    lines = []
    if sample.rss is not None:
        children = "" if sample.children_pss is None else f", its children {size(sample.children_pss)}"
        lines.append(f"the process had {size(sample.rss)} resident{children}{when}")
    if sample.cgroup_usage is not None:
        cache = (
            ""
            if sample.cgroup_reclaimable is None
            else f", {size(sample.cgroup_reclaimable)} of it page cache"
        )
        limit = f" of {size(sample.cgroup_limit)}" if sample.cgroup_limit else ""
        lines.append(f"its cgroup used {size(sample.cgroup_usage)}{limit}{cache}")
    if sample.available is not None:
        lines.append(f"the machine had {size(sample.available)} available")
    return lines
