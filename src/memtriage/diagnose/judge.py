"""From what was followed during a run to findings: which suspicions held to the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memtriage.diagnose.growth import Series, floor_growth, steps_left, went_on
from memtriage.diagnose.leaks import GroupGrowth
from memtriage.diagnose.mechanisms import Held, explain
from memtriage.model.census import GroupDetail
from memtriage.model.findings import Finding, Projection
from memtriage.model.paths import HolderPath, SegmentKind, has, in_words, without_last_item
from memtriage.model.playbook import LEAKS
from memtriage.model.position import Scale, TrainingPosition
from memtriage.model.units import size
from memtriage.observe.holders.growing import ONEDNN

_UNNAMED_FLOOR = 32 * 1024
_UNNAMED_MARKS = 16
_UNNAMED_STEADY = 0.9
_UNNAMED_SHARE = 0.3
_STAYS = 0.5


@dataclass(frozen=True, slots=True)
class NativeHolder:
    """Something in Python that keeps more and more objects whose memory only C++ knows of.

    Attributes:
        path: its holder path; of autograd nodes up to `grad_fn`.
        what: `autograd nodes`, or the C++ type of its entries.
        more: objects that came between two censuses.
    """

    path: HolderPath
    what: str
    more: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run's counters say, for the judgement.

    Attributes:
        series: counter at the end of steps, by device.
        limits: bytes at which memory runs out, by device.
        used: bytes in use at the last mark, by device, as that limit counts them.
        position: where training stands.
        quiet_since: step of the last census; recorders and censuses move malloc's counter a little.
    """

    series: Mapping[str, Series]
    limits: Mapping[str, int]
    used: Mapping[str, int]
    position: TrainingPosition
    quiet_since: int | None = None

    def went_on(self, device: str, since: int, rate: float) -> bool | None:
        """Whether a growth of `rate` bytes a step went on behind step `since`; None: too short to tell."""
        series = self.series.get(device)
        return None if series is None else went_on(series, since, rate)


def group_finding(
    growth: GroupGrowth,
    detail: GroupDetail,
    evidence: Evidence,
    *,
    scale: Scale,
    last_step: int,
    collector_off: bool,
    lengthening: bool,
    period: int = 1,
) -> Finding | None:
    """The finding of one growing group of storages; None when it turns out to be no leak.

    No leak: a container with a bound of its own, a cycle that the collector will free, growth that stopped.
    Rates are for each completed backward; `period` of them make one pass of the program over a micro-batch.
    """
    garbage = has(growth.group.anchor, SegmentKind.GARBAGE_CYCLE)
    if garbage and not collector_off:
        return None
    if detail.bound is not None:
        return None
    counter = "shared" if detail.shared else growth.group.device
    if scale == "step" and evidence.went_on(counter, last_step, growth.rate) is False:
        return None
    explanation = explain(held_by(growth, detail, evidence.position, lengthening))
    per_step, per_microbatch = _rates(growth, evidence, scale)
    projection = _projection(growth.group.device, per_step, per_microbatch, evidence)
    return Finding(
        kind="garbage_cycle" if garbage else "leak",
        device=growth.group.device,
        bytes=growth.group.nbytes,
        bytes_per_step=per_step,
        bytes_per_microbatch=per_microbatch,
        holder_path=growth.path,
        also_held_by_paths=detail.also_held_by,
        allocated_at=detail.allocated_at,
        stored_at=detail.stored_at,
        mechanism=explanation.mechanism,
        fix=explanation.fix,
        playbook=LEAKS,
        step=last_step,
        projection=projection,
        evidence=[
            _came(growth, scale),
            *_of_several(growth, period),
            *_retained(detail, growth),
            *([f"the largest storage is kept for backward by {detail.saved_by}"] if detail.saved_by else []),
            *_said(projection),
        ],
    )


