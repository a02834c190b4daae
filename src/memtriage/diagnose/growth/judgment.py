"""Judge growth from the evidence of a run: what leaks, and how small a leak would have been found. Pure.

`judge` is the whole judgment. It reads nothing but its argument, so that a record can be judged again. The
walk from a rate to its record: a sentence (`report/growth_words.py`) <- a `Leak` (`facts.py`) <- `Rise.rate`
(`attribution.py`) <- a counter's `Growth` (`estimate.py`) and a holder's sightings (`evidence.py`) <- lines
of the record (`model/evidence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from memtriage.diagnose.causes import memory_of, one_a_cause
from memtriage.diagnose.code_cache import fills_with_code
from memtriage.diagnose.growth import roles
from memtriage.diagnose.growth.attribution import POLICY as ATTRIBUTION
from memtriage.diagnose.growth.attribution import (
    DataRise,
    HolderRise,
    Open,
    accumulates,
    attribute,
    contradicts,
)
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.estimate import detection_limit
from memtriage.diagnose.growth.events import event_of
from memtriage.diagnose.growth.evidence import (
    CODE,
    CONFIRMING,
    ENOUGH_MARKS,
    Comparison,
    Counter,
    Evidence,
    Sighting,
)
from memtriage.diagnose.growth.facts import Counted, JudgedDevice, Leak, Per, Unexplained, Waiting
from memtriage.diagnose.held import Held
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import DataSeen, HolderSeen, Role, Situation
from memtriage.model.findings import DEVICE_HOST, Projection
from memtriage.model.judged import DetectionLimit, JudgedScale
from memtriage.model.paths import HolderPath, SegmentKind, has, is_native
from memtriage.model.position import Scale
from memtriage.model.units import MIB

NO_COUNTER: Final = JudgedDevice(obstacle="no counter")
_SCALES: Final[Mapping[Scale, JudgedScale]] = {"step": "step", "microbatch": "microbatch", "second": "time"}
_PER: Final[Mapping[Scale, Per]] = {"step": "step", "microbatch": "micro-batch", "second": "second"}


@dataclass(slots=True)
class Judgment:
    """What the evidence of a run shows of growth.

    Attributes:
        leaks: what grows, fastest first; growth of counters that no holder explains comes last.
        judged: by device, whether growth could be judged, and how small a leak would have been found.
        counters: with their growth, on the main scale.
        rises: what grew between censuses on the main scale, leak or not.
    """

    leaks: list[Leak] = field(default_factory=list)
    judged: dict[str, JudgedDevice] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    rises: list[HolderRise | DataRise] = field(default_factory=list)


def judge(evidence: Evidence, *, limits: bool = True) -> Judgment:
    """Judge the growth of a run.

    Args:
        evidence: all of the run so far.
        limits: state how small a leak would have been found, which takes 20 ms per device.
    """
    main = evidence.main
    basis = _Basis(evidence, main)
    judgment = Judgment(counters=dict(basis.counters), rises=attribute(main))
    found = list(_of_holders(basis, judgment.rises))
    # Without steps, the run itself is compared from backward to backward.
    within_steps = [] if main.scale == "microbatch" and len(main.censuses) > 1 else evidence.steps
    for within in within_steps:
        of_step = _Basis(evidence, within, basis.counters)
        rises = [rise for rise in attribute(within) if _goes_on(evidence, within, rise)]
        found += _of_holders(of_step, rises)
    leaks = one_a_cause([*join_host_part(found), *_of_data(basis, judgment.rises)])
    for name in sorted(basis.counters):
        if name not in CONFIRMING and not _ends_by_itself(basis, name):
            unnamed = _unnamed(basis, name, judgment.rises, leaks)
            leaks = leaks if unnamed is None else one_a_cause([*leaks, unnamed])
    judgment.leaks = worth_reporting(leaks)
    if limits:
        judgment.judged = _judged(evidence)
    _add_roles(judgment, evidence, limits=limits)
    return judgment


def _add_roles(judgment: Judgment, evidence: Evidence, *, limits: bool) -> None:
    """Judge the other processes of the job by the same rules."""
    found: list[tuple[Role, Leak]] = []
    for name, of_role in evidence.roles.items():
        role = of_role.role
        if role is None or not role.group:
            continue
        judged = None
        if not roles.is_small(of_role):
            of_role.counts = evidence.run
            of_role.situation = roles.situation_of(of_role, evidence.situation)
            own = judge(of_role, limits=limits)
            judged = own.judged.get("cpu")
            if name != roles.ITSELF or not judgment.leaks:
                found += ((role, leak) for leak in own.leaks)
        if name == roles.SEGMENTS and not any(of is role for of, _ in found):
            continue  # a queue fills and empties again
        if limits and name != roles.ITSELF:
            judgment.judged[name] = roles.judged_role(role, judged)
        elif limits and "cpu" in judgment.judged and judgment.judged["cpu"].obstacle == "few":
            judgment.judged["cpu"] = roles.judged_role(role, judged)
    judgment.leaks = roles.with_total([*judgment.leaks, *roles.of_job(found)], evidence)
    judgment.leaks.sort(key=lambda leak: leak.certainty == "suspected")


@dataclass(frozen=True, slots=True)
class _Basis:
    """One comparison with its counters, as the makers of leaks need it.

    Attributes:
        run: counters of the run, for a comparison within a step.
    """

    evidence: Evidence
    comparison: Comparison
    run: Mapping[str, Counter] = field(default_factory=dict)

    @property
    def counters(self) -> Mapping[str, Counter]:
        return self.comparison.counters

    @property
    def scale(self) -> Scale:
        return self.comparison.scale

    @property
    def collector_off(self) -> bool:
        """Whether Python's cyclic collector was off at all censuses."""
        censuses = self.comparison.censuses
        return bool(censuses) and all(census.collector_off for census in censuses)


