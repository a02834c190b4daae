"""Judge growth from the evidence of a run: what leaks, and how small a leak would have been found. Pure.

`judge` is the whole judgment. It reads nothing but its argument, so that a record can be judged again.
docs/architecture.md has the walk from a rate to its record.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from typing import Final

import msgspec

from memtriage.diagnose.causes import common_holder, memory_of, one_a_cause
from memtriage.diagnose.code_cache import fills_with_code
from memtriage.diagnose.growth import roles
from memtriage.diagnose.growth.attribution import (
    ACCOUNTS,
    DATA_LEAST,
    INTERVALS,
    MINOR,
    OPEN,
    PACE,
    Open,
    Rise,
    attribute,
    contradicts,
    other_growth,
    part_of_other_memory,
)
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.estimate import detection_limit, policy_of
from memtriage.diagnose.growth.events import event_of
from memtriage.diagnose.growth.evidence import (
    CODE,
    CONFIRMING,
    ENOUGH_MARKS,
    HEAP,
    Comparison,
    Evidence,
)
from memtriage.diagnose.growth.facts import Counted, JudgedDevice, Leak, Per, Unexplained
from memtriage.diagnose.held import Held
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen, Role, Situation
from memtriage.model.findings import DEVICE_HOST, Event, Projection
from memtriage.model.judged import DetectionLimit, JudgedScale
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    SegmentKind,
    has,
    is_entry,
    is_native,
    of_any_item,
)
from memtriage.model.position import Scale
from memtriage.model.units import MIB

RECORDED: Final = 2048
"""Bytes of one collective in the record that `torch.distributed` keeps; measured are 840."""


@dataclass(slots=True)
class Judgment:
    """What the evidence of a run shows of growth.

    Attributes:
        leaks: what grows, fastest first; growth of counters that no holder explains comes last.
        judged: by device, whether growth could be judged, and how small a leak would have been found.
    """

    leaks: list[Leak]
    judged: dict[str, JudgedDevice]


def judge(evidence: Evidence, *, limits: bool = True) -> Judgment:
    """Judge the growth of a run.

    Args:
        evidence: all of the run so far.
        limits: state how small a leak would have been found, which takes 20 ms per device.
    """
    main = evidence.main
    main_rises = attribute(main)
    found = list(_of_rises(evidence, main, main_rises))
    # Without steps, the run itself is compared from backward to backward.
    within_steps = {} if main.scale == "microbatch" and len(main.censuses) > 1 else evidence.steps
    for within in within_steps.values():
        rises = [each for each in attribute(within) if each.holders and _goes_on(evidence, within, each)]
        found += _of_rises(evidence, within, rises)
    leaks = [_with_all_entries(leak, main) for leak in one_a_cause(join_host_part(found))]
    for name in sorted(main.counters):
        if (name not in CONFIRMING or name == HEAP) and not _ends_by_itself(main, name):
            unnamed = _unnamed(evidence, name, main_rises, leaks)
            leaks = leaks if unnamed is None else one_a_cause([*leaks, unnamed])
    leaks = one_a_cause([*leaks, *_other_memory(evidence)])
    judgment = Judgment(worth_reporting(leaks), _judged(evidence) if limits else {})
    _add_roles(judgment, evidence, limits=limits)
    judgment.leaks = list(_projected(judgment.leaks, evidence))
    return judgment


def _add_roles(judgment: Judgment, evidence: Evidence, *, limits: bool) -> None:
    """Judge the other processes of the job by the same rules."""
    found: list[tuple[Role, Leak]] = []
    for name, of_role in evidence.roles.items():
        role = of_role.role
        if role is None or not role.group or (name == roles.ITSELF and evidence.main.scale != "second"):
            continue  # what the program itself did before its first step was to load and build
        judged = small = JudgedDevice(obstacle="small", figure=policy_of(DEVICE_HOST).settles)
        if roles.risen(of_role) >= small.figure:  # less does not matter
            of_role.counts = evidence.run
            of_role.situation = Situation(
                position=evidence.situation.position,
                used={DEVICE_HOST: role.highest},
                readable={"cpu": True},
                came_with=evidence.situation.came_with,
            )
            own = judge(of_role, limits=limits)
            judged = own.judged.get("cpu", judged)
            if judged.obstacle in ("few", "restless"):
                lived = replace(judged, obstacle="lived", figure=role.lived_s)
                judged = small if roles.ended(of_role) else lived
            if name == roles.LIVING:
                own.leaks = [roles.of_each(role, leak) for leak in own.leaks if role.each]
            if name != roles.ITSELF or not judgment.leaks:
                found += ((role, leak) for leak in own.leaks)
        if name in _OF_ALL and not any(of is role for of, _ in found):
            continue  # a queue fills and empties again
        if limits and name != roles.ITSELF:
            judgment.judged[name] = judged
        elif limits and "cpu" in judgment.judged and judgment.judged["cpu"].obstacle == "few":
            judgment.judged["cpu"] = judged
    judgment.leaks += roles.of_job(found)
    judgment.leaks.sort(key=lambda leak: leak.certainty == "suspected")


_OF_ALL: Final[Mapping[str, Unexplained]] = {roles.SEGMENTS: "shared memory", roles.LIVING: "processes"}
"""Roles of no single process, and what it is that then grows."""


def worth_reporting(leaks: Sequence[Leak]) -> list[Leak]:
    """Leave out suspicions that are small compared with proven growth in the same memory."""
    least: dict[str, float] = defaultdict(float)
    for leak in leaks:
        if leak.certainty == "proven":
            least[memory_of(leak)] += MINOR * leak.rate
    return [leak for leak in leaks if leak.certainty == "proven" or leak.rate >= least[memory_of(leak)]]


def _goes_on(evidence: Evidence, within: Comparison, rise: Rise) -> bool:
    """Whether memory that grew within a step also grows in the next one, as far as that was followed.

    A cache that fills while the first step runs rises from micro-batch to micro-batch, and then never again.
    """
    later = evidence.steps.get((within.step or 0) + 1)
    track = None if later is None else later.tracks.get(rise.counter)
    if track is None or len((points := track.points()).at) < 3:
        return True
    return float(points.floors[-1] - points.floors[0]) >= OPEN * rise.rate * points.span


# --- growth that has a holder -------------------------------------------------------------------------------


def _of_rises(evidence: Evidence, comparison: Comparison, rises: Iterable[Rise]) -> Iterator[Leak]:
    """Yield the leaks of holders and of containers of ordinary data.

    These are none: a container with a bound, a cycle that the collector will free, a rise over one interval
    that no counter shows (most programs allocate something once) and that came with no proven one, and data
    that is only suspected to grow over time: a program without positions that repeat may collect it while it
    starts.
    """
    rises = list(rises)
    proven = [rise for rise in rises if not rise.reasons]
    for rise in rises:
        seen, suspected = rise.seen, bool(rise.reasons)
        once = suspected and len(rise.rises) == 1 and not rise.share
        if once and not any(_came_with(rise, each) for each in proven):
            continue
        if isinstance(seen, DataSeen):
            if rise.rate >= DATA_LEAST and not (suspected and comparison.scale == "second"):
                nbytes = seen.entries * seen.entry_bytes
                yield _leak(evidence, comparison, rise, DEVICE_HOST, nbytes, _cause_of_data(seen))
            continue
        garbage = has(seen.anchor, SegmentKind.GARBAGE_CYCLE)
        if (garbage and not comparison.collector_off) or is_bounded(seen):
            continue
        grown, first = rise.points[-1][1] - rise.points[0][1], rise.holders[0]
        if is_native(seen.anchor) and comparison.awaits_collector(seen.device, grown):
            continue
        held = _held(evidence, comparison, rise.holders)
        detail = seen.detail or GroupDetail()
        on_host = seen.kept - first.kept > seen.nbytes - first.nbytes
        device = DEVICE_HOST if on_host else seen.device
        yield replace(
            _leak(evidence, comparison, rise, device, seen.size, held),
            kind="garbage_cycle" if garbage else "leak",
            also_held_by=(*([seen.anchor] if detail.carrier else []), *detail.also_held_by),
        )


def _came_with(rise: Rise, proven: Rise) -> bool:
    """Whether a holder got as many storages as a proven one of the same cause, over the same censuses."""
    if not rise.holders or not proven.holders or (rise.since, rise.last) != (proven.since, proven.last):
        return False
    more, others = (each.holders[-1].storages - each.holders[0].storages for each in (rise, proven))
    return (
        0 < more == others and common_holder(rise.holders[-1].anchor, proven.holders[-1].anchor) is not None
    )


def _with_all_entries(leak: Leak, comparison: Comparison) -> Leak:
    """Return a leak of a container's entries with all that they keep, where its counter shows more.

    Of several equally short ways to a part of an entry, censuses may find another each time: that part then
    never grew at one place, and all places below the container grew together.
    """
    memory, rise, cause = memory_of(leak), leak.shown_by, leak.cause
    counter = comparison.counters.get(memory)
    known = leak.rates.get("step", 0) if comparison.scale == leak.scale == "step" else 0
    if not (known and counter and ANY_ITEM in leak.anchor and isinstance(rise, Rise) and rise.holders):
        return leak
    assert isinstance(cause, Held)
    container = leak.anchor[: leak.anchor.index(ANY_ITEM) + 1]
    sizes: dict[float, int] = {}
    for census, present in _with_present(comparison.censuses):
        if census.at("step") >= rise.since and not census.partial:
            of_memory = (seen for seen in present if seen.device == memory)
            inside = (s for s in of_memory if of_any_item(s.anchor)[: len(container)] == container)
            sizes[census.at("step")] = sum(seen.size for seen in inside)
    first, last = min(sizes, default=0.0), max(sizes, default=0.0)
    if last <= first:
        return leak
    rate = (sizes[last] - sizes[first]) / (last - first)
    if counter.growth.state != "growing" or not (1 + OPEN) * known < rate <= (1 + PACE) * counter.growth.rate:
        return leak
    factor, detail = rate / known, cause.detail
    cuts = [cut.scaled(sizes[last] / leak.nbytes) for cut in detail.cuts]
    per_event = None if cause.rate is None else factor * cause.rate
    cause = replace(cause, detail=msgspec.structs.replace(detail, cuts=cuts), rate=per_event)
    return replace(leak.times(factor), cause=cause, nbytes=sizes[last])


def _with_present(censuses: Iterable[CensusSeen]) -> Iterator[tuple[CensusSeen, list[HolderSeen]]]:
    """Yield censuses with all holders at that time: each lists those that differ from the one before."""
    present: dict[int, HolderSeen] = {}
    for census in censuses:
        for number in census.gone:
            present.pop(number, None)
        present |= {seen.id: seen for seen in census.holders}
        yield census, list(present.values())


def is_bounded(seen: HolderSeen) -> bool:
    """Return whether a holder's container has a bound of its own, so that its growth ends there.

    One whose entries carry graphs has to be near its bound: a replay memory of 100,000 is meant for that many
    values, not graphs.
    """
    detail = seen.detail or GroupDetail()
    return detail.bound is not None and (not seen.attached or 2 * (detail.entries or 0) >= detail.bound)


def _held(evidence: Evidence, comparison: Comparison, holders: Sequence[HolderSeen]) -> Held:
    """Collect what the rules of mechanisms look at."""
    first, before, seen = holders[0], holders[-2:][0], holders[-1]
    position = evidence.situation.position
    detail = seen.detail or GroupDetail()
    anchor = detail.carrier or seen.anchor
    counts = list(zip(seen.containers, first.containers, strict=False))
    further = counts[1:] if is_entry(anchor[-1]) else counts
    return Held(
        path=(*anchor, *seen.path[len(seen.anchor) :]),
        anchor=anchor,
        attached=seen.attached or seen.nodes > first.nodes,
        owner=seen.owner,
        detail=detail,
        lengthens=(before.storages, before.nodes) == (seen.storages, seen.nodes) and before.size < seen.size,
        known=seen.known,
        # Of a process that is read from outside, nobody knows that nothing was differentiated.
        gradients=comparison.outside or position.backwards > 0 or position.step > 0 or detail.backward_ran,
        entries_grow=seen.entries > first.entries,
        holders_multiply=first.holders < seen.holders
        and seen.entries * first.holders <= first.entries * seen.holders,
        above=len(list(takewhile(lambda count: count[0] > count[1], further))),
    )


def _cause_of_data(seen: DataSeen) -> Held | DataSeen:
    if seen.native is not None:
        return seen
    detail = GroupDetail(
        holder_kind=seen.kind, classes=seen.classes, allocated_at=seen.allocated_at, stored_at=seen.stored_at,
        stored_value=seen.stored_value, cuts=seen.cuts,
    )  # fmt: skip
    return Held(seen.path, seen.path, detail=detail, ordinary=True, lengthens=seen.lengthens)


def _leak(
    evidence: Evidence,
    comparison: Comparison,
    shown_by: Rise | Counted,
    device: str,
    nbytes: int,
    cause: Held | DataSeen | Unexplained,
) -> Leak:
    """Make the leak of what grows, with the event that it comes with."""
    name, rate = shown_by.counter, shown_by.rate
    rates = _rates(evidence, comparison, rate, name)
    counts = (evidence.counts or evidence.run)[comparison.scale].events
    event, per_event = event_of(comparison, name, rate, counts, evidence.situation.came_with)
    rise = shown_by if isinstance(shown_by, Rise) else None
    growth = comparison.counters[name].growth if name in comparison.counters else None
    known: GroupDetail | DataSeen = cause if isinstance(cause, DataSeen) else GroupDetail()
    if isinstance(cause, Held):
        every: Event | Scale = event or "second"
        every = "backward" if every == "microbatch" else every
        known, cause = cause.detail, replace(cause, every=every, rate=per_event)
    return Leak(
        device=device,
        scale=comparison.scale,
        shown_by=shown_by,
        cause=cause,
        certainty="suspected" if shown_by.reasons else "proven",
        rates=rates,
        recent=rate if rise is None else rise.recent,
        nbytes=nbytes,
        nbytes_step=round(rise.seen_at) if rise and comparison.scale == "step" else None,
        step=evidence.situation.position.step or None,
        path=None if isinstance(cause, str) else cause.path,
        allocated_at=known.allocated_at,
        stored_at=known.stored_at,
        event=event,
        spacing=per_event / next(filter(None, rates.values()), per_event),
        comes_every=growth.period if event == "step" and growth and growth.shape == "periodic" else None,
    )


def _rates(evidence: Evidence, comparison: Comparison, rate: float, counter: str) -> dict[Per, int]:
    """Return the rates of growth on the scale of its evidence, by unit.

    Growth within a step may also continue from step to step, or be freed at the end of each step: then it has
    no rate per step.
    """
    each_step = evidence.situation.position.microbatches_per_step
    if comparison.scale == "second":
        return {"second": round(rate)}
    if comparison.scale == "step":
        of_step: dict[Per, int] = {"step": round(rate)}
        return of_step if evidence.role else {**of_step, "micro-batch": round(rate / max(1, each_step))}
    over_run = None if comparison.step is None else evidence.main.counters.get(counter)
    stays = over_run is not None and over_run.rises
    per_step: dict[Per, int] = {"step": round(rate * each_step)} if stays else {}
    return {**per_step, "micro-batch": round(rate)}


def _projected(leaks: Sequence[Leak], evidence: Evidence) -> Iterator[Leak]:
    """Yield leaks with when memory runs out if all that fills it, in any process, goes on as lately."""
    situation, position, main = evidence.situation, evidence.situation.position, evidence.main
    for leak in leaks:
        rates: dict[str, float] = defaultdict(float)
        for each in leaks:
            if (memory_of(each), each.scale) == (memory_of(leak), leak.scale):
                rates[each.process or roles.ITSELF] += each.recent
        within_step = leak.scale != main.scale and not leak.process
        memory = memory_of(leak)
        names = (memory, DEVICE_HOST) if memory == "cpu" else (memory,)
        counters = [main.counters[name].growth for name in names if name in main.counters]
        seen = [min(growth.low, growth.recent) for growth in counters if growth.state == "growing"]
        if roles.ITSELF in rates and not within_step and seen:  # malloc also keeps room between what lives
            rates[roles.ITSELF] = max(rates[roles.ITSELF], *seen)
        limit, used = situation.limits.get(leak.device), situation.used.get(leak.device)
        rate = sum(rates.values())
        if limit is None or used is None or leak.scale == "second" or not rate:
            yield leak
            continue
        if rates.keys() != {roles.ITSELF}:
            used += sum(roles.risen(role) for name, role in evidence.roles.items() if name != roles.ITSELF)
        left = max(0, int((limit - used) / rate))
        shares = {process: round(100 * part / rate) for process, part in rates.items()}
        end = Projection(
            device=leak.device,
            limit=limit,
            step=position.step + left if leak.scale == "step" else None,
            microbatches=position.into_step + left if within_step else None,
            backward=position.backwards + left if leak.scale == "microbatch" and not within_step else None,
            shares=shares if len(shares) > 1 else None,
        )
        yield replace(leak, projection=end)


def join_host_part(leaks: Sequence[Leak]) -> list[Leak]:
    """Join a holder's leak on the host with the one on a GPU: both are the same."""
    on_host: dict[HolderPath, int] = defaultdict(int)
    on_gpu = {leak.anchor for leak in leaks if leak.device.startswith("cuda:")}
    for leak in leaks:
        if leak.device == DEVICE_HOST:
            on_host[leak.anchor] += leak.nbytes
    return [
        replace(leak, on_host=on_host[leak.anchor]) if leak.device.startswith("cuda:") else leak
        for leak in leaks
        if leak.device != DEVICE_HOST or leak.anchor not in on_gpu
    ]


