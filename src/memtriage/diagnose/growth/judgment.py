"""Judge growth from the evidence of a run: what leaks, and how small a leak would have been found. Pure.

`judge` is the whole judgment. It reads nothing but its argument, so that a record can be judged again. The
walk from a rate to its record: `_finding` (words) <- `Rise.rate` (`attribution.py`) <- a counter's `Growth`
(`estimate.py`) and a holder's sightings (`evidence.py`) <- lines of the record (`model/evidence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import msgspec

from memtriage.catalogue.growing import ONEDNN, PROFILER, growing_part
from memtriage.diagnose.causes import memory_of, one_a_cause, rate_of, with_native_part
from memtriage.diagnose.code_cache import fills_with_code
from memtriage.diagnose.growth.attribution import (
    POLICY as ATTRIBUTION,
)
from memtriage.diagnose.growth.attribution import (
    Counter,
    Open,
    Rise,
    attribute,
    contradicts,
    counted,
    counters_of,
)
from memtriage.diagnose.growth.estimate import detection_limit, grow
from memtriage.diagnose.growth.evidence import CODE, CONFIRMING, ENOUGH_MARKS, Comparison, Evidence
from memtriage.diagnose.growth.judged import with_circumstances
from memtriage.diagnose.mechanisms import Held, mechanism_of
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import DataSeen, HolderSeen, Situation
from memtriage.model.findings import DEVICE_HOST, GROWING, Finding, Projection
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale
from memtriage.model.paths import HolderPath, SegmentKind, has, in_words, is_native
from memtriage.model.position import Scale
from memtriage.model.units import MIB, count, size
from memtriage.model.units import rate as rate_in_words
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.mechanisms import MECHANISMS, MechanismText
from memtriage.store.reader import RankRecord


@dataclass(frozen=True, slots=True)
class JudgePolicy:
    """Thresholds between what grew and what is reported.

    Attributes:
        unnamed: this part of a counter's rate may stay unexplained: malloc rounds up, a census counts the
            bytes that were asked for.
        beside: a suspicion is not reported if it is less than this part of what is proven to grow in the same
            memory: the proven rate is not known more exactly.
        collected: part of a counter's growth that objects awaiting the cyclic collector explain. It is a
            part, since what they keep in native memory is not seen.
        collected_within: positions after which a census sees most of what awaits the collector.
        unread: a counter that was not read in this part of the run, at its end, gets no detection limit.
        meaningful: a limit means nothing if a leak at the limit would add more than this many times the
            memory in use during the run,
        small: and more than these bytes.
        seconds: after so many seconds, readings over time are enough.
    """

    unnamed: float = 0.3
    beside: float = 0.1
    unread: float = 0.25
    meaningful: float = 8.0
    small: int = 256 * MIB
    seconds: float = 3.0
    collected: float = 0.25
    collected_within: int = 20


POLICY: Final = JudgePolicy()
NOT_NAMED: Final = "not named"
"""Holder of growth that no census covers."""
CPP_ONLY: Final = "C++ only (nothing that a census lists explains it)"
NO_COUNTER: Final = Judged(reason="no counter of it can be read")
_SCALES: Final[Mapping[Scale, JudgedScale]] = {"step": "step", "microbatch": "microbatch", "second": "time"}
SPANS: Final[Mapping[Scale, str]] = {
    "step": "steps", "microbatch": "backwards", "second": "seconds", "run": "runs",
}  # fmt: skip


@dataclass(slots=True)
class Judgment:
    """What the evidence of a run shows of growth.

    Attributes:
        findings: what grows, fastest first; growth of counters that no holder explains comes last.
        judged: by device, whether growth could be judged, and how small a leak would have been found.
        counters: with their growth, on the main scale.
        rises: what grew between censuses on the main scale, leak or not.
    """

    findings: list[Finding] = field(default_factory=list)
    judged: dict[str, Judged] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    rises: list[Rise] = field(default_factory=list)


def judge(evidence: Evidence, *, limits: bool = True) -> Judgment:
    """Judge the growth of a run.

    Args:
        evidence: all of the run so far.
        limits: state how small a leak would have been found, which takes 20 ms per device.
    """
    main = evidence.main
    basis = _Basis(evidence, main, counters_of(main))
    judgment = Judgment(counters=dict(basis.counters), rises=attribute(main, basis.counters))
    held = list(_of_holders(basis, judgment.rises))
    # Without steps, the run itself is compared from backward to backward.
    within_steps = [] if main.scale == "microbatch" and len(main.censuses) > 1 else evidence.steps
    for within in within_steps:
        of_step = _Basis(evidence, within, counters_of(within), basis.counters)
        rises = [rise for rise in attribute(within, of_step.counters) if _goes_on(evidence, within, rise)]
        held += _of_holders(of_step, rises)
    held = join_host_part(held)
    findings = [finding for finding, _ in held]
    findings += (finding for rise in judgment.rises if (finding := _of_data(basis, rise)) is not None)
    facts_by_path = {path: facts for finding, facts in held if (path := finding.holder_path) is not None}
    leaks = one_a_cause(findings, facts_by_path)
    for name in sorted(basis.counters):
        if name not in CONFIRMING and not _ends_by_itself(basis, name):
            unnamed = _unnamed(basis, name, judgment.rises, leaks)
            leaks = leaks if unnamed is None else with_unnamed(leaks, unnamed)
    judgment.findings = worth_reporting(leaks)
    if limits:
        judgment.judged = _judged(evidence, judgment)
    return judgment


def judged_again(rank: RankRecord) -> RankRecord:
    """Return a rank's record with the growth that its evidence shows, instead of what was found when it ran.

    A record without evidence (of schema 1) stays as it is, and so do findings of other kinds. A process that
    was killed is judged from what is there.
    """
    if not rank.evidence:
        return rank
    judgment = judge(Evidence.of(rank.evidence))
    for finding in judgment.findings:
        finding.rank = rank.start.rank
    kept = [finding for finding in rank.findings if finding.kind not in GROWING]
    deaths = [finding for finding in kept if finding.kind == "out_of_memory" and not finding.ahead]
    findings = [*deaths, *judgment.findings, *(finding for finding in kept if finding not in deaths)]
    if rank.end is None:
        return replace(rank, interim_findings=findings)
    failed = rank.end.exception is not None
    judged = with_circumstances(judgment.judged, failed=failed, steps=rank.end.steps, torch=True)
    return replace(rank, final_findings=findings, end=msgspec.structs.replace(rank.end, judged=judged))


@dataclass(frozen=True, slots=True)
class _Basis:
    """One comparison with its counters, as the makers of findings need it.

    Attributes:
        run: counters of the run, for a comparison within a step.
    """

    evidence: Evidence
    comparison: Comparison
    counters: Mapping[str, Counter]
    run: Mapping[str, Counter] = field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        return self.comparison.scale

    @property
    def unit(self) -> str:
        """One position of the scale, in words."""
        return SPANS[self.scale].removesuffix("s")

    @property
    def collector_off(self) -> bool:
        """Whether Python's cyclic collector was off at all censuses."""
        censuses = self.comparison.censuses
        return bool(censuses) and all(census.collector_off for census in censuses)