def held_by(growth: GroupGrowth, detail: GroupDetail, position: TrainingPosition, lengthening: bool) -> Held:
    """What the rules of mechanisms look at, of one growing group."""
    owners = growth.group.owners
    return Held(
        path=growth.path,
        anchor=growth.group.anchor,
        attached=growth.group.attached,
        owner=max(owners, key=lambda name: owners[name]),
        kind=detail.holder_kind,
        lengthens=lengthening,
        shared=detail.shared,
        known=_known_holder(growth),
        gradients=position.backwards > 0 or position.step > 0 or detail.backward_ran,
        differentiated=detail.differentiated,
        entries_grow=growth.entries_grow,
        anchor_owner=detail.anchor_owner,
        packs_itself=detail.packs_itself,
        stored_value=detail.stored_value,
        stored_at=detail.stored_at,
        stored_by_hook=detail.stored_by_hook,
        carried=detail.carried,
        classes=tuple(detail.classes),
    )


def _known_holder(growth: GroupGrowth) -> str | None:
    """The entry of the catalogue that keeps more than half of a group."""
    known = growth.group.known
    name = max(known, key=lambda one: known[one], default=None)
    return name if name is not None and 2 * known[name] > growth.group.nbytes else None


def _rates(growth: GroupGrowth, evidence: Evidence, scale: Scale) -> tuple[int | None, int | None]:
    if scale == "microbatch":
        # From step to step it may be there as well, or be gone at the end of each step.
        series = evidence.series.get(growth.group.device)
        by_step = None if series is None else floor_growth(series)
        of_a_step = growth.rate * evidence.position.microbatches_per_step
        stays = by_step is not None and by_step >= _STAYS * of_a_step > 0
        return (round(of_a_step) if stays else None), round(growth.rate)
    if scale == "second":
        return None, None
    per_step = round(growth.rate)
    return per_step, round(growth.rate / max(1, evidence.position.microbatches_per_step))


def _came(growth: GroupGrowth, scale: Scale) -> str:
    what = (
        f"{growth.count} more storages, {size(growth.nbytes)} more" if growth.count else size(growth.nbytes)
    )
    span = f"{growth.distance} {_SPANS[scale]}"
    return f"two censuses {span} apart: {what} at the same place of the program"


def _of_several(growth: GroupGrowth, period: int) -> list[str]:
    if period == 1:
        return []
    return [
        f"the program runs {period} backwards for each micro-batch of its own, and keeps "
        f"{size(growth.rate * period)} of each; rates here are for one backward"
    ]


_SPANS: dict[Scale, str] = {"step": "steps", "microbatch": "micro-batches of one step", "second": "seconds"}


def _retained(detail: GroupDetail, growth: GroupGrowth) -> list[str]:
    if not detail.retained:
        return []
    kind = f" ({detail.holder_kind})" if detail.holder_kind else ""
    return [f"the holding object{kind} alone retains {size(detail.retained)} of {size(growth.group.nbytes)}"]


def _projection(
    device: str, per_step: int | None, per_microbatch: int | None, evidence: Evidence
) -> Projection | None:
    limit, used = evidence.limits.get(device), evidence.used.get(device)
    if limit is None:
        return None
    left = steps_left(limit, used, per_step)
    if left is not None:
        return Projection(device=device, limit=limit, step=evidence.position.step + left)
    left = steps_left(limit, used, per_microbatch)
    if left is not None:
        return Projection(device=device, limit=limit, microbatches=evidence.position.into_step + left)
    return None


def _said(projection: Projection | None) -> list[str]:
    return [] if projection is None else [str(projection)]


def host_finding(
    path: HolderPath,
    kind: str | None,
    nbytes: int,
    steps: int,
    allocated_at: str | None,
    evidence: Evidence,
    last_step: int,
) -> Finding | None:
    """The finding of a growing container of ordinary data; None when malloc's counter stopped rising."""
    rate = nbytes / max(1, steps)
    if evidence.went_on("cpu", last_step, rate) is False:
        return None
    subject = in_words(without_last_item(path))
    projection = _projection("host", round(rate), None, evidence)
    return Finding(
        kind="leak",
        device="host",
        bytes=nbytes,
        bytes_per_step=round(rate),
        bytes_per_microbatch=round(rate / max(1, evidence.position.microbatches_per_step)),
        holder_path=path,
        allocated_at=allocated_at,
        mechanism=f"{subject} ({kind}) gets new entries at every step and never lets go of old ones",
        fix="clear it when its content has been used, keep reduced values, write entries out, or bound it "
        "(`collections.deque(maxlen=...)`)",
        playbook=LEAKS,
        step=last_step,
        projection=projection,
        evidence=[
            f"{size(nbytes)} more in {steps} steps, tensors not counted",
            *_said(projection),
        ],
    )