# --- growth that only a counter shows -----------------------------------------------------------------------


def _unnamed(evidence: Evidence, name: str, rises: Sequence[Rise], leaks: Sequence[Leak]) -> Leak | None:
    """Return the leak of a counter's growth that no holder accounts for: memory that only C++ sees.

    If a container of objects of C++ grew meanwhile, or one of ordinary data as fast, it is the holder.
    """
    comparison = evidence.main
    growth = comparison.counters[name].growth
    if growth.state != "growing":
        return None
    # Suspected growth may have come once. What has a holder includes it.
    per: Per = "micro-batch" if comparison.scale == "microbatch" else comparison.scale
    of_heap = name == HEAP
    proven = [
        leak.rates
        for leak in leaks
        if memory_of(leak) == ("cpu" if of_heap else name) and (of_heap or leak.certainty == "proven")
    ]
    held, covered = _held_rate(comparison, name)
    outside, role = comparison.outside, evidence.role
    of_all: Unexplained | None = None if role is None else _OF_ALL.get(role.role)
    covered = of_all is not None or (covered and (not outside or name != "cpu"))
    shown = sum(rise.rate for rise in rises if rise.share and rise.counter == name)
    known = max(held, shown, float(sum(rates.get(per, 0) for rates in proven)))
    if of_heap and "cpu" in comparison.counters:
        known = max(known, comparison.counters["cpu"].growth.rate)
    missing = growth.rate - known
    if growth.low - known < max(comparison.counters[name].policy.least, OPEN * growth.rate):
        return None
    data = [(rise.seen, rise.own_rate) for rise in rises if isinstance(rise.seen, DataSeen)]
    native = (seen for seen, _ in data if seen.native is not None)
    as_fast = (seen for seen, rate in data if name == "cpu" and missing / 2 <= rate <= 2 * missing)
    seen = next(chain(native, as_fast), None)
    resident = comparison.counters.get(DEVICE_HOST)
    code = comparison.counters.get(CODE)
    new_shapes = evidence.situation.shapes_vary
    if new_shapes is None and code is not None and code.points.span:
        new_shapes = bool(code.points.floors[-1] > code.points.floors[0])
    since, of_malloc = growth.onset or 0.0, name == "cpu"
    device = DEVICE_HOST if name in ("cpu", HEAP) else name
    doubts: dict[Open, bool] = {
        "not resident": of_malloc and resident is not None and contradicts(resident, missing, since),
        "new shapes": of_malloc and seen is None and bool(new_shapes),  # native caches may be filling
        "not covered": not covered,
    }
    cause: Held | DataSeen | Unexplained = "native code" if covered else "not named"
    if of_all is not None:
        cause = of_all
    elif seen is not None:
        cause = _cause_of_data(seen)
    elif outside and not covered:
        cause = "not listed from outside" if role is None else "not read"
    elif name == "cpu" and {census.profiled for census in comparison.while_running} == {True}:
        cause = "profiler"
    if cause == "native code" and device == DEVICE_HOST:
        recorded = RECORDED * evidence.situation.collectives
        fills = missing * (comparison.now - since) < recorded
        if fills or (of_heap and comparison.may_be_collected(since, missing)):
            return None
    in_use = evidence.situation.used.get(device, math.inf)
    nbytes = round(min(in_use, missing * max(1, comparison.now - since)))
    counted = Counted(name, growth, known, tuple(doubt for doubt, holds in doubts.items() if holds))
    return _leak(evidence, comparison, counted, device, nbytes, cause)


