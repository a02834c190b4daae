"""One cause, one finding: join findings whose holders have a common holder. Pure.

Two growths have one cause in these cases, which are inferred from the segments of their paths:

- the same place, seen within a step and from step to step;
- a variable, and what it contains or keeps alive;
- entries of one container: `params['0.bias']` and `params['0.weight']`;
- parts of the entries of one container: `episodes[*].obs` and `episodes[*].actions`;
- one name that is registered in many places of one object: `model….lora_A.adapter_*` and
  `model….lora_B.adapter_*`;
- parts of one cycle through C++, which nothing in Python leads to;
- parts of garbage cycles that begin at objects of one class;
- what one part of a library keeps in one variable: a metric's `preds` and `target`.

Attributes of one object are not one cause: two lines of the program store into `trainer.losses` and
`trainer.outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, combinations, takewhile
from typing import Final

import msgspec

from memtriage.catalogue.growing import GrowingPart, growing_part
from memtriage.diagnose.mechanisms import Held, mechanism_of
from memtriage.model.findings import DEVICE_HOST, GROWING, Finding, Projection
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, anchor_of, in_words
from memtriage.model.units import size


@dataclass(frozen=True, slots=True)
class FoldingPolicy:
    """How findings of one cause are joined.

    Attributes:
        speaks_for_all: a holder with at least this part of the growth names the whole finding: the others are
            small parts of the same entries, and the folded path would say less.
    """

    speaks_for_all: float = 0.75


POLICY: Final = FoldingPolicy()

_PLACES: Final = frozenset((SegmentKind.ITEM, SegmentKind.ATTRIBUTE, SegmentKind.HOOKS))
_ROOTS: Final = frozenset(
    (SegmentKind.FRAME, SegmentKind.THREAD, SegmentKind.MODULE, SegmentKind.CLASS, SegmentKind.GENERATOR)
)
"""Kinds of segments that say where a variable is; the variable after them is the holder."""
_NAMED: Final = frozenset((SegmentKind.ATTRIBUTE, SegmentKind.HOOKS))
_TELLING: Final = 2
"""Two names keep a common beginning of at least this many letters."""
_PARTS: Final = 4
"""Parts of a folded finding that its evidence lists."""


def one_a_cause(
    findings: Sequence[Finding], held: Mapping[HolderPath, Held] | None = None, policy: FoldingPolicy = POLICY
) -> list[Finding]:
    """Join growing findings of one cause on one device; the others stay as they are, and come last.

    Rates and bytes add up, except for one place seen on two scales. Other host memory that holders of CPU
    tensors keep belongs to the same finding. The given findings are not changed.

    Args:
        findings: of one process.
        held: what the rules of mechanisms look at, by `Finding.holder_path`. Without it the path alone
            decides on a joined finding's mechanism.
        policy: thresholds.

    Returns:
        Growing findings, fastest first, then the others in their order.
    """
    growing = [finding for finding in findings if finding.kind in GROWING]
    others = [finding for finding in findings if finding.kind not in GROWING]
    cause = list(range(len(growing)))
    known = held or {}
    for first, second in combinations(range(len(growing)), 2):
        if cause[first] != cause[second] and _one_cause(growing[first], growing[second], known):
            old, new = cause[second], cause[first]
            cause = [new if number == old else number for number in cause]
    members = [
        [growing[at] for at, number in enumerate(cause) if number == cause_number]
        for cause_number in dict.fromkeys(cause)
    ]
    folded = [_folded(member, known, policy) for member in members]
    return [*sorted(folded, key=_speed, reverse=True), *others]


def with_native_part(leak: Finding, native: Finding) -> Finding:
    """Add to a container's leak the native memory that its entries keep, which a counter shows."""
    both = (leak, native)
    return msgspec.structs.replace(
        max(both, key=rate_of),
        bytes=_sum([part.bytes for part in both]),
        bytes_per_step=_sum([part.bytes_per_step for part in both]),
        bytes_per_microbatch=_sum([part.bytes_per_microbatch for part in both]),
        bytes_per_second=_sum([part.bytes_per_second for part in both]),
        certainty="proven" if "proven" in (leak.certainty, native.certainty) else native.certainty,
        allocated_at=leak.allocated_at or native.allocated_at,
        stored_at=leak.stored_at or native.stored_at,
        projection=_sooner(both),
        evidence=[*leak.evidence, *native.evidence],
    )


def _speed(finding: Finding) -> tuple[int, int]:
    return rate_of(finding), finding.bytes or 0