def worth_reporting(leaks: Sequence[Leak]) -> list[Leak]:
    """Leave out suspicions that are small compared with proven growth in the same memory."""
    proven: dict[str, int] = {}
    for leak in leaks:
        if leak.certainty == "proven":
            proven[memory_of(leak)] = proven.get(memory_of(leak), 0) + leak.rate
    return [
        leak
        for leak in leaks
        if leak.certainty == "proven" or leak.rate >= ATTRIBUTION.minor * proven.get(memory_of(leak), 0)
    ]


def _goes_on(evidence: Evidence, within: Comparison, rise: HolderRise | DataRise) -> bool:
    """Whether memory that grew within a step also grows in the next one, as far as that was followed.

    A cache that fills while the first step runs rises from micro-batch to micro-batch, and then never again.
    """
    later = [each for each in evidence.steps if (each.step or 0) > (within.step or 0)]
    track = None if not later else later[0].tracks.get(rise.counter)
    if track is None or len((points := track.points()).at) < 3:
        return True
    return float(points.floors[-1] - points.floors[0]) >= ATTRIBUTION.open * rise.rate * points.span


# --- growth that has a holder -------------------------------------------------------------------------------


def _of_holders(basis: _Basis, rises: Iterable[HolderRise | DataRise]) -> Iterator[Leak]:
    """Yield the leaks of holders.

    These are none: a container with a bound, a cycle that the collector will free, and a rise over one
    interval that no counter shows (most programs allocate something once).
    """
    for rise in rises:
        if not isinstance(rise, HolderRise):
            continue
        seen, first = rise.seen, rise.series[0].seen
        garbage = has(seen.anchor, SegmentKind.GARBAGE_CYCLE)
        if (garbage and not basis.collector_off) or is_bounded(seen):
            continue
        if is_native(seen.anchor) and _awaits_collector(basis, seen.device, rise.rate):
            continue
        if rise.certainty == "suspected" and len(rise.rises) == 1 and not rise.by_counter:
            continue
        held = _held(basis, rise)
        detail = seen.detail or GroupDetail()
        on_host = seen.kept - first.kept > seen.nbytes - first.nbytes
        leak = _leak(basis, rise, DEVICE_HOST if on_host else seen.device, seen.size, held, rise.rate)
        yield replace(
            leak,
            kind="garbage_cycle" if garbage else "leak",
            path=held.path,
            also_held_by=(*([seen.anchor] if detail.carrier else []), *detail.also_held_by),
            allocated_at=detail.allocated_at,
            stored_at=detail.stored_at,
        )


def of_censuses(comparison: Comparison, rises: Iterable[HolderRise | DataRise]) -> list[Leak]:
    """Return the leaks of holders that grew between censuses without counters, as those of notebook cells."""
    evidence = Evidence.of([Situation(position=comparison.censuses[-1].position)])
    return join_host_part(list(_of_holders(_Basis(evidence, comparison), rises)))