def _other_memory(evidence: Evidence) -> Iterator[Leak]:
    """Yield the leaks of memory that no census lists and that still grows."""
    comparison = evidence.main
    found = other_growth(comparison)
    for name, growth in found.items():
        counter = comparison.counters.get(name)
        if counter is None or _ends_by_itself(comparison, name):
            continue
        onset, last, now = growth.onset or 0.0, growth.until or 0.0, comparison.now
        risen, error = counter.rise(last, now)
        aged = now - last > ESTIMATE.share * (last - onset)
        if not aged or risen + 2 * error >= growth.rate * (now - last) / 2:
            cause: Unexplained = "mapped shared memory" if name == "shared" else "other anonymous memory"
            nbytes = round(growth.rate * (now - onset))
            yield _leak(evidence, comparison, Counted(name, growth, 0.0), DEVICE_HOST, nbytes, cause)
    shared = comparison.counters.get("shared")
    if shared is None or shared.growth.state != "growing" or "shared" in found:
        return
    if (part_of_other_memory(comparison, shared) or 0.0) >= ACCOUNTS:
        nbytes = round(shared.growth.rate * (comparison.now - (shared.growth.onset or 0.0)))
        counted = Counted("shared", shared.growth, 0.0, ("was mapped",))
        yield _leak(evidence, comparison, counted, DEVICE_HOST, nbytes, "mapped shared memory")


