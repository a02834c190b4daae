"""From counters and censuses to leaks, and to how small a leak would have been detected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from memtriage.diagnose.causes import one_a_cause
from memtriage.diagnose.growth.counter import CONFIRMING, WatchedCounter
from memtriage.diagnose.growth.holders import HolderGrowth, waits_for_collector
from memtriage.diagnose.growth.judged import NO_COUNTER, judge_counter, with_limit
from memtriage.diagnose.growth.judgment import join_host_part, with_unnamed, worth_reporting
from memtriage.diagnose.growth.proof import Proof
from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.diagnose.judge import POLICY as FINDING
from memtriage.diagnose.judge import (
    ScaleEvidence,
    data_finding,
    held_by,
    holder_finding,
    unexplained,
    unit_of,
    unnamed_growth,
)
from memtriage.diagnose.mechanisms import Held
from memtriage.model.census import GroupDetail
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged, JudgedScale
from memtriage.model.paths import is_native
from memtriage.model.position import Scale
from memtriage.model.units import MIB, size
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.schedule.investigation import Investigation
from memtriage.session.schedule.scale import ScaleScheduler
from memtriage.session.schedule.scheduler import CensusScheduler


@dataclass(frozen=True, slots=True)
class JudgmentPolicy:
    """When to believe a counter, and when to mention the garbage collector.

    Attributes:
        resident: part of native growth that the resident set must show. Not all: malloc may reuse what others
            have freed.
        noted: with this many bytes waiting for the collector, a program may run out of memory without a leak.
        unread: a counter that was not read in the last 16 positions, or in the last quarter of the run if
            that is longer, gets no detection limit. malloc's is not read while allocation sites are recorded.
    """

    resident: float = 0.5
    noted: int = MIB
    unread: tuple[float, int] = (0.25, 16)


POLICY: Final = JudgmentPolicy()


def find_leaks(scheduler: CensusScheduler, evidence: ScaleEvidence) -> list[Finding]:
    """Return what grows, largest first; growth of counters that no holder explains comes last.

    Args:
        scheduler: has the counters and the investigations.
        evidence: estimates of the counters, on its main scale.
    """
    main, within = scheduler.main, scheduler.within_steps
    data = main.data()
    held = [*_held_findings(main.investigation, main.growths(), evidence)]
    for investigation in within.done:
        of_microbatches = replace(evidence, scale="microbatch", collector_off=investigation.collector_off)
        held += _held_findings(investigation, within.growths(investigation), of_microbatches)
    held = join_host_part(held)
    findings = [finding for finding, _ in held]
    findings += (finding for growth in data if (finding := data_finding(growth, evidence)) is not None)
    facts_by_path = {path: facts for finding, facts in held if (path := finding.holder_path) is not None}
    leaks = one_a_cause(findings, facts_by_path)
    for counter, estimate in sorted(evidence.estimates.items()):
        if counter in CONFIRMING or main.names_all(counter) or _ends_by_itself(main, counter, estimate):
            continue
        since = estimate.onset or 0.0
        contradicts = main.counters.contradicts("host", POLICY.resident * estimate.rate, since)
        native = counter == "cpu"
        held_rate = main.held_rate(counter)
        containers = main.investigation.data.growing()
        unnamed = _kept_at_the_end(main, counter, evidence) or unnamed_growth(
            counter, evidence, leaks, held_rate, native and contradicts, data, containers,
            covered=main.covers_growth(counter),
        )  # fmt: skip
        if unnamed is not None:
            leaks = with_unnamed(leaks, unnamed)
    return worth_reporting(leaks)


def _kept_at_the_end(main: ScaleScheduler, counter: str, evidence: ScaleEvidence) -> Finding | None:
    """Make the finding of a holder that, at the only census, keeps about as much as a counter rose by.

    If a program makes no step and calls no module in a loop, no other census is taken.
    """
    estimate = evidence.estimates[counter]
    if evidence.scale != "second" or estimate.state != "growing" or len(main.investigation.taken) != 1:
        return None
    read = main.counters[counter].track.points().at
    start, end = float(read[0]), float(read[-1])
    as_fast_before = main.counters.rose(counter, estimate.rate, start, end)
    since = start if as_fast_before or estimate.onset is None else estimate.onset
    risen = estimate.rate * (end - since)
    least, most = (part * risen for part in FINDING.as_fast)
    of_counter = (each for each in main.investigation.history if each.group.device == counter)
    holding = min(of_counter, key=lambda each: abs(each.sizes[-1].nbytes - risen), default=None)
    if holding is None or not least <= holding.sizes[-1].nbytes <= most:
        return None
    reason = "it was only seen at the end: the program makes no step and calls no module in a loop"
    growth = HolderGrowth(holding, Proof("suspected", estimate.rate, 1, since, reason), lengthens=False)
    detail = main.investigation.details.get(holding.key, GroupDetail())
    return holder_finding(growth, detail, evidence)


_SCALES: Final[Mapping[Scale, JudgedScale]] = {"step": "step", "microbatch": "microbatch", "second": "time"}


def judge_devices(schedule: ScaleScheduler, readable: Mapping[str, bool]) -> dict[str, Judged]:
    """Return by device whether growth could be judged, and how small a leak would have been detected.

    A counter may rise without a leak: objects wait for the cyclic collector, a cache of generated code fills,
    or holders keep log entries and bounded containers. Then only a larger leak would have been detected. A
    device has no limit if other growth has a holder and is not a proven leak, or if growth is so uncertain
    that the limit would mean nothing.

    Args:
        schedule: has the counters.
        readable: by device, whether its counter could be read at a mark.
    """
    judged = {}
    scale = _SCALES[schedule.scale]
    for device, has_counter in readable.items():
        if not has_counter:
            judged[device] = NO_COUNTER
            continue
        counter = schedule.counters.get(device) or WatchedCounter(device)
        estimate, judgment = judge_counter(counter.track, scale, counter.policy)
        rises = estimate.state in ("growing", "undecided")
        open_rate = unexplained(estimate, schedule.harmless_rate(device), counter.policy)
        if rises and (not open_rate or _ends_by_itself(schedule, device, estimate)):
            judgment = with_limit(judgment, estimate.high, counter.track.points())
        if judgment.detection_limit is not None and _is_unread(schedule, counter):
            unit = unit_of(schedule.scale)
            reason = f"its counter was not read after {unit} {_last_read(counter):.4g}"
            judgment = Judged(scale=scale, points=judgment.points, reason=reason)
        note = _collector_note(schedule.investigation, device)
        judged[device] = msgspec.structs.replace(judgment, note=note)
    return judged


def _last_read(counter: WatchedCounter) -> float:
    return 0.0 if counter.track.last is None else counter.track.last[0]


def _is_unread(schedule: ScaleScheduler, counter: WatchedCounter) -> bool:
    """Return whether a counter was not read for so long at the end that no limit holds.

    Marks of time are too far apart to say.
    """
    part, positions = POLICY.unread
    since = schedule.now - _last_read(counter)
    return schedule.scale != "second" and since > max(positions, part * schedule.now)


def _collector_note(investigation: Investigation, device: str) -> str | None:
    """Return a note on the most memory that waited for the cyclic collector, if that was much."""
    most = max(investigation.waiting, key=lambda waiting: waiting.nbytes.get(device, 0), default=None)
    nbytes = 0 if most is None else most.nbytes.get(device, 0)
    if most is None or nbytes < POLICY.noted or investigation.collector_off:
        return None
    when = f"{unit_of(investigation.scale)} {most.position:.4g}"
    return f"{size(nbytes)} in garbage cycles of {most.of[device]} awaited the collector at {when}"


def _ends_by_itself(schedule: ScaleScheduler, device: str, estimate: GrowthEstimate) -> bool:
    """Return whether what seems to grow waits for the cyclic collector, or fills a bounded native cache."""
    if _awaits_collector(schedule.investigation, device, estimate.rate):
        return True
    return device == "cpu" and schedule.fills_with_code(estimate.onset or 0.0)


def _awaits_collector(investigation: Investigation, device: str, rate: float) -> bool:
    """Return whether what seems to grow waits for the cyclic collector, which will free it."""
    return not investigation.collector_off and waits_for_collector(investigation.waiting, device, rate)


def _held_findings(
    investigation: Investigation, growths: Sequence[HolderGrowth], evidence: ScaleEvidence
) -> Iterator[tuple[Finding, Held]]:
    """Yield findings of holders, each with the facts that its mechanism was inferred from."""
    period = round(investigation.period or 1) if investigation.scale == "microbatch" else 1
    for growth in growths:
        group = growth.holding.group
        if is_native(group.anchor) and _awaits_collector(investigation, group.device, growth.proof.rate):
            continue
        detail = investigation.details.get(group.key, GroupDetail())
        finding = holder_finding(growth, detail, evidence, period)
        if finding is not None:
            yield finding, held_by(growth, detail, evidence)


def limits_and_use(
    host: InUse | None, readings: Iterable[Reading], passing: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return by device the bytes at which memory runs out, and the bytes in use as that limit counts them.

    A GPU runs out of memory in the middle of a step, so memory that comes and goes counts as in use. Unused
    reserved memory does not: the allocator returns it before an allocation fails.

    Args:
        host: the process's use of host memory at a mark while the program ran.
        readings: the counters of that mark.
        passing: memory that comes and goes between marks, by device (`session.transient_peak`).
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
    """Return the bytes of a device that this process's allocator may use: its cap, or what others leave."""
    cap = cuda.per_process_limit(device)
    total = cuda.capacity(device)
    used, reserved = driver.used(device), cuda.counters(device).reserved
    if total is None or used is None or reserved is None:
        return cap
    free_for_us = total - max(0, used - reserved)
    return free_for_us if cap is None else min(cap, free_for_us)