def is_bounded(seen: HolderSeen) -> bool:
    """Return whether a holder's container has a bound of its own, so that its growth ends there.

    One whose entries carry graphs has to be near its bound: a replay memory of 100,000 is meant for that many
    values, not graphs.
    """
    bound = None if seen.detail is None else seen.detail.bound
    if bound is None or seen.detail is None:
        return False
    return not seen.attached or 2 * (seen.detail.entries or 0) >= bound


def _held(basis: _Basis, rise: HolderRise) -> Held:
    """Collect what the rules of mechanisms look at."""
    seen, first = rise.seen, rise.grown[0]
    before = next((each for each in reversed(rise.grown) if each.size < seen.size), rise.grown[-2:][0])
    position = basis.evidence.situation.position
    detail = seen.detail or GroupDetail()
    anchor = detail.carrier or seen.anchor
    return Held(
        path=(*anchor, *seen.path[len(seen.anchor) :]),
        anchor=anchor,
        attached=seen.attached or seen.nodes > first.nodes,
        owner=seen.owner,
        kind=detail.holder_kind,
        lengthens=(before.storages, before.nodes) == (seen.storages, seen.nodes) and before.size < seen.size,
        shared=detail.shared,
        known=seen.known,
        # Of a process that is read from outside, nobody knows that nothing was differentiated.
        gradients=basis.comparison.outside
        or position.backwards > 0
        or position.step > 0
        or detail.backward_ran,
        differentiated=detail.differentiated,
        entries_grow=seen.entries > first.entries,
        holders_multiply=first.holders < seen.holders
        and seen.entries * first.holders <= first.entries * seen.holders,
        packs_itself=detail.packs_itself,
        stored_value=detail.stored_value,
        stored_depth=detail.stored_depth,
        stored_at=detail.stored_at,
        carried=detail.carried,
        classes=tuple(detail.classes),
        in_optimizer=detail.in_optimizer,
        collected=detail.collected,
        cuts=tuple(detail.cuts),
        rate=rise.rate,
        every="backward" if basis.scale == "microbatch" else basis.scale,
    )


def _of_data(basis: _Basis, rises: Iterable[HolderRise | DataRise]) -> Iterator[Leak]:
    """Yield the leaks of containers of ordinary data.

    A program that is followed over time has no repeating positions. What it collects while it starts looks
    suspicious, so only proven growth is reported.
    """
    for rise in rises:
        if not isinstance(rise, DataRise) or rise.rate < ATTRIBUTION.data_least:
            continue
        if rise.certainty == "suspected" and (basis.scale == "second" or len(rise.rises) == 1):
            continue
        seen = rise.seen
        nbytes = seen.entries * seen.entry_bytes
        cause = _cause_of_data(basis, seen, rise.rate)
        leak = _leak(basis, rise, DEVICE_HOST, nbytes, cause, rise.rate)
        yield replace(leak, path=seen.path, allocated_at=seen.allocated_at, stored_at=seen.stored_at)


def _cause_of_data(basis: _Basis, seen: DataSeen, rate: float) -> Held | DataSeen:
    if seen.native is not None:
        return seen
    return Held(
        seen.path, seen.path, attached=False, owner="", kind=seen.kind, classes=tuple(seen.classes),
        ordinary=True, lengthens=seen.lengthens, stored_at=seen.stored_at, stored_value=seen.stored_value,
        cuts=tuple(seen.cuts), rate=rate,
        every="backward" if basis.scale == "microbatch" else basis.scale,
    )  # fmt: skip