def _held_rate(comparison: Comparison, name: str) -> tuple[float, bool]:
    """Return the rate of everything that has a holder, and whether censuses cover the counter's growth.

    They do if it rose between them about as fast as over the whole of its growth: between those since its
    onset, or all of them.
    """
    counter, scale = comparison.counters[name], comparison.scale
    for since in (counter.growth.onset or 0.0, 0.0):
        whole = [each for each in comparison.while_running if not each.partial and each.at(scale) >= since]
        start, end = (whole[0].at(scale), whole[-1].at(scale)) if whole else (0.0, 0.0)
        if end > start and 2 * counter.rise(start, end)[0] >= counter.growth.rate * (end - start):
            return (whole[-1].totals.get(name, 0) - whole[0].totals.get(name, 0)) / (end - start), True
    return 0.0, False


def _not_followed(comparison: Comparison, name: str) -> float:
    """Return the rate of what has more storages at one path with each census, as another holder each time.

    It may be copied as a whole, which nothing recognizes. What stays one holder is judged by itself.
    """
    at_path: dict[HolderPath, list[tuple[float, HolderSeen]]] = defaultdict(list)
    for census, present in _with_present(comparison.while_running):
        for seen in present:
            if seen.device == name:
                at_path[seen.anchor].append((census.at(comparison.scale), seen))
    rate = 0.0
    for found in at_path.values():
        (start, first), (end, last) = found[0], found[-1]
        more = all(a.storages < b.storages and a.id != b.id for (_, a), (_, b) in pairwise(found))
        if len(found) > INTERVALS and more and not is_bounded(last):
            rate += max(0, last.size - first.size) / (end - start)
    return rate