def _one_cause(first: Finding, second: Finding, held: Mapping[HolderPath, Held]) -> bool:
    if first.kind != second.kind or first.rank != second.rank or memory_of(first) != memory_of(second):
        return False
    if first.holder_path is None or second.holder_path is None:
        return first.held_at is not None and first.held_at == second.held_at and first.device == second.device
    parts = [_library_part(path, held) for path in (first.holder_path, second.holder_path)]
    anchors = anchor_of(first.holder_path), anchor_of(second.holder_path)
    return common_holder(*anchors, one_part=parts[0] is not None and parts[0] is parts[1]) is not None


def _library_part(path: HolderPath, held: Mapping[HolderPath, Held]) -> GrowingPart | None:
    return growing_part(held[path].classes) if path in held else None


def memory_of(finding: Finding) -> str:
    """Return which memory a finding is about: CPU tensors and other memory of the process are the same."""
    return "cpu" if finding.device == DEVICE_HOST else finding.device


def common_holder(first: HolderPath, second: HolderPath, *, one_part: bool = False) -> HolderPath | None:
    """Return the path of the common cause of two anchors; None if they have two causes.

    Segments that differ become `*`. In a garbage cycle any part leads to all others, so only the object that
    names the cycle counts.

    Args:
        first, second: the anchors.
        one_part: one part of a library keeps what both lead to.
    """
    shared = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if first[0] == second[0] and first[0].kind is SegmentKind.GARBAGE_CYCLE:
        return first[:shared] if shared is not None else min(first, second, key=len)
    if shared is None:  # the same, or one is inside the other
        shorter, longer = sorted((first, second), key=len)
        return longer if len(shorter) > _root_length(shorter) or shorter == longer else None
    if first[0].kind is second[0].kind is SegmentKind.NATIVE:
        return max(first, second, key=len)
    if shared <= _root_length(first):  # two variables
        return None
    same_container = first[shared].kind is second[shared].kind is SegmentKind.ITEM
    same_entries = any("*" in segment.name for segment in first[:shared])
    if one_part or same_container or same_entries or _registered_alike(first[shared:], second[shared:]):
        return _fold(first, second)
    return None


def _root_length(anchor: HolderPath) -> int:
    """Number of segments that say where the variable is, without the variable itself."""
    return next((at for at, segment in enumerate(anchor) if segment.kind not in _ROOTS), len(anchor))


def _registered_alike(first: HolderPath, second: HolderPath) -> bool:
    """Whether both lead to entries that are numbered under one name, as `adapter_*`."""
    return bool(_numbered_names(first) & _numbered_names(second))


def _numbered_names(path: HolderPath) -> set[str]:
    return {segment.name for segment in path if "*" in segment.name and segment != ANY_ITEM}


def _fold(first: HolderPath, second: HolderPath) -> HolderPath:
    """Both paths as one, with `*` for each segment that differs, and one `*` for all that only one has."""
    if len(first) == len(second):
        return tuple(map(_either, first, second))
    shorter = min(len(first), len(second))
    start = next((at for at in range(shorter) if first[at] != second[at]), shorter)
    rest = shorter - start
    end = next((at for at in range(rest) if first[-1 - at] != second[-1 - at]), rest)
    middle = first[start] if len(first) > start else second[start]
    tail = first[len(first) - end :] if end else ()
    return (*first[:start], _any(middle), *tail)


def _either(a: PathSegment, b: PathSegment) -> PathSegment:
    """One segment for two: names keep their common beginning (`lora_*`)."""
    if a == b:
        return a
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(a.name, b.name, strict=False))
    common = "".join(letter for letter, _ in alike).rstrip("*")
    if a.kind is b.kind and a.kind in _NAMED and len(common) >= _TELLING:
        return PathSegment(a.kind, f"{common}*")
    return _any(a if a.kind is SegmentKind.ITEM else b)


def _any(segment: PathSegment) -> PathSegment:
    """Any name in this place."""
    if segment.kind is SegmentKind.ITEM:
        return ANY_ITEM
    return PathSegment(segment.kind if segment.kind in _PLACES else SegmentKind.ATTRIBUTE, "*")