def _leak(
    basis: _Basis,
    shown_by: HolderRise | DataRise | Counted,
    device: str,
    nbytes: int,
    cause: Held | DataSeen | Unexplained,
    rate: float,
    doubts: Sequence[Open] = (),
) -> Leak:
    """Make the leak of what grows, with the event that it comes with, without its holder and lines.

    Args:
        basis: where it was seen.
        shown_by: what shows it.
        device: as a finding has it.
        nbytes: its size; of a holder, at the last census.
        cause: why it grows.
        rate: bytes per position.
        doubts: why growth that only a counter shows is not proven.
    """
    rise = None if isinstance(shown_by, Counted) else shown_by
    counter = basis.counters.get(shown_by.counter)
    reasons = doubts if rise is None or rise.reason is None else (rise.reason,)
    at_census = rise is not None and basis.scale == "step"
    leak = Leak(
        device=device,
        scale=basis.scale,
        shown_by=shown_by,
        cause=cause,
        certainty="suspected" if reasons else "proven",
        reasons=tuple(reasons),
        rates=_rates(basis, rate, shown_by.counter),
        nbytes=nbytes,
        nbytes_step=basis.comparison.censuses[-1].position.step if at_census else None,
        step=None if basis.scale == "run" else basis.evidence.situation.position.step or None,
        projection=_projection(basis, device, counter, rate if rise is None else rise.recent),
        period=basis.comparison.period,
    )
    if basis.scale == "run" or not leak.rate:
        return leak
    counts = (basis.evidence.counts or basis.evidence.run)[basis.scale].events
    came_with = basis.evidence.situation.came_with
    event, per_event = event_of(basis.comparison, counter, rate, counts, came_with, rise)
    if event is None or per_event is None:
        return leak
    if isinstance(cause, Held) and event not in ("step", "microbatch", "backward"):
        cause = replace(cause, every=event, rate=per_event)
    return replace(leak, event=event, spacing=per_event / leak.rate, cause=cause)


def _rates(basis: _Basis, rate: float, counter: str) -> dict[Per, int]:
    """Return the rates of growth on the scale of its evidence, by unit.

    Growth within a step may also continue from step to step, or be freed at the end of each step: then it has
    no rate per step.
    """
    each_step = basis.evidence.situation.position.microbatches_per_step
    if basis.scale == "run":
        return {}
    if basis.scale == "second":
        return {"second": round(rate)}
    if basis.scale == "step":
        return {"step": round(rate), "micro-batch": round(rate / max(1, each_step))}
    over_run = basis.run.get(counter)
    stays = over_run is not None and over_run.rises and 2 * over_run.growth.rate >= rate * each_step > 0
    per_step: dict[Per, int] = {"step": round(rate * each_step)} if stays else {}
    return {**per_step, "micro-batch": round(rate)}


def _projection(basis: _Basis, device: str, counter: Counter | None, rate: float) -> Projection | None:
    """Return when memory runs out if all that grows on a device goes on as in the latest part of the run."""
    situation = basis.evidence.situation
    limit, used = situation.limits.get(device), situation.used.get(device)
    if counter is not None and counter.growth.state == "growing":
        rate = max(rate, counter.growth.recent)
    if limit is None or used is None or rate <= 0 or basis.scale == "second":
        return None
    left = max(0, int((limit - used) / rate))
    position = situation.position
    if basis.scale == "step":
        return Projection(device=device, limit=limit, step=position.step + left)
    if basis.comparison.step is not None:
        return Projection(device=device, limit=limit, microbatches=position.into_step + left)
    return Projection(device=device, limit=limit, backward=position.backwards + left)


def join_host_part(leaks: Sequence[Leak]) -> list[Leak]:
    """Join a holder's leak on the host with the one on a GPU: both are the same."""
    on_host: dict[HolderPath, int] = {}
    on_gpu = {_anchor(leak) for leak in leaks if leak.device.startswith("cuda:")}
    for leak in leaks:
        if leak.device == DEVICE_HOST and _anchor(leak) in on_gpu:
            on_host[_anchor(leak)] = on_host.get(_anchor(leak), 0) + leak.nbytes
    return [
        replace(leak, on_host=on_host.get(_anchor(leak), 0)) if leak.device.startswith("cuda:") else leak
        for leak in leaks
        if leak.device != DEVICE_HOST or _anchor(leak) not in on_gpu
    ]


def _anchor(leak: Leak) -> HolderPath:
    return leak.cause.anchor if isinstance(leak.cause, Held) else ()


# --- growth that only a counter shows -----------------------------------------------------------------------


