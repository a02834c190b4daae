"""From what a run's investigations brought to light to its leaks, and how long memory will last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memtriage.diagnose.judge import Evidence, group_finding, host_finding, unnamed_growth, without_repeats
from memtriage.model.census import GroupDetail
from memtriage.model.findings import Finding
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.investigation import Investigation


def find_leaks(investigations: Sequence[Investigation], evidence: Evidence) -> list[Finding]:
    """What grows, largest first; what the counters say and no census names comes last.

    Args:
        investigations: those that came to their second census.
        evidence: what the counters say.
    """
    found: list[Finding] = []
    for investigation in investigations:
        found += _of_one(investigation, evidence)
    named = without_repeats(found)
    # What the collector has yet to free rises too, and falls when it does.
    waiting = any(each.garbage_grows() for each in investigations)
    native = [holder for each in investigations for holder in each.native]
    for device in sorted(set(evidence.series) - {"shared"}):
        if device == "cpu" and waiting:
            continue
        unnamed = unnamed_growth(device, evidence, named, native)
        if unnamed is None:
            continue
        garbage = max((each.garbage_bytes(device) for each in investigations), default=0)
        if (unnamed.bytes_per_step or 0) > garbage:
            named.append(unnamed)
    return named


def _of_one(investigation: Investigation, evidence: Evidence) -> list[Finding]:
    last = investigation.points[-1].position
    found = []
    for growth in investigation.growths():
        finding = group_finding(
            growth,
            investigation.details.get(growth.key, GroupDetail()),
            evidence,
            scale=investigation.scale,
            last_step=last if investigation.scale == "step" else evidence.position.step,
            collector_off=investigation.collector_off,
            lengthening=growth.count == 0,
            period=investigation.period,
        )
        if finding is not None:
            found.append(finding)
    for host in investigation.host:
        other = host_finding(host.path, host.kind, host.nbytes, host.steps, host.allocated_at, evidence, last)
        if other is not None:
            other.stored_at = host.stored_at
            found.append(other)
    return found


def limits_and_use(
    host: InUse | None, readings: Iterable[Reading], passing: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes at which memory runs out, and bytes in use as that limit counts them, by device.

    On a GPU memory runs out in the middle of a step, so that what only passes counts as in use. What the
    allocator has reserved and nobody uses does not: it is given back before an allocation fails.

    Args:
        host: what the process had of the host's memory at a mark while the program ran.
        readings: the counters of that mark.
        passing: what comes and goes between marks, by device (`session.transient_peak`).
    """
    limits: dict[str, int] = {}
    used: dict[str, int] = {}
    if host is not None:
        limit_on_host = host_limit()
        for device in ("cpu", "host"):
            limits[device], used[device] = limit_on_host.bytes, counted(limit_on_host, host)
    for reading in readings:
        if reading.device.startswith("cuda:") and reading.allocated is not None:
            limit = device_limit(int(reading.device[5:]))
            if limit is not None:
                limits[reading.device] = limit
                used[reading.device] = reading.allocated + passing.get(reading.device, 0)
    return limits, used


def device_limit(device: int) -> int | None:
    """Bytes that this process's allocator may have of a device: the cap set, else what nobody else uses."""
    cap = cuda.per_process_limit(device)
    total = cuda.capacity(device)
    used, reserved = driver.used(device), cuda.counters(device).reserved
    if total is None or used is None or reserved is None:
        return cap
    free_for_us = total - max(0, used - reserved)
    return free_for_us if cap is None else min(cap, free_for_us)