def _folded(findings: Sequence[Finding], held: Mapping[HolderPath, Held], policy: FoldingPolicy) -> Finding:
    """Join the findings of one cause."""
    places: dict[tuple[str, object], Finding] = {}
    for finding in findings:
        key = finding.device, finding.held_at
        places[key] = _on_two_scales(places[key], finding) if key in places else finding
    parts = sorted(places.values(), key=_speed, reverse=True)
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    total = msgspec.structs.replace(
        first,
        device=next((part.device for part in parts if part.device != DEVICE_HOST), first.device),
        bytes=_sum([part.bytes for part in parts]),
        bytes_per_step=_sum([part.bytes_per_step for part in parts]),
        bytes_per_microbatch=_sum([part.bytes_per_microbatch for part in parts]),
        bytes_per_second=_sum([part.bytes_per_second for part in parts]),
        certainty="proven" if any(part.certainty == "proven" for part in parts) else first.certainty,
        also_held_by=list(dict.fromkeys(chain.from_iterable(part.also_held_by for part in parts))),
        also_held_by_paths=list(dict.fromkeys(chain.from_iterable(p.also_held_by_paths for p in parts))),
        allocated_at=next((part.allocated_at for part in parts if part.allocated_at), None),
        stored_at=next((part.stored_at for part in parts if part.stored_at), None),
        projection=_sooner(parts),
    )
    projections = {str(part.projection) for part in parts}
    # The evidence of several parts would be contradictory. So take that of one part with the same certainty.
    telling = next(part for part in parts if part.certainty == total.certainty)
    named = [telling, *(part for part in parts if part is not telling)]
    total.evidence = [
        "the sum of: " + "; ".join(map(_share, named[:_PARTS])) + _more(len(parts)),
        *(f"the first of these: {said}" for said in telling.evidence if said not in projections),
    ]
    if total.projection is not None:
        total.evidence.append(str(total.projection))
    if rate_of(first) >= policy.speaks_for_all * rate_of(total):
        return total
    return _renamed(total, parts, held)


def _on_two_scales(first: Finding, second: Finding) -> Finding:
    """One place's growth as seen on the coarser scale, with the rate that only the other scale has."""
    better, worse = (first, second) if first.bytes_per_step is not None else (second, first)
    return msgspec.structs.replace(
        better,
        bytes_per_microbatch=worse.bytes_per_microbatch or better.bytes_per_microbatch,
        bytes_per_second=better.bytes_per_second or worse.bytes_per_second,
        certainty="proven" if "proven" in (first.certainty, second.certainty) else better.certainty,
        allocated_at=better.allocated_at or worse.allocated_at,
        stored_at=better.stored_at or worse.stored_at,
    )


def _renamed(total: Finding, parts: Sequence[Finding], held: Mapping[HolderPath, Held]) -> Finding:
    """Return the finding with the common path of its parts, and the mechanism of that path."""
    paths = [part.holder_path for part in parts if part.holder_path is not None]
    anchor = reduce(_together, map(anchor_of, paths))
    telling = next((path for path in paths if anchor_of(path) == anchor), paths[0])
    path = (*anchor, *telling[len(anchor_of(telling)) :])
    known = held.get(telling) or Held(telling, anchor_of(telling), path != anchor, owner="")
    mechanism = mechanism_of(replace(known, path=path, anchor=anchor))
    return msgspec.structs.replace(
        total, holder=in_words(path), holder_path=path, mechanism=mechanism.mechanism, fix=mechanism.fix
    )


def _together(first: HolderPath, second: HolderPath) -> HolderPath:
    return common_holder(first, second) or _fold(first, second)


def rate_of(finding: Finding) -> int:
    """Return its growth in bytes per step; without steps, per micro-batch or second."""
    return finding.bytes_per_step or finding.bytes_per_microbatch or finding.bytes_per_second or 0


def _share(part: Finding) -> str:
    return f"{size(rate_of(part))} {_unit(part)} at {part.holder}"


def _unit(part: Finding) -> str:
    if part.bytes_per_step is not None:
        return "per step"
    return "per micro-batch" if part.bytes_per_microbatch is not None else "per second"


def _more(parts: int) -> str:
    return f"; {parts - _PARTS} more" if parts > _PARTS else ""


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _sooner(parts: Sequence[Finding]) -> Projection | None:
    """When memory is full if all parts continue to grow: each uses a part of what is left."""
    ends = [(part.projection, part.step or 0) for part in parts if part.projection is not None]
    by_step = [(end.step - now, end, now) for end, now in ends if end.step is not None and end.step > now]
    if by_step:
        steps_left = 1 / sum(1 / steps for steps, _, _ in by_step)
        return msgspec.structs.replace(by_step[0][1], step=by_step[0][2] + int(steps_left))
    by_batch = [(end.microbatches, end) for end, _ in ends if end.microbatches]
    if by_batch:
        return msgspec.structs.replace(by_batch[0][1], microbatches=int(1 / sum(1 / n for n, _ in by_batch)))
    return None