def worth_reporting(leaks: Sequence[Finding]) -> list[Finding]:
    """Leave out suspicions that are small compared with proven growth in the same memory."""
    proven: dict[str, int] = {}
    for leak in leaks:
        if leak.certainty == "proven":
            proven[memory_of(leak)] = proven.get(memory_of(leak), 0) + rate_of(leak)
    return [
        leak
        for leak in leaks
        if leak.certainty == "proven" or rate_of(leak) >= POLICY.beside * proven.get(memory_of(leak), 0)
    ]


def _goes_on(evidence: Evidence, within: Comparison, rise: Rise) -> bool:
    """Whether memory that grew within a step also grows in the next one, as far as that was followed.

    A cache that fills while the first step runs rises from micro-batch to micro-batch, and then never again.
    """
    later = [each for each in evidence.steps if (each.step or 0) > (within.step or 0)]
    track = None if not later else later[0].tracks.get(rise.counter)
    if track is None or len(points := track.points().at) < 3:
        return True
    floors = track.points().floors
    return float(floors[-1] - floors[0]) >= POLICY.unnamed * rise.rate * float(points[-1] - points[0])


# --- growth that has a holder -------------------------------------------------------------------------------


def _of_holders(basis: _Basis, rises: Iterable[Rise]) -> Iterator[tuple[Finding, Held]]:
    """Yield findings of holders, each with the facts that its mechanism was inferred from.

    These are not leaks: a container with a bound, a cycle that the collector will free, and a rise over one
    interval that no counter shows (most programs allocate something once).
    """
    for rise in rises:
        seen, first = rise.series[-1].seen, rise.series[0].seen
        if not isinstance(seen, HolderSeen) or not isinstance(first, HolderSeen):
            continue
        garbage = has(seen.anchor, SegmentKind.GARBAGE_CYCLE)
        if (garbage and not basis.collector_off) or is_bounded(seen):
            continue
        if is_native(seen.anchor) and _awaits_collector(basis, seen.device, rise.rate):
            continue
        if rise.certainty == "suspected" and len(rise.points) == 2 and not rise.by_counter:
            continue
        held = _held(basis, rise, seen)
        detail = seen.detail or GroupDetail()
        more = [*_several(basis, rise), *_retained(detail)]
        if detail.saved_by:
            more.append(f"the largest storage is kept for backward by {detail.saved_by}")
        yield _finding(
            basis, rise, held.path, mechanism_of(held), detail,
            device=DEVICE_HOST if seen.kept - first.kept > seen.nbytes - first.nbytes else seen.device,
            kind="garbage_cycle" if garbage else "leak",
            nbytes=seen.size,
            how=_sizes(basis, rise),
            also_held_by=[*([seen.anchor] if detail.carrier else []), *detail.also_held_by],
            more=more,
        ), held  # fmt: skip


