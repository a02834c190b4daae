"""From growth that was followed during a run to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from memtriage.catalogue.growing import ONEDNN, PROFILER, growing_part
from memtriage.diagnose.growth.holders import DataGrowth, GrowingData, HolderGrowth, stops_when_full
from memtriage.diagnose.growth.marks import steps_left
from memtriage.diagnose.growth.proof import Proof
from memtriage.diagnose.growth.trend import GrowthEstimate, TrendPolicy, trend_policy
from memtriage.diagnose.mechanisms import Held, mechanism_of
from memtriage.model.census import GroupDetail, HolderGroup
from memtriage.model.findings import DEVICE_HOST, Certainty, Finding, Projection
from memtriage.model.paths import HolderPath, SegmentKind, has, in_words
from memtriage.model.position import Scale, TrainingPosition
from memtriage.model.units import size
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.mechanisms import MECHANISMS, MechanismText


@dataclass(frozen=True, slots=True)
class FindingPolicy:
    """Thresholds between what grew and a finding.

    Attributes:
        shows: a counter confirms a rate if it shows at least this part of it. Less than all: malloc may reuse
            what others have freed. Of what a step's micro-batches keep, this part must stay after the step.
        intervals: a holder that grew over fewer intervals than this is suspected only if a counter grows too:
            most programs allocate something once.
        unnamed: this part of a counter's rate may stay unexplained: malloc rounds up, a census counts the
            bytes that were asked for.
        as_fast: a container of ordinary data explains the growth that a counter shows and no other holder
            does if it grows at 0.5 to 2 times that rate: the size of its entries is only estimated.
        known: part of a group that one known holder must keep to be named for all of it.
    """

    shows: float = 0.5
    intervals: int = 2
    unnamed: float = 0.3
    as_fast: tuple[float, float] = (0.5, 2.0)
    known: float = 0.5


POLICY: Final = FindingPolicy()
NOT_NAMED: Final = "not named"
"""The holder of growth for which the censuses do not show one."""
CPP_ONLY: Final = "C++ only (nothing that a census lists explains it)"


@dataclass(frozen=True, slots=True)
class ScaleEvidence:
    """What a run's counters say, for the judgment.

    Attributes:
        scale: what positions are counted in.
        position: where training stands.
        estimates: growth of each counter over the run.
        limits: bytes at which memory runs out, by device.
        used: bytes in use at the last mark, by device, as that limit counts them.
        collector_off: Python's cyclic collector was off at every census.
        caches_may_fill: native caches with an entry per input shape may still be filling: shapes vary, or are
            not known.
        profiled: torch's profiler was on at every census.
    """

    scale: Scale
    position: TrainingPosition
    estimates: Mapping[str, GrowthEstimate] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)
    collector_off: bool = False
    caches_may_fill: bool = False
    profiled: bool = False

    def grows(self, counter: str, rate: float) -> bool:
        """Whether a counter shows enough of a rate, certainly or possibly."""
        growth = self.estimates.get(counter)
        if growth is None or growth.state not in ("growing", "undecided"):
            return False
        return growth.rate >= POLICY.shows * rate


@dataclass(frozen=True, slots=True)
class Rates:
    """Growth per step, micro-batch and second; None for those that do not apply."""

    step: int | None = None
    microbatch: int | None = None
    second: int | None = None


def holder_finding(
    growth: HolderGrowth, detail: GroupDetail, evidence: ScaleEvidence, period: int = 1
) -> Finding | None:
    """Make the finding of a holder that grows; None if it is not a leak.

    These are not leaks: a container with a bound, a cycle that the collector will free, and a rise over one
    interval that no counter shows (most programs allocate something once).

    Args:
        growth: its growth, with the proof.
        detail: a closer look at it.
        evidence: what the counters say, on the scale of that growth.
        period: backwards per micro-batch of the program.
    """
    group, proof = growth.holding.group, growth.proof
    garbage = has(group.anchor, SegmentKind.GARBAGE_CYCLE)
    if garbage and not evidence.collector_off:
        return None
    if stops_when_full(detail, attached=group.attached) or proof.certainty is None:
        return None
    counter = "shared" if detail.shared else group.device
    once = proof.certainty == "suspected" and proof.intervals < POLICY.intervals
    if once and not evidence.grows(counter, proof.rate):
        return None
    facts = held_by(growth, detail, evidence)
    explanation = mechanism_of(facts)
    first, last = growth.holding.sizes[0], growth.holding.sizes[-1]
    nodes = last.kept - first.kept > last.storages - first.storages
    device = DEVICE_HOST if nodes else group.device
    rates = _rates(proof.rate, group.device, evidence)
    saved_by = f"the largest storage is kept for backward by {detail.saved_by}"
    return _growth_finding(
        (last.position, last.nbytes), facts.path, device, rates, proof, explanation, evidence,
        kind="garbage_cycle" if garbage else "leak",
        lines=detail,
        also_held_by=[*([group.anchor] if detail.carrier else []), *detail.also_held_by],
        how=_came(growth, evidence.scale),
        more=[
            *_of_several(proof.rate, period), *_retained(detail, evidence.scale),
            *([saved_by] if detail.saved_by else []),
        ],
    )  # fmt: skip


def _growth_finding(
    last: tuple[float, int],
    path: HolderPath,
    device: str,
    rates: Rates,
    proof: Proof,
    explanation: MechanismText,
    evidence: ScaleEvidence,
    *,
    lines: GroupDetail | GrowingData,
    how: str,
    kind: Literal["leak", "garbage_cycle"] = "leak",
    also_held_by: Sequence[HolderPath] = (),
    more: Iterable[str] = (),
) -> Finding:
    """Make the finding of what grows.

    Args:
        last: position at which it was last read, and its bytes then.
        path: to its holder.
        lines: has the program's lines that make it and store it.
        how: the sizes that were read, in words; the first line of the evidence.
        more: further evidence, before what the growth will lead to.
    """
    position, nbytes = last
    projection = _projection(device, rates, evidence)
    return Finding(
        kind=kind,
        device=device,
        bytes=nbytes,
        bytes_step=round(position) if evidence.scale == "step" else None,
        bytes_per_step=rates.step,
        bytes_per_microbatch=rates.microbatch,
        bytes_per_second=rates.second,
        certainty=proof.certainty,
        holder_path=path,
        also_held_by_paths=list(also_held_by),
        allocated_at=lines.allocated_at,
        stored_at=lines.stored_at,
        mechanism=explanation.mechanism,
        fix=explanation.fix,
        playbook=LEAKS,
        step=evidence.position.step,
        projection=projection,
        evidence=[how, *_open(proof.certainty, proof.reason), *more, *_said(projection)],
    )


def held_by(growth: HolderGrowth, detail: GroupDetail, evidence: ScaleEvidence) -> Held:
    """Collect what the rules of mechanisms look at, for one growing holder."""
    position = evidence.position
    group = growth.holding.group
    anchor = detail.carrier or group.anchor
    return Held(
        path=(*anchor, *growth.holding.path[len(group.anchor) :]),
        anchor=anchor,
        attached=group.attached or _gets_nodes(growth),
        owner=max(group.owners, key=lambda name: group.owners[name], default="autograd context"),
        kind=detail.holder_kind,
        lengthens=growth.lengthens,
        shared=detail.shared,
        known=_known_holder(group),
        gradients=position.backwards > 0 or position.step > 0 or detail.backward_ran,
        differentiated=detail.differentiated,
        entries_grow=growth.entries_grow,
        holders_multiply=growth.holders_multiply,
        anchor_owner=detail.anchor_owner,
        packs_itself=detail.packs_itself,
        stored_value=detail.stored_value,
        stored_at=detail.stored_at,
        stored_by_hook=detail.stored_by_hook,
        carried=detail.carried,
        classes=tuple(detail.classes),
        in_optimizer=detail.in_optimizer,
        collected=detail.collected,
        every=_every(evidence.scale),
    )


def _every(scale: Scale) -> Literal["step", "backward", "second", "run"]:
    return "backward" if scale == "microbatch" else scale


def _gets_nodes(growth: HolderGrowth) -> bool:
    """Return whether its graph grew, even without tensors: a backward frees what its nodes saved."""
    sizes = [each for each in growth.holding.sizes if each.position >= growth.proof.since]
    return bool(sizes) and sizes[-1].objects > sizes[0].objects


def _known_holder(group: HolderGroup) -> str | None:
    """Return the entry of the catalogue that keeps more than half of a group."""
    name = max(group.known, key=lambda entry: group.known[entry], default=None)
    return name if name is not None and group.known[name] > POLICY.known * group.nbytes else None


def _rates(rate: float, counter: str, evidence: ScaleEvidence) -> Rates:
    """Return the rates of growth on the scale of its evidence.

    Growth within a step may also continue from step to step, or be freed at the end of each step. The
    estimates of such evidence are those from step to step.
    """
    each_step = evidence.position.microbatches_per_step
    if evidence.scale == "second":
        return Rates(second=round(rate))
    if evidence.scale == "step":
        return Rates(step=round(rate), microbatch=round(rate / max(1, each_step)))
    stays = each_step > 0 and evidence.grows(counter, rate * each_step)
    return Rates(step=round(rate * each_step) if stays else None, microbatch=round(rate))


SPANS: Final[Mapping[Scale, str]] = {"step": "steps", "microbatch": "backwards", "second": "seconds"}


def unit_of(scale: Scale) -> str:
    """Return the word for one position of a scale."""
    return SPANS[scale].removesuffix("s")


def _came(growth: HolderGrowth, scale: Scale) -> str:
    """`4 censuses at steps 3, 6, 12, 15: 1.0, 4.0, 10.0, 13.0 MiB at the same place of the program`."""
    sizes = [each for each in growth.holding.sizes if each.position >= growth.proof.since]
    at = ", ".join(f"{each.position:.4g}" for each in sizes)
    held = ", ".join(size(each.nbytes) for each in sizes)
    more = sizes[-1].count - sizes[0].count
    storages = f"; {more:,} more storages" if more else ""
    nodes = sizes[-1].objects - sizes[0].objects
    graph = f"; {nodes:,} more autograd nodes" if nodes > 0 else ""
    censuses = "1 census" if len(sizes) == 1 else f"{len(sizes)} censuses"
    return f"{censuses}, at {SPANS[scale]} {at}: {held} at the same place{storages}{graph}"


def _open(certainty: Certainty | None, reason: str | None) -> list[str]:
    return [f"suspected only: {reason}"] if certainty == "suspected" and reason else []


def _of_several(rate: float, period: int) -> list[str]:
    if period == 1:
        return []
    return [
        f"the program runs {period} backwards for each micro-batch of its own, and keeps "
        f"{size(rate * period)} of each; rates here are for one backward"
    ]


def _retained(detail: GroupDetail, scale: Scale) -> list[str]:
    if not detail.retained or detail.retained_of is None:
        return []
    kind = f" ({detail.holder_kind})" if detail.holder_kind else ""
    at = "" if detail.retained_at is None else f"at {unit_of(scale)} {detail.retained_at:.4g} "
    retained, whole = size(detail.retained), size(detail.retained_of)
    return [f"{at}the holding object{kind} alone retained {retained} of {whole}"]


def _projection(device: str, rates: Rates, evidence: ScaleEvidence) -> Projection | None:
    limit, used = evidence.limits.get(device), evidence.used.get(device)
    if limit is None:
        return None
    left = steps_left(limit, used, rates.step)
    if left is not None:
        return Projection(device=device, limit=limit, step=evidence.position.step + left)
    left = steps_left(limit, used, rates.microbatch)
    if left is not None:
        return Projection(device=device, limit=limit, microbatches=evidence.position.into_step + left)
    return None


def _said(projection: Projection | None) -> list[str]:
    return [] if projection is None else [str(projection)]


def data_finding(growth: DataGrowth, evidence: ScaleEvidence) -> Finding | None:
    """Make the finding of a growing container of ordinary data; None if it is not a leak.

    A program that is followed over time has no repeating positions. What it collects while it starts looks
    suspicious, so only proven growth is reported.
    """
    data, proof = growth.data, growth.proof
    suspected = proof.certainty == "suspected"
    if not growth.large or (suspected and (evidence.scale == "second" or proof.intervals < POLICY.intervals)):
        return None
    explanation = _explained(data, evidence)
    rates = _rates(proof.rate, "host", evidence)
    (start, first), (end, last) = data.entries[0], data.entries[-1]
    between = f"between {SPANS[evidence.scale]} {start:.4g} and {end:.4g}"
    how = f"{last - first:,} more entries of about {size(data.entry_bytes)} {between}, tensors not counted"
    if data.lengthens:
        how = f"from {size(first)} to {size(last)} {between}, with the same beginning or end"
    return _growth_finding(
        (end, last * data.entry_bytes),
        data.path,
        "host",
        rates,
        proof,
        explanation,
        evidence,
        lines=data,
        how=how,
    )


def _explained(data: GrowingData, evidence: ScaleEvidence) -> MechanismText:
    return mechanism_of(
        Held(
            data.path, data.path, attached=False, owner="", kind=data.kind, classes=data.classes,
            ordinary=True, lengthens=data.lengthens, every=_every(evidence.scale),
        )
    )  # fmt: skip


def unexplained(growth: GrowthEstimate, known: float, policy: TrendPolicy) -> float:
    """Return bytes per position by which a counter rises beyond what is known; 0 if that may be nothing.

    Args:
        growth: what the counter shows.
        known: bytes per position that are accounted for.
        policy: of the counter.
    """
    missing = growth.rate - known
    surely = growth.low - known >= policy.least and missing >= POLICY.unnamed * growth.rate
    return missing if surely else 0.0


def unnamed_growth(
    counter: str,
    evidence: ScaleEvidence,
    named: Iterable[Finding],
    held: float | None,
    resident_contradicts: bool,
    native: Sequence[DataGrowth] = (),
    containers: Iterable[GrowingData] = (),
    *,
    covered: bool = True,
) -> Finding | None:
    """Make the finding of a counter's growth that no census named: memory that only C++ sees.

    If a container of ordinary data grew as fast, it is the holder.

    Args:
        counter: its name.
        evidence: what the counters say.
        named: findings of growth that has a holder.
        held: bytes per position by which everything with a holder grew meanwhile, leak or not; None without
            two censuses.
        resident_contradicts: the resident set shows no such growth.
        native: growing containers, including those of objects whose memory only C++ knows.
        containers: all containers that grew up to the last census.
        covered: whether censuses were taken while it grew.
    """
    growth = evidence.estimates.get(counter)
    of_native = next((growth for growth in native if growth.data.native is not None), None)
    holder = None if of_native is None else of_native.data
    # If a container of native objects proves the growth, the counter only measures it.
    proven = of_native is not None and of_native.proof.certainty == "proven"
    if growth is None or not (growth.state == "growing" or (proven and growth.state == "undecided")):
        return None
    policy: TrendPolicy = trend_policy(counter)
    devices = {counter} if counter.startswith("cuda:") else {"cpu", "host"}
    # Suspected growth may have come once. `held` includes it.
    known: float = sum(
        _rate_on(finding, evidence.scale)
        for finding in named
        if finding.device in devices and finding.certainty != "suspected"
    )
    data = sum(_rate_on(finding, evidence.scale) for finding in named if finding.device == "host")
    known = max(known, (held or 0.0) + (data if counter == "cpu" else 0))
    missing = unexplained(growth, known, policy)
    if not missing:
        return None
    if holder is None and counter == "cpu":
        slowest, fastest = (part * missing for part in POLICY.as_fast)
        holder = next((each for each in containers if slowest <= each.rate <= fastest), None)
    where = "host" if counter == "cpu" else counter
    open_because = ["the resident set does not grow with it"] if resident_contradicts else []
    if evidence.caches_may_fill and counter == "cpu" and holder is None:
        open_because += ["a cache with an entry for each shape of the input may still be filling"]
    unseen = holder is None and (held is None or not covered)
    if held is None or not covered:
        open_because += ["the censuses since then do not show what holds it"]
    cause = (
        _cause_of_data(holder, evidence)
        if holder
        else _cause_unseen(counter, evidence, None if unseen else held)
    )
    rates = _rates(missing, counter, evidence)
    projection = _projection(where, rates, evidence)
    span = evidence.position.on(evidence.scale) - (growth.onset or 0)
    unit = unit_of(evidence.scale)
    return Finding(
        kind="leak",
        device=where,
        bytes=round(missing * max(1, span)),
        bytes_per_step=rates.step,
        bytes_per_microbatch=rates.microbatch,
        bytes_per_second=rates.second,
        certainty="suspected" if open_because else "proven",
        holder=None if holder else NOT_NAMED if unseen else CPP_ONLY,
        holder_path=holder.path if holder else None,
        allocated_at=holder.allocated_at if holder else None,
        stored_at=holder.stored_at if holder else None,
        mechanism=cause.mechanism,
        fix=cause.fix,
        playbook=LEAKS,
        step=evidence.position.step,
        projection=projection,
        evidence=[
            f"the counter of {counter} rises by {size(round(growth.rate))} per {unit} "
            f"({size(round(growth.low))} to {size(round(growth.high))}); "
            f"censuses name {size(round(known))} of it",
            *(f"suspected only: {why}" for why in open_because),
            *_said(projection),
        ],
    )


def _rate_on(finding: Finding, scale: Scale) -> int:
    rate = {
        "step": finding.bytes_per_step,
        "microbatch": finding.bytes_per_microbatch,
        "second": finding.bytes_per_second,
    }[scale]
    return rate or 0


def _cause_unseen(counter: str, evidence: ScaleEvidence, held: float | None) -> MechanismText:
    if counter == "cpu" and evidence.profiled:
        return MechanismText(PROFILER.why, PROFILER.fix)
    if held is None:
        return MECHANISMS["not named"]
    return MECHANISMS["native code"].filled({"shapes": f"{ONEDNN.why}; {ONEDNN.fix}"})


def _cause_of_data(data: GrowingData, evidence: ScaleEvidence) -> MechanismText:
    return _explained(data, evidence) if data.native is None else _native_cause(data)


def _native_cause(data: GrowingData) -> MechanismText:
    path, kind, part = data.path, data.native or "", growing_part(data.classes)
    if part is not None:
        return MechanismText(f"{in_words(path)} gets new objects of type {kind}: {part.why}", part.fix)
    if "ProcessGroup" in kind or path[0].name.startswith("torch.distributed"):
        return MECHANISMS["process groups"]
    return MECHANISMS["objects of C++"].filled({"subject": in_words(path), "type": kind})