def _ends_by_itself(comparison: Comparison, name: str) -> bool:
    """Return whether what seems to grow waits for the cyclic collector, or fills a bounded native cache."""
    counter, code = comparison.counters[name], comparison.counters.get(CODE)
    if comparison.awaits_collector(name, counter.grown):
        return True
    since, of_host = counter.growth.onset or 0.0, name in ("cpu", DEVICE_HOST)
    return of_host and code is not None and fills_with_code(counter.points, code.points, since)


# --- how small a leak would have been found -----------------------------------------------------------------


def _judged(evidence: Evidence) -> dict[str, JudgedDevice]:
    """Return by device whether growth could be judged, and how small a leak would have been detected.

    A counter may rise without a leak: objects wait for the cyclic collector, a cache of generated code fills,
    or holders keep log entries and bounded containers. Then only a larger leak would have been detected. A
    device has no limit if other growth has a holder and is not a proven leak, or if growth is so uncertain
    that the limit would mean nothing.
    """
    comparison = evidence.judged_on
    judged = {}
    for device, readable in evidence.situation.readable.items():
        of = JudgedDevice(obstacle="no counter") if not readable else judge_counter(comparison, device)
        each_step = evidence.situation.position.microbatches_per_step
        if of.limit is not None and comparison.scale == "microbatch" and each_step:
            of = replace(of, limit=DetectionLimit(each_step * of.limit.bytes, "step"))
        waited = [(census.waiting.get(device, {}), census) for census in comparison.while_running]
        classes, census = max(waited, key=lambda each: sum(each[0].values()), default=({}, None))
        nbytes = sum(classes.values())
        if census is not None and nbytes >= MIB and of.scale and not comparison.collector_off:
            most = max(classes, key=lambda name: classes[name])
            of = replace(of, waiting=(nbytes, most, census.at(comparison.scale)))
        judged[device] = of
    return judged