def of_censuses(comparison: Comparison, rises: Iterable[Rise]) -> list[Finding]:
    """Return findings of holders that grew between censuses without counters, as those of notebook cells."""
    evidence = Evidence.of([Situation(position=comparison.censuses[-1].position)])
    found = list(_of_holders(_Basis(evidence, comparison, {}), rises))
    return [finding for finding, _ in join_host_part(found)]


def is_bounded(seen: HolderSeen) -> bool:
    """Return whether a holder's container has a bound of its own, so that its growth ends there.

    One whose entries carry graphs has to be near its bound: a replay memory of 100,000 is meant for that many
    values, not graphs.
    """
    bound = None if seen.detail is None else seen.detail.bound
    if bound is None or seen.detail is None:
        return False
    return not seen.attached or 2 * (seen.detail.entries or 0) >= bound


def _held(basis: _Basis, rise: Rise, seen: HolderSeen) -> Held:
    """Collect what the rules of mechanisms look at."""
    grown = [each.seen for each in rise.series if each.at >= rise.since and isinstance(each.seen, HolderSeen)]
    first, before = grown[0], grown[-2:][0]
    position = basis.evidence.situation.position
    detail = seen.detail or GroupDetail()
    anchor = detail.carrier or seen.anchor
    return Held(
        path=(*anchor, *seen.path[len(seen.anchor) :]),
        anchor=anchor,
        attached=seen.attached or seen.nodes > first.nodes,
        owner=seen.owner,
        kind=detail.holder_kind,
        lengthens=(before.storages, before.nodes) == (seen.storages, seen.nodes),
        shared=detail.shared,
        known=seen.known,
        gradients=position.backwards > 0 or position.step > 0 or detail.backward_ran,
        differentiated=detail.differentiated,
        entries_grow=seen.entries > first.entries,
        holders_multiply=first.holders < seen.holders
        and seen.entries * first.holders <= first.entries * seen.holders,
        anchor_owner=detail.anchor_owner,
        packs_itself=detail.packs_itself,
        stored_value=detail.stored_value,
        stored_at=detail.stored_at,
        stored_by_hook=detail.stored_by_hook,
        carried=detail.carried,
        classes=tuple(detail.classes),
        in_optimizer=detail.in_optimizer,
        collected=detail.collected,
        every="backward" if basis.scale == "microbatch" else basis.scale,
    )


