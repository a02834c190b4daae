"""One cause, one leak: join leaks whose holders have a common holder. Pure.

Two growths have one cause in these cases, which are inferred from the segments of their paths:

- the same place, seen within a step and from step to step;
- a variable, and what it contains or keeps alive;
- entries of one container: `params['0.bias']` and `params['0.weight']`;
- parts of the entries of one container: `episodes[*].obs` and `episodes[*].actions`;
- one name that is registered in many places of one object: `model….lora_A.adapter_*` and
  `model….lora_B.adapter_*`;
- parts of one cycle through C++, or of garbage cycles that begin at objects of one class;
- variables of the functions that one kept exception passed;
- what one part of a library keeps in one variable: a metric's `preds` and `target`;
- two variables whose tensors have one graph, or that have the same entries.

Attributes of one object are not one cause: two lines of the program store into `trainer.losses` and
`trainer.outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, permutations, takewhile
from typing import Final

import msgspec

from memtriage.catalogue.growing import growing_part
from memtriage.diagnose.cuts import cuts_of
from memtriage.diagnose.growth.facts import Counted, Leak, Per
from memtriage.diagnose.held import Held
from memtriage.model.census import CutSeen
from memtriage.model.findings import DEVICE_HOST
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind

SPEAKS_FOR_ALL: Final = 0.75
"""A holder with at least this part of the growth names the whole leak: the others are small parts of the same
entries, and the folded path would say less."""
_ROOTS: Final = frozenset(
    (SegmentKind.FRAME, SegmentKind.THREAD, SegmentKind.MODULE, SegmentKind.CLASS, SegmentKind.GENERATOR)
)
"""Kinds of segments that say where a variable is; the variable after them is the holder."""
_UNITS: Final[tuple[Per, ...]] = ("step", "micro-batch", "second")
_NAMED: Final = frozenset((SegmentKind.ATTRIBUTE, SegmentKind.HOOKS))
_ANY_ATTRIBUTE: Final = PathSegment(SegmentKind.ATTRIBUTE, "*")


def one_a_cause(leaks: Sequence[Leak]) -> list[Leak]:
    """Join leaks of one cause on one device; return them fastest first, those without a holder last.

    Rates and bytes add up, except for one place seen on two scales. A leak includes other host memory that
    its holder keeps, and what only a counter shows of the holder's entries.
    """
    groups: list[list[Leak]] = []
    for leak in leaks:
        same = [group for group in groups if any(_one_cause(each, leak) for each in group)]
        apart = [group for group in groups if group not in same]
        groups = [*apart, [*chain.from_iterable(same), leak]]
    return sorted(map(_joined, groups), key=_speed, reverse=True)


def _speed(leak: Leak) -> tuple[bool, int, int]:
    return leak.path is not None, leak.rate, leak.nbytes


def _one_cause(first: Leak, second: Leak) -> bool:
    if first.path is None or second.path is None or first.kind != second.kind:
        return False
    if memory_of(first) != memory_of(second):
        return isinstance(second.shown_by, Counted) and first.path == second.path
    if _are_cut_together(first, second):
        return True
    held = [leak.cause for leak in (first, second) if isinstance(leak.cause, Held)]
    parts = [growing_part(cause.detail.classes) for cause in held]
    one_part = len(parts) == 2 and parts[0] is parts[1] is not None
    return common_holder(first.anchor, second.anchor, one_part=one_part) is not None


def _are_cut_together(first: Leak, second: Leak) -> bool:
    """Whether the references of one holder must be cut with those of the other, to release what both keep."""
    held = [leak.cause for leak in (first, second) if isinstance(leak.cause, Held)]
    cuts = ((at, b) for a, b in permutations(held, 2) for cut in a.detail.cuts for at in cut.together)
    return any(b.anchor[: len(at)] == at for at, b in cuts)


def memory_of(leak: Leak) -> str:
    """Return which memory a leak is in: CPU tensors and other memory of the process are the same."""
    return "cpu" if leak.device == DEVICE_HOST else leak.device


def common_holder(first: HolderPath, second: HolderPath, *, one_part: bool = False) -> HolderPath | None:
    """Return the path of the common cause of two anchors; None if they have two causes.

    Segments that differ become `*`. In a garbage cycle any part leads to all others, so only the object that
    names the cycle counts.

    Args:
        first, second: the anchors.
        one_part: one part of a library keeps what both lead to.
    """
    shared = _shared(first, second)
    exception = next((at for at in range(shared) if first[at].kind is SegmentKind.TRACEBACK), None)
    if exception is not None and first != second:
        return first[: exception + 1]
    if shared and first[0].kind is SegmentKind.GARBAGE_CYCLE:
        return first[:shared]
    if first == second or first[0].kind is second[0].kind is SegmentKind.NATIVE:
        return max(first, second, key=len)
    variable = next((at for at, segment in enumerate(first) if segment.kind not in _ROOTS), len(first))
    if shared <= variable:
        return None
    if shared == min(len(first), len(second)):  # one is inside the other
        return max(first, second, key=len)
    same_container = first[shared].kind is second[shared].kind is SegmentKind.ITEM
    same_entries = any("*" in segment.name for segment in first[:shared])
    numbered = filter(_is_numbered, first[shared:])
    if one_part or same_container or same_entries or set(numbered) & set(second[shared:]):
        return _fold(first, second)
    return None


def _shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return with how many equal segments, or letters, both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _fold(first: HolderPath, second: HolderPath) -> HolderPath:
    """Both paths as one, with `*` for each segment that differs, and one `*` for all that only one has.

    A name that both have with another number (`adapter_*`) stays.
    """
    numbered = next((segment for segment in first if _is_numbered(segment) and segment in second), None)
    if numbered is not None:
        here, there = first.index(numbered), second.index(numbered)
        after = _fold(first[here + 1 :], second[there + 1 :])
        return (*_fold(first[:here], second[:there]), numbered, *after)
    if len(first) == len(second):
        return tuple(map(_either, first, second))
    shorter, longer = sorted((first, second), key=len)
    start = _shared(shorter, longer)
    end = len(longer) - _shared(shorter[start:][::-1], longer[start:][::-1])
    return (*longer[:start], _either(longer[start], _ANY_ATTRIBUTE), *longer[end:])


def _is_numbered(segment: PathSegment) -> bool:
    """Whether a segment is one name with any number: `adapter_*`."""
    return "*" in segment.name and segment not in (ANY_ITEM, _ANY_ATTRIBUTE)


def _either(a: PathSegment, b: PathSegment) -> PathSegment:
    """One segment for two: names keep their common beginning (`lora_*`)."""
    if a == b:
        return a
    if SegmentKind.ITEM in (a.kind, b.kind):
        return ANY_ITEM
    if a.kind is b.kind and a.kind in _NAMED:
        return PathSegment(a.kind, a.name[: _shared(a.name, b.name)].rstrip("*") + "*")
    return _ANY_ATTRIBUTE


def _joined(leaks: Sequence[Leak]) -> Leak:
    """Join the leaks of one cause."""
    places: dict[tuple[object, ...], Leak] = {}
    for leak in leaks:
        key = leak.device, leak.path, isinstance(leak.shown_by, Counted)
        places[key] = _on_two_scales(places[key], leak) if key in places else leak
    parts = sorted(places.values(), key=_speed, reverse=True)
    first = parts[0]
    beside = [each for each in parts[1:] if common_holder(first.anchor, each.anchor) is None]
    beside = [each for each in beside if _are_cut_together(first, each)]
    if isinstance(first.cause, Held) and first.cause.ordinary:  # their entries are the same
        parts = [each for each in parts if each not in beside]
    also = chain(*(each.also_held_by for each in parts), (each.anchor for each in beside))
    if len(parts) == 1:
        return replace(first, also_held_by=tuple(dict.fromkeys(also)))
    total = replace(
        summed(first, parts),
        device=next((part.device for part in parts if part.device != DEVICE_HOST), first.device),
        certainty="proven" if any(part.certainty == "proven" for part in parts) else first.certainty,
        also_held_by=tuple(dict.fromkeys(also)),
        allocated_at=next((part.allocated_at for part in parts if part.allocated_at), None),
        stored_at=next((part.stored_at for part in parts if part.stored_at), None),
        parts=tuple(parts),
    )
    named = total if beside or first.rate >= SPEAKS_FOR_ALL * total.rate else _renamed(total)
    if not isinstance(named.cause, Held):
        return named
    cuts = _joined_cuts([part.cause for part in parts if isinstance(part.cause, Held)])
    other = [cut for each in beside if isinstance(each.cause, Held) for cut in cuts_of(each.cause) if cut.of]
    for number, cut in enumerate(cuts):
        same = (each.at for each in other if each.cut == cut.cut)
        cuts[number] = msgspec.structs.replace(cut, together=list(dict.fromkeys([*cut.together, *same])))
    detail = msgspec.structs.replace(named.cause.detail, cuts=cuts)
    return replace(named, cause=replace(named.cause, detail=detail, joined=True, rate=total.rate))


def summed(first: Leak, parts: Sequence[Leak]) -> Leak:
    """Return the first of several leaks with the bytes and the rates of all."""
    return replace(
        first,
        nbytes=sum(part.nbytes for part in parts),
        rates={per: sum(rates) for per in _UNITS if any(rates := [p.rates.get(per, 0) for p in parts])},
        recent=sum(part.recent for part in parts),
    )


def _joined_cuts(parts: Sequence[Held]) -> list[CutSeen]:
    """Return the cuts of several holders as those of one: a kind releases what it releases of each."""
    best = [{cut.cut: cut for cut in reversed(cuts_of(part)) if cut.of} for part in parts]
    whole = sum(next(iter(cuts.values())).of for cuts in best if cuts)
    return [
        msgspec.structs.replace(
            next(cuts[kind] for cuts in best if kind in cuts),
            releases=sum(cuts[kind].releases for cuts in best if kind in cuts),
            of=whole,
        )
        for kind in dict.fromkeys(chain.from_iterable(best))
    ]


def _on_two_scales(first: Leak, second: Leak) -> Leak:
    """One place's growth as seen on the coarser scale, with the rate that only the other scale has."""
    better, worse = (first, second) if "step" in first.rates else (second, first)
    return replace(
        better,
        rates={**better.rates, **{per: rate for per, rate in worse.rates.items() if per == "micro-batch"}},
        certainty="proven" if "proven" in (first.certainty, second.certainty) else better.certainty,
        allocated_at=better.allocated_at or worse.allocated_at,
        stored_at=better.stored_at or worse.stored_at,
    )


def _renamed(total: Leak) -> Leak:
    """Return the leak with the common path of its parts, of which the cause is then inferred."""
    anchor = reduce(lambda a, b: common_holder(a, b) or _fold(a, b), [part.anchor for part in total.parts])
    specific = next((part for part in total.parts if part.anchor == anchor), total.parts[0])
    path = (*anchor, *(specific.path or ())[len(specific.anchor) :])
    cause = specific.cause
    if isinstance(cause, Held):
        cause = replace(cause, path=path, anchor=anchor)
    return replace(total, path=path, cause=cause)