def unnamed_growth(
    device: str, evidence: Evidence, named: Iterable[Finding], holders: Sequence[NativeHolder] = ()
) -> Finding | None:
    """What the counter says grows beyond all that the censuses named: memory that only C++ sees.

    It needs a long, steady rise: nine of ten marks higher than the one before, and a floor that rises over
    four successive windows. (What awaits the cyclic collector falls back now and then.)
    """
    series = evidence.series.get(device)
    if series is None or len(series.values) < _UNNAMED_MARKS:
        return None
    settled = Series(series.positions[4:], series.values[4:])
    rate = floor_growth(settled, windows=4)
    if evidence.quiet_since is not None and rate is not None:
        undisturbed = floor_growth(series.after(evidence.quiet_since), windows=3)
        rate = undisturbed if undisturbed is not None else rate
    rises = sum(b > a for a, b in pairwise(settled.values))
    if rate is None or rises < _UNNAMED_STEADY * (len(settled.values) - 1):
        return None
    devices = {device} if device != "cpu" else {"cpu", "host"}
    known = sum(finding.bytes_per_step or 0 for finding in named if finding.device in devices)
    missing = rate - known
    if missing < _UNNAMED_FLOOR or missing < _UNNAMED_SHARE * rate:
        return None
    where = "host" if device == "cpu" else device
    holder = holders[0] if holders else None
    mechanism, fix = _native_cause(holder)
    projection = _projection(where, round(missing), None, evidence)
    return Finding(
        kind="leak",
        device=where,
        bytes=round(missing * (settled.positions[-1] - settled.positions[0])),
        bytes_per_step=round(missing),
        bytes_per_microbatch=round(missing / max(1, evidence.position.microbatches_per_step)),
        holder=None if holder else "C++ only (no Python object and no autograd node leads to it)",
        holder_path=holder.path if holder else None,
        mechanism=mechanism,
        fix=fix,
        playbook=LEAKS,
        step=evidence.position.step,
        projection=projection,
        evidence=[
            f"the counter of {device} rises by {size(round(rate))} a step; censuses name "
            f"{size(round(known))} of it",
            *([f"{holder.more} more objects ({holder.what}) between two censuses"] if holder else []),
            *_said(projection),
        ],
    )


def _native_cause(holder: NativeHolder | None) -> tuple[str, str]:
    if holder is None:
        return (
            "memory that native code allocates and keeps rises at every step; Python does not see it",
            "look at native libraries called once a step (tokenizers, data loaders, script modules); a "
            "profiler of native allocations such as `memray run --native` names the call. Where shapes vary: "
            f"{ONEDNN.why}; {ONEDNN.fix}",
        )
    if holder.path[-1].kind is SegmentKind.GRAD_FN:
        return (
            f"{in_words(holder.path[:-1])} keeps tensors with a grad_fn; backward has freed "
            "what their graphs had saved, but the graphs' nodes themselves stay, in host memory",
            "append `loss.detach()` or `loss.item()` instead of the tensor itself",
        )
    if "ProcessGroup" in holder.what or holder.path[0].name.startswith("torch.distributed"):
        return (
            "process groups are made again and again; torch.distributed keeps each until it is destroyed",
            "make a group once and reuse it, or call torch.distributed.destroy_process_group(group) for each",
        )
    return (
        f"{in_words(holder.path)} gets new objects of type {holder.what}, which hold memory of a C++ library",
        "clear it when its content has been used, or close what the objects stand for",
    )


def without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each holder: a growth seen inside a step and from step to step is one leak."""
    merged: dict[tuple[str, HolderPath | str | None], Finding] = {}
    for finding in findings:
        key = (finding.device, finding.held_at)
        known = merged.get(key)
        if known is None:
            merged[key] = finding
            continue
        better, other = (known, finding) if known.bytes_per_step is not None else (finding, known)
        better.allocated_at = better.allocated_at or other.allocated_at
        better.bytes_per_microbatch = other.bytes_per_microbatch or better.bytes_per_microbatch
        merged[key] = better
    return sorted(merged.values(), key=lambda f: -(f.bytes_per_step or (f.bytes_per_microbatch or 0)))