def _of_data(basis: _Basis, rise: Rise) -> Finding | None:
    """Make the finding of a growing container of ordinary data; None if it is not a leak.

    A program that is followed over time has no repeating positions. What it collects while it starts looks
    suspicious, so only proven growth is reported.
    """
    seen = rise.series[-1].seen
    if not isinstance(seen, DataSeen) or rise.rate < ATTRIBUTION.data_least:
        return None
    if rise.certainty == "suspected" and (basis.scale == "second" or len(rise.points) == 2):
        return None
    first = next(each.seen for each in rise.series if each.at >= rise.since)
    assert isinstance(first, DataSeen)
    between = f"between {SPANS[basis.scale]} {rise.since:.4g} and {rise.last:.4g}"
    how = (
        f"from {size(first.entries)} to {size(seen.entries)} {between}, with the same beginning or end"
        if seen.lengthens
        else f"{seen.entries - first.entries:,} more entries of about {size(seen.entry_bytes)} {between}, "
        "tensors not counted"
    )
    nbytes = seen.entries * seen.entry_bytes
    return _finding(
        basis, rise, seen.path, _why_data(basis, seen), seen, device=DEVICE_HOST, nbytes=nbytes, how=how
    )


def _why_data(basis: _Basis, seen: DataSeen) -> MechanismText:
    if seen.native is not None:
        path, part = in_words(seen.path), growing_part(seen.classes)
        if part is not None:
            return MechanismText(f"{path} gets new objects of type {seen.native}: {part.why}", part.fix)
        if "ProcessGroup" in seen.native or seen.path[0].name.startswith("torch.distributed"):
            return MECHANISMS["process groups"]
        return MECHANISMS["objects of C++"].filled({"subject": path, "type": seen.native})
    return mechanism_of(
        Held(
            seen.path, seen.path, attached=False, owner="", kind=seen.kind, classes=tuple(seen.classes),
            ordinary=True, lengthens=seen.lengthens,
            every="backward" if basis.scale == "microbatch" else basis.scale,
        )
    )  # fmt: skip


def _finding(
    basis: _Basis,
    rise: Rise,
    path: HolderPath,
    text: MechanismText,
    lines: GroupDetail | DataSeen,
    *,
    device: str,
    nbytes: int,
    how: str,
    kind: Literal["leak", "garbage_cycle"] = "leak",
    also_held_by: Sequence[HolderPath] = (),
    more: Iterable[str] = (),
) -> Finding:
    """Make the finding of what grows.

    Args:
        path: to its holder.
        text: why it grows, and what to change.
        lines: has the program's lines that make it and store it.
        nbytes: that it had at the last census.
        how: the sizes that were read, in words.
        also_held_by: other holders.
        more: further evidence.
    """
    counter = basis.counters.get(rise.counter)
    projection = _projection(basis, device, counter, rise.recent)
    last = basis.comparison.censuses[-1]
    per_run = f": {size(round(rise.rate))} more with every run of this cell" if basis.scale == "run" else ""
    finding = Finding(
        kind=kind,
        device=device,
        bytes=nbytes,
        bytes_step=last.position.step if basis.scale == "step" else None,
        certainty=rise.certainty,
        holder_path=path,
        also_held_by_paths=list(also_held_by),
        allocated_at=lines.allocated_at,
        stored_at=lines.stored_at,
        mechanism=text.mechanism + per_run,
        fix=text.fix,
        playbook=LEAKS,
        step=basis.evidence.situation.position.step or None,
        projection=projection,
        evidence=[
            how,
            *([f"suspected only: {_WHY[rise.reason]}"] if rise.reason is not None else []),
            *more,
            *([] if projection is None else [str(projection)]),
        ],
    )
    return msgspec.structs.replace(finding, **_rates(basis, rise.rate, rise.counter))


_WHY: Final[Mapping[Open, str]] = {
    "few": "it was seen to grow too seldom, or too irregularly, to be certain",
    "once": "it was only seen at the end: the program makes no step and calls no module in a loop",
    "slows": "it grows more and more slowly, or unevenly",
    "fills": "it grows more and more slowly, as a cache does that fills to its bound",
    "aged": "it may have stopped since the last census",
    "replaced": "its entries are replaced by new ones, and no counter shows that memory grows",
}


def _rates(basis: _Basis, rate: float, counter: str) -> dict[str, int | None]:
    """Return the rates of growth on the scale of its evidence, by field of a finding.

    Growth within a step may also continue from step to step, or be freed at the end of each step: then it has
    no rate per step.
    """
    each_step = basis.evidence.situation.position.microbatches_per_step
    if basis.scale == "run":
        return {"step": None}
    if basis.scale == "second":
        return {"bytes_per_second": round(rate)}
    if basis.scale == "step":
        return {"bytes_per_step": round(rate), "bytes_per_microbatch": round(rate / max(1, each_step))}
    over_run = basis.run.get(counter)
    stays = over_run is not None and over_run.rises and 2 * over_run.growth.rate >= rate * each_step > 0
    return {
        "bytes_per_step": round(rate * each_step) if stays else None,
        "bytes_per_microbatch": round(rate),
    }


