"""From what was followed during a run to its leaks, and how long memory will last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from memtriage.diagnose.causes import one_a_cause
from memtriage.diagnose.growth.counter import WITNESSES, Counter
from memtriage.diagnose.growth.holders import HolderGrowth, waits_for_collector
from memtriage.diagnose.growth.judged import NO_COUNTER, judge_counter
from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.diagnose.judge import SPANS, Evidence, data_finding, held_by, holder_finding, unnamed_growth
from memtriage.diagnose.mechanisms import Held
from memtriage.model.census import GroupDetail
from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale
from memtriage.model.paths import is_native
from memtriage.model.position import Scale
from memtriage.model.units import size
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.schedule.investigation import Investigation
from memtriage.session.schedule.scale import ScaleScheduler
from memtriage.session.schedule.scheduler import CensusScheduler


def find_leaks(scheduler: CensusScheduler, evidence: Evidence) -> list[Finding]:
    """What grows, largest first; what the counters say and no census names comes last.

    Args:
        scheduler: has what was followed.
        evidence: what the counters say, on its main scale.
    """
    main, within = scheduler.main, scheduler.within_steps
    data = main.data()
    held = [*_held(main.investigation, main.growths(), evidence)]
    for investigation in within.done:
        of_microbatches = replace(evidence, scale="microbatch", collector_off=investigation.collector_off)
        held += _held(investigation, within.growths(investigation), of_microbatches)
    held = _with_host_part(held)
    found = [finding for finding, _ in held]
    found += (finding for growth in data if (finding := data_finding(growth, evidence)) is not None)
    named = one_a_cause(found, {path: facts for one, facts in held if (path := one.holder_path) is not None})
    for counter, estimate in sorted(evidence.estimates.items()):
        if counter in WITNESSES or _ends_by_itself(main, counter, estimate):
            continue
        since = estimate.onset or 0.0
        contradicts = main.contradicts("host", _RESIDENT_SHARE * estimate.rate, since)
        native = counter == "cpu"
        held_rate = main.held_rate(counter)
        unnamed = unnamed_growth(counter, evidence, named, held_rate, native and contradicts, data)
        if unnamed is not None:
            named.append(unnamed)
    return named


_RESIDENT_SHARE: Final = 0.5
"""Part of native growth that the resident set has to show: malloc may fill what others have freed."""


_EXPLAINED: Final = 0.7
"""Part of a counter's rate that what has a holder must explain: malloc rounds."""
_SCALES: Final[Mapping[Scale, JudgedScale]] = {"step": "step", "microbatch": "microbatch", "second": "time"}


def judge_devices(followed: ScaleScheduler, read: Mapping[str, bool]) -> dict[str, Judged]:
    """Return by device whether growth could be judged, and how small a leak would have been found.

    Where what awaits the cyclic collector makes a counter rise, a cache of generated code that fills, or what
    holders keep without a leak (log entries, containers with a bound), a leak that is larger than that would
    show. What else has a holder and was not proven to be a leak leaves the device without a limit.

    Args:
        followed: has the counters.
        read: by device, whether its counter could be read at a mark.
    """
    found = {}
    scale = _SCALES[followed.scale]
    for device, readable in read.items():
        if not readable:
            found[device] = NO_COUNTER
            continue
        counter = followed.counters.get(device) or Counter(device)
        estimate, said = judge_counter(counter.track, scale, counter.policy)
        rises = estimate.state in ("growing", "undecided")
        harmless = followed.investigation.harmless_rate(device, estimate.onset or 0.0)
        explained = harmless >= _EXPLAINED * estimate.rate
        if rises and (explained or _ends_by_itself(followed, device, estimate)):
            limit = DetectionLimit(math.ceil(estimate.high), "second" if scale == "time" else "step")
            said = Judged(scale=scale, points=said.points, detection_limit=limit)
        found[device] = msgspec.structs.replace(said, note=_awaits_collector(followed.investigation, device))
    return found


_WORTH_A_NOTE: Final = 2**20
"""Bytes that await the collector from which on a program may run out of memory without a leak."""


def _awaits_collector(investigation: Investigation, device: str) -> str | None:
    most = max(investigation.waiting, key=lambda one: one.nbytes.get(device, 0), default=None)
    nbytes = 0 if most is None else most.nbytes.get(device, 0)
    if most is None or nbytes < _WORTH_A_NOTE or investigation.collector_off:
        return None
    when = f"{SPANS[investigation.scale].removesuffix('s')} {most.position:.4g}"
    return f"{size(nbytes)} in garbage cycles of {most.of[device]} awaited the collector at {when}"


def _ends_by_itself(followed: ScaleScheduler, device: str, estimate: GrowthEstimate) -> bool:
    """Whether what seems to grow awaits the cyclic collector, or fills a native cache that has a bound."""
    if _waits(followed.investigation, device, estimate.rate):
        return True
    return device == "cpu" and followed.fills_with_code(estimate.onset or 0.0)


def _waits(investigation: Investigation, device: str, rate: float) -> bool:
    """Whether what seems to grow awaits the cyclic collector, which will free it."""
    return not investigation.collector_off and waits_for_collector(investigation.waiting, device, rate)


def _held(
    investigation: Investigation, grown: Sequence[HolderGrowth], evidence: Evidence
) -> Iterator[tuple[Finding, Held]]:
    """Findings of holders, each with what its mechanism was told by."""
    period = round(investigation.period or 1) if investigation.scale == "microbatch" else 1
    for growth in grown:
        group = growth.holding.group
        if is_native(group.anchor) and _waits(investigation, group.device, growth.proof.rate):
            continue
        detail = investigation.details.get(group.key, GroupDetail())
        finding = holder_finding(growth, detail, evidence, period)
        if finding is not None:
            yield finding, held_by(growth, detail, evidence.position)


def _with_host_part(held: Iterable[tuple[Finding, Held]]) -> list[tuple[Finding, Held]]:
    """Tell what a holder of storages on a GPU keeps in host memory with these, as it is the same leak."""
    whole = [*held]
    on_gpu = {facts.anchor: finding for finding, facts in whole if finding.device.startswith("cuda:")}
    kept = []
    for finding, facts in whole:
        other = on_gpu.get(facts.anchor) if finding.device == DEVICE_HOST else None
        if other is None:
            kept.append((finding, facts))
        else:
            other.evidence.append(
                f"beside it {size(finding.bytes)} of host memory: nodes of the autograd graph"
            )
    return kept


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