def _unnamed(
    basis: _Basis, name: str, rises: Sequence[HolderRise | DataRise], leaks: Sequence[Leak]
) -> Leak | None:
    """Return the leak of a counter's growth that no holder accounts for: memory that only C++ sees.

    If a container of objects of C++ grew meanwhile, or one of ordinary data as fast, it is the holder.
    """
    growth = basis.counters[name].growth
    data = [rise for rise in rises if isinstance(rise, DataRise)]
    native = next((rise for rise in data if rise.seen.native is not None), None)
    # If a container of native objects proves the growth, the counter only measures it.
    proven = native is not None and native.certainty == "proven"
    if growth.state != "growing" and not (proven and growth.state in ("uncertain", "filling")):
        return None
    devices = {name} if name.startswith("cuda:") else {"cpu", DEVICE_HOST}
    # Suspected growth may have come once. What has a holder includes it.
    known = float(
        sum(
            leak.rates.get(_PER[basis.scale], 0)
            for leak in leaks
            if leak.device in devices and leak.certainty != "suspected"
        )
    )
    held, covered = _held_rate(basis, name)
    outside, role = basis.comparison.outside, basis.evidence.role
    of_segments = role is not None and role.role == roles.SEGMENTS
    covered = of_segments or (covered and (not outside or name != "cpu"))
    of_data = sum(rise.rate for rise in data if rise.certainty == "proven" and rise.counter == name)
    by_counter = sum(rise.rate for rise in rises if rise.by_counter and rise.counter == name)
    known = max(known, held + of_data, by_counter)
    missing = growth.rate - known
    if growth.low - known < basis.counters[name].policy.least or missing < ATTRIBUTION.open * growth.rate:
        return None
    holder = native
    if holder is None and name == "cpu":
        holder = next((rise for rise in data if missing / 2 <= rise.own_rate <= 2 * missing), None)
    seen = None if holder is None else holder.seen
    resident = basis.counters.get(DEVICE_HOST)
    while_it_ran = basis.comparison.while_running
    reasons: list[Open] = []
    if name == "cpu" and resident is not None and contradicts(resident, missing, growth.onset or 0.0):
        reasons.append("not resident")
    if seen is None and name == "cpu" and _caches_may_fill(basis):
        reasons.append("new shapes")
    if not covered:
        reasons.append("not covered")
    cause: Held | DataSeen | Unexplained = "native code" if covered else "not named"
    if of_segments:
        cause = "shared memory"
    elif seen is not None:
        cause = _cause_of_data(basis, seen, missing)
    elif outside and not covered:
        cause = "not listed from outside"
    elif name == "cpu" and while_it_ran and all(census.profiled for census in while_it_ran):
        cause = "profiler"
    device = DEVICE_HOST if name == "cpu" else name
    in_use = basis.evidence.situation.used.get(device, math.inf)
    nbytes = round(min(in_use, missing * max(1, basis.comparison.now - (growth.onset or 0.0))))
    counted = Counted(name, growth.rate, growth.low, growth.high, known, covered)
    leak = _leak(basis, counted, device, nbytes, cause, missing, reasons)
    if seen is None:
        return leak
    return replace(leak, path=seen.path, allocated_at=seen.allocated_at, stored_at=seen.stored_at)


def _held_rate(basis: _Basis, name: str) -> tuple[float, bool]:
    """Return the rate of everything that has a holder, and whether censuses cover the counter's growth.

    They do if it rose between them about as fast as over the whole of its growth: between those since its
    onset, or all of them.
    """
    counter, scale = basis.counters[name], basis.scale
    taken = [census for census in basis.comparison.while_running if not census.partial]
    for since in (counter.growth.onset or 0.0, 0.0):
        later = [census for census in taken if census.at(scale) >= since]
        if len(later) < 2:
            continue
        start, end = later[0].at(scale), later[-1].at(scale)
        if end > start and 2 * counter.rise(start, end)[0] >= counter.growth.rate * (end - start):
            held = later[-1].totals.get(name, 0) - later[0].totals.get(name, 0)
            return held / (end - start), True
    return 0.0, False


def _caches_may_fill(basis: _Basis) -> bool:
    """Return whether native caches with an entry per shape may still be filling."""
    vary = basis.evidence.situation.shapes_vary
    code = basis.counters.get(CODE)
    if vary is not None:
        return vary
    if code is None or len(code.points.at) < 2:
        return False
    return bool(code.points.floors[-1] > code.points.floors[0])


def _ends_by_itself(basis: _Basis, name: str) -> bool:
    """Return whether what seems to grow waits for the cyclic collector, or fills a bounded native cache."""
    counter, code = basis.counters[name], basis.counters.get(CODE)
    if _awaits_collector(basis, name, counter.growth.rate):
        return True
    since = counter.growth.onset or 0.0
    return name == "cpu" and code is not None and fills_with_code(counter.points, code.points, since)