def _sizes(basis: _Basis, rise: Rise) -> str:
    """`3 censuses, at steps 3, 6, 12: 1.0, 4.0, 10.0 MiB at the same place; 9 more storages`."""
    grown = [each.seen for each in rise.series if each.at >= rise.since and isinstance(each.seen, HolderSeen)]
    at = ", ".join(f"{position:.4g}" for position, _ in rise.points)
    held = ", ".join(size(round(counted(seen))) for seen, _ in zip(grown, rise.points, strict=False))
    more, nodes = grown[-1].storages - grown[0].storages, grown[-1].nodes - grown[0].nodes
    storages = f"; {more:,} more storages" if more else ""
    graph = f"; {nodes:,} more autograd nodes" if nodes > 0 else ""
    censuses = f"{len(rise.points)} censuses, at {SPANS[basis.scale]} {at}"
    return f"{censuses}: {held} at the same place{storages}{graph}"


def _several(basis: _Basis, rise: Rise) -> list[str]:
    period = basis.comparison.period
    if period < 2:
        return []
    return [
        f"the program runs {period} backwards for each micro-batch of its own, and keeps "
        f"{size(round(rise.rate * period))} of each; rates here are for one backward"
    ]


def _retained(detail: GroupDetail) -> list[str]:
    if not detail.retained or detail.retained_of is None:
        return []
    kind = f" ({detail.holder_kind})" if detail.holder_kind else ""
    retained, whole = size(detail.retained), size(detail.retained_of)
    return [f"the holding object{kind} alone retained {retained} of {whole}"]


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


def join_host_part(held: Sequence[tuple[Finding, Held]]) -> list[tuple[Finding, Held]]:
    """Join a holder's finding on the host with the one on a GPU: both are the same leak."""
    on_gpu = {facts.anchor: finding for finding, facts in held if finding.device.startswith("cuda:")}
    joined = []
    for finding, facts in held:
        gpu_finding = on_gpu.get(facts.anchor) if finding.device == DEVICE_HOST else None
        if gpu_finding is None:
            joined.append((finding, facts))
        else:
            gpu_finding.evidence.append(
                f"in addition {size(finding.bytes)} of host memory: nodes of the autograd graph"
            )
    return joined


# --- growth that only a counter shows -----------------------------------------------------------------------


def with_unnamed(leaks: Sequence[Finding], unnamed: Finding) -> list[Finding]:
    """Add what only a counter shows; if a leak has the same holder, as a part of it."""
    path = unnamed.holder_path
    same = next((leak for leak in leaks if path is not None and leak.holder_path == path), None)
    if same is None:
        return [*leaks, unnamed]
    others = [leak for leak in leaks if leak is not same]
    return sorted([*others, with_native_part(same, unnamed)], key=rate_of, reverse=True)