def judge_counter(comparison: Comparison, device: str) -> JudgedDevice:
    """Return what the judgment of a counter rests on: growth, a limit, or why there is none."""
    counter, track = comparison.counters.get(device), comparison.tracks.get(device)
    scale: JudgedScale = "time" if comparison.scale == "second" else comparison.scale
    judged = JudgedDevice(scale=scale, points=0 if track is None else track.readings)
    if counter is None or counter.growth.state == "too_short":
        return replace(judged, obstacle="few")
    growth, points, policy = counter.growth, counter.points, counter.policy
    # What accumulates without a bound is not harmless, even if no leak is reported.
    rises = [rise for rise in attribute(comparison) if rise.counter == device and rise.holders]
    unbounded = sum(rise.own_rate for rise in rises if not is_bounded(rise.holders[-1]))
    unbounded += _not_followed(comparison, device)
    harmless = max(0.0, _held_rate(comparison, device)[0] - unbounded)
    grows = growth.low - harmless >= policy.least and growth.rate - harmless >= OPEN * growth.rate
    if counter.rises and grows and not _ends_by_itself(comparison, device):
        if growth.state == "growing":
            return judged
        return replace(judged, obstacle="may end", figure=growth.rate)
    by_time, now, last = comparison.scale == "second", comparison.now, float(points.at[-1])
    if not by_time and now - last > max(ENOUGH_MARKS, ESTIMATE.share * now):
        return replace(judged, obstacle="unread", figure=last)
    limit = growth.high if counter.rises else detection_limit(points, policy)
    heap = comparison.counters.get(HEAP) if device == "cpu" else None
    if limit is not None and heap is not None and heap.growth.state != "too_short":
        start, end = float(heap.points.at[0]), float(heap.points.at[-1])
        risen, error = heap.rise(start, end)
        limit = max(limit, (risen + error) / (end - start))
    # A limit means nothing if a leak at the limit would have added twice the memory in use.
    if limit is None or limit * points.span > 2 * points.means.max():
        return replace(judged, obstacle="restless")
    stated = DetectionLimit(math.ceil(round(limit, 3)), "second" if by_time else "step")
    return replace(judged, limit=stated)