def _awaits_collector(basis: _Basis, device: str, rate: float) -> bool:
    """Whether objects that the cyclic collector will free explain part of a counter's growth.

    They pile up between its collections. What they keep in native memory is not seen, so a part of the rate
    is enough.
    """
    censuses = basis.comparison.censuses
    if len(censuses) < 2 or basis.collector_off:
        return False
    span = censuses[-1].at(basis.scale) - censuses[0].at(basis.scale)
    most = max(sum(census.waiting.get(device, {}).values()) for census in censuses)
    return most >= ESTIMATE.share * rate * span > 0


# --- how small a leak would have been found -----------------------------------------------------------------


def _judged(evidence: Evidence) -> dict[str, JudgedDevice]:
    """Return by device whether growth could be judged, and how small a leak would have been detected.

    A counter may rise without a leak: objects wait for the cyclic collector, a cache of generated code fills,
    or holders keep log entries and bounded containers. Then only a larger leak would have been detected. A
    device has no limit if other growth has a holder and is not a proven leak, or if growth is so uncertain
    that the limit would mean nothing.
    """
    comparison = evidence.judged_on
    basis = _Basis(evidence, comparison)
    judged = {}
    for device, readable in evidence.situation.readable.items():
        of = NO_COUNTER if not readable else _of_counter(basis, device)
        judged[device] = replace(of, waiting=_waiting(basis, device))
    return judged


def _of_counter(basis: _Basis, device: str) -> JudgedDevice:
    counter, track = basis.counters.get(device), basis.comparison.tracks.get(device)
    judged = JudgedDevice(scale=_SCALES[basis.scale], points=0 if track is None else track.readings)
    if counter is None or counter.growth.state == "too_short":
        return replace(judged, obstacle="few")
    held, _ = _held_rate(basis, device)
    # What accumulates without a bound is not harmless, even if no leak is reported.
    harmless = held - sum(
        (series[-1].seen.nbytes - series[0].seen.nbytes) / (series[-1].at - series[0].at)
        for series in basis.comparison.holders()
        if series[-1].seen.device == device and _accumulates(series)
    )
    return judge_counter(
        counter, judged, basis.comparison.now, max(0.0, harmless), _ends_by_itself(basis, device)
    )


def _accumulates(series: Sequence[Sighting[HolderSeen]]) -> bool:
    first, last = series[0], series[-1]
    apart = last.at - first.at
    return apart > 0 and accumulates(first.seen, last.seen, apart) and not is_bounded(last.seen)


def judge_counter(
    counter: Counter, judged: JudgedDevice, now: float, harmless: float = 0.0, ends: bool = False
) -> JudgedDevice:
    """Return what the judgment of a counter rests on: growth, a limit, or why there is none.

    Args:
        counter: with its growth, not too short.
        judged: with its scale and readings.
        now: position of the last reading of any counter.
        harmless: bytes per position of what has a holder and is no leak: bounded containers, logs, longer
            batches.
        ends: its growth ends by itself.
    """
    growth, points, policy = counter.growth, counter.points, counter.policy
    by_time, last = judged.scale == "time", float(points.at[-1])
    open_rate = growth.rate - harmless if counter.rises and growth.low - harmless >= policy.least else 0.0
    if not ends and open_rate > 0 and open_rate >= ATTRIBUTION.open * growth.rate:
        if growth.state == "growing":
            return judged
        return replace(judged, obstacle="may end", figure=growth.rate)
    if not by_time and now - last > max(ENOUGH_MARKS, ESTIMATE.share * now):
        return replace(judged, obstacle="unread", figure=last)
    limit = growth.high if counter.rises else detection_limit(points, policy)
    # A limit means nothing if a leak at the limit would have added twice the memory in use.
    if limit is None or limit * points.span > 2 * points.means.max():
        return replace(judged, obstacle="restless")
    stated = DetectionLimit(math.ceil(round(limit, 3)), "second" if by_time else "step")
    return replace(judged, limit=stated)


def _waiting(basis: _Basis, device: str) -> Waiting | None:
    """Return the most memory that waited for the cyclic collector during the run, if much."""
    censuses = basis.comparison.while_running
    most = max(censuses, key=lambda census: sum(census.waiting.get(device, {}).values()), default=None)
    classes = {} if most is None else most.waiting.get(device, {})
    nbytes = sum(classes.values())
    if most is None or nbytes < MIB or basis.collector_off:
        return None
    return Waiting(nbytes, max(classes, key=lambda name: classes[name]), most.at(basis.scale), basis.scale)