def _unnamed(basis: _Basis, name: str, rises: Sequence[Rise], leaks: Sequence[Finding]) -> Finding | None:
    """Make the finding of a counter's growth that no holder accounts for: memory that only C++ sees.

    If a container of objects of C++ grew meanwhile, or one of ordinary data as fast, it is the holder.
    """
    growth = basis.counters[name].growth
    data = [rise for rise in rises if isinstance(rise.series[-1].seen, DataSeen)]
    native = next((rise for rise in data if rise.series[-1].seen.native is not None), None)  # type: ignore[union-attr]
    # If a container of native objects proves the growth, the counter only measures it.
    proven = native is not None and native.certainty == "proven"
    if growth.state != "growing" and not (proven and growth.state in ("uncertain", "filling")):
        return None
    devices = {name} if name.startswith("cuda:") else {"cpu", DEVICE_HOST}
    # Suspected growth may have come once. What has a holder includes it.
    known = float(
        sum(
            _on(leak, basis.scale)
            for leak in leaks
            if leak.device in devices and leak.certainty != "suspected"
        )
    )
    held, covered = _held_rate(basis, name)
    outside = basis.comparison.outside
    covered &= not outside or name != "cpu"
    of_data = sum(rise.rate for rise in data if rise.certainty == "proven" and rise.counter == name)
    by_counter = sum(rise.rate for rise in rises if rise.by_counter and rise.counter == name)
    known = max(known, held + of_data, by_counter)
    missing = growth.rate - known
    if growth.low - known < basis.counters[name].policy.least or missing < POLICY.unnamed * growth.rate:
        return None
    holder = native
    if holder is None and name == "cpu":
        holder = next((rise for rise in data if missing / 2 <= rise.own_rate <= 2 * missing), None)
    seen = None if holder is None else holder.series[-1].seen
    assert seen is None or isinstance(seen, DataSeen)
    position = basis.evidence.situation.position
    resident = basis.counters.get(DEVICE_HOST)
    while_it_ran = basis.comparison.while_running
    open_because = []
    if name == "cpu" and resident is not None and contradicts(resident, missing, growth.onset or 0.0):
        open_because.append("the resident set does not grow with it")
    if seen is None and name == "cpu" and _caches_may_fill(basis):
        open_because.append("a cache with an entry for each shape of the input may still be filling")
    if not covered:
        open_because.append("the censuses since then do not show what holds it")
    if seen is not None:
        text = _why_data(basis, seen)
    elif outside and not covered:
        text = MECHANISMS["not listed from outside"]
    elif name == "cpu" and while_it_ran and all(census.profiled for census in while_it_ran):
        text = MechanismText(PROFILER.why, PROFILER.fix)
    elif not covered:
        text = MECHANISMS["not named"]
    else:
        text = MECHANISMS["native code"].filled({"shapes": f"{ONEDNN.why}; {ONEDNN.fix}"})
    device = DEVICE_HOST if name == "cpu" else name
    pace = growth.recent / growth.rate if growth.rate > 0 else 1.0
    projection = _projection(basis, device, basis.counters[name], missing * pace)
    span = basis.comparison.now - (growth.onset or 0.0)
    in_use = basis.evidence.situation.used.get(device, math.inf)
    finding = Finding(
        kind="leak",
        device=device,
        bytes=round(min(in_use, missing * max(1, span))),
        certainty="suspected" if open_because else "proven",
        holder=None if seen else CPP_ONLY if covered else NOT_NAMED,
        holder_path=None if seen is None else seen.path,
        allocated_at=None if seen is None else seen.allocated_at,
        stored_at=None if seen is None else seen.stored_at,
        mechanism=text.mechanism,
        fix=text.fix,
        playbook=LEAKS,
        step=position.step or None,
        projection=projection,
        evidence=[
            f"the counter of {name} rises by {size(round(growth.rate))} per {basis.unit} "
            f"({size(round(growth.low))} to {size(round(growth.high))}); "
            f"censuses name {size(round(known))} of it",
            *(f"suspected only: {why}" for why in open_because),
            *([] if projection is None else [str(projection)]),
        ],
    )
    return msgspec.structs.replace(finding, **_rates(basis, missing, name))


def _on(finding: Finding, scale: Scale) -> int:
    """Return a finding's growth on a scale, in bytes per position."""
    rate = {
        "step": finding.bytes_per_step,
        "microbatch": finding.bytes_per_microbatch,
        "second": finding.bytes_per_second,
    }[scale]
    return rate or 0


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
        risen, _ = counter.rise(start, end)
        if end > start and 2 * risen >= counter.growth.rate * (end - start):
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
    return most >= POLICY.collected * rate * min(span, POLICY.collected_within) > 0


# --- how small a leak would have been found -----------------------------------------------------------------


def _judged(evidence: Evidence, judgment: Judgment) -> dict[str, Judged]:
    """Return by device whether growth could be judged, and how small a leak would have been detected.

    A counter may rise without a leak: objects wait for the cyclic collector, a cache of generated code fills,
    or holders keep log entries and bounded containers. Then only a larger leak would have been detected. A
    device has no limit if other growth has a holder and is not a proven leak, or if growth is so uncertain
    that the limit would mean nothing.
    """
    comparison = evidence.judged_on
    basis = _Basis(evidence, comparison, counters_of(comparison))
    judged = {}
    for device, readable in evidence.situation.readable.items():
        of = NO_COUNTER if not readable else _of_counter(basis, device, judgment.findings)
        judged[device] = msgspec.structs.replace(of, note=_collector_note(basis, device))
    return judged


def _of_counter(basis: _Basis, device: str, leaks: Sequence[Finding]) -> Judged:
    scale = _SCALES[basis.scale]
    counter, track = basis.counters.get(device), basis.comparison.tracks.get(device)
    readings = 0 if track is None else track.readings
    judged = Judged(scale=scale, points=readings)
    if counter is None or counter.growth.state == "too_short":
        return msgspec.structs.replace(judged, reason=_too_few(readings, scale))
    devices = {device, DEVICE_HOST} if device == "cpu" else {device}
    held, _ = _held_rate(basis, device)
    harmless = held - sum(_on(leak, basis.scale) for leak in leaks if leak.device in devices)
    return judge_counter(
        counter, judged, basis.comparison.now, max(0.0, harmless), _ends_by_itself(basis, device)
    )


def judge_counter(
    counter: Counter, judged: Judged, now: float, harmless: float = 0.0, ends: bool = False
) -> Judged:
    """Return what the judgment of a counter rests on: growth, a limit, or the reason why there is none.

    Args:
        counter: with its growth, not too short.
        judged: with its scale and readings.
        now: position of the last reading of any counter.
        harmless: bytes per position of what has a holder and is no leak: bounded containers, logs, longer
            batches.
        ends: its growth ends by itself.
    """
    growth, points, policy = counter.growth, counter.points, counter.policy
    unit = {"step": "step", "microbatch": "backward", "time": "second"}[judged.scale or "time"]
    last = float(points.at[-1])
    open_rate = growth.rate - harmless if counter.rises and growth.low - harmless >= policy.least else 0.0
    if not ends and open_rate > 0 and open_rate >= POLICY.unnamed * growth.rate:
        if growth.state == "growing":
            return judged
        reason = (
            f"suspected growth of {rate_in_words(round(growth.rate), unit)}, which may end by itself; "
            "run longer to confirm"
        )
        return msgspec.structs.replace(judged, reason=reason)
    restless = replace(policy, settles=0.0)  # in so short a time, a leak adds no more than caches that fill
    if judged.scale == "time" and points.span < POLICY.seconds and grow(points, restless).state != "flat":
        reason = f"{points.span:.1f} s of readings; {POLICY.seconds:.0f} s are needed"
        return msgspec.structs.replace(judged, reason=reason)
    if judged.scale != "time" and now - last > max(ENOUGH_MARKS, POLICY.unread * now):
        return msgspec.structs.replace(judged, reason=f"its counter was not read after {unit} {last:.4g}")
    limit = growth.high if counter.rises else detection_limit(points, policy)
    if limit is None or limit * points.span > max(POLICY.small, POLICY.meaningful * points.means.max()):
        reason = "the counter moves too much: no growth of any size would show"
        return msgspec.structs.replace(judged, reason=reason)
    stated = DetectionLimit(math.ceil(round(limit, 3)), "second" if judged.scale == "time" else "step")
    return msgspec.structs.replace(judged, detection_limit=stated)


def _too_few(readings: int, scale: JudgedScale) -> str:
    if scale == "time":
        return f"no step was seen; {ENOUGH_MARKS} steps, or {POLICY.seconds:.0f} s without any, are needed"
    unit = "step" if scale == "step" else "backward"
    few = f"{count(readings, unit)} {'is' if readings == 1 else 'are'} too few"
    return f"{few}, {ENOUGH_MARKS} are needed"


def _collector_note(basis: _Basis, device: str) -> str | None:
    """Return a note on the most memory that waited for the cyclic collector during the run, if much."""
    censuses = basis.comparison.while_running
    most = max(censuses, key=lambda census: sum(census.waiting.get(device, {}).values()), default=None)
    classes = {} if most is None else most.waiting.get(device, {})
    nbytes = sum(classes.values())
    if most is None or nbytes < MIB or basis.collector_off:
        return None
    of = max(classes, key=lambda name: classes[name])
    when = f"{basis.unit} {most.at(basis.scale):.4g}"
    return f"{size(nbytes)} in garbage cycles of {of} awaited the collector at {when}"
