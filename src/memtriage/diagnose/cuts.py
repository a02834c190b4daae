"""Which change stops a growth: the cuts that apply to a holder, the best one first.

What each cut would release is computed at a census (`account/cuts.py`). Here one is chosen: it must stop the
growth, and of those that do, the one comes first that changes least of what the program does. In a record
without these figures the holder path alone decides. What to say is in `playbook/cuts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from memtriage.catalogue.growing import growing_part
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.held import (
    Held,
    carries_graph,
    container,
    expression,
    generators_pile_up,
    hooks_pile_up,
    is_carried,
    is_context_attribute,
    kept_value,
    named,
    never_differentiated,
    on_context,
    only_native,
    subject,
    writable,
)
from memtriage.model.census import CutKind, CutSeen
from memtriage.model.findings import ReferenceCut
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    SegmentKind,
    anchor_of,
    has,
    in_words,
    is_hook_of_node,
    is_native,
    last_name,
)
from memtriage.model.units import rate, size
from memtriage.playbook.cuts import BOUNDS, CUTS

_STOPS: Final = 0.9
"""A cut stops a growth if it releases this part of what the holder keeps."""
_LEAST: Final = ESTIMATE.least
"""What remains per position or event, if it is less, is the program's own bookkeeping."""
_OF_ENTRIES: Final = frozenset(("bound", "remove", "cache", "close"))
"""Kinds of cuts that take whole entries out of a container."""
_IN_USE: Final = 2.0
"""What so many events have brought may still be in use: variables of a loop keep what its last pass made."""


def cuts_of(held: Held) -> list[CutSeen]:
    """Return the cuts that apply, the best one first; `of` is 0 for one that was not measured."""
    measured: dict[CutKind, CutSeen] = {}
    for cut in held.detail.cuts:
        known = measured.get(cut.cut)
        if cut.cut == "detach" and is_carried(held) and not is_native(held.anchor):
            # Detached at each step, all but the present value is released.
            here = named(cut.at) == subject(held) or _covers(held.anchor, cut.at)
            cut = msgspec.structs.replace(cut, of=cut.releases if here else 0)
        if (held.joined or _is_in_place(cut, held)) and (known is None or cut.releases > known.releases):
            measured[cut.cut] = cut
    for kind in applicable(held):
        measured.setdefault(kind, CutSeen(cut=kind, at=held.anchor, releases=0, of=0))
    return sorted(measured.values(), key=lambda cut: (_grows_on(cut, held), _change(cut.cut, held)))


def fix_of(held: Held) -> str:
    """Return what to change, and what that leaves."""
    cuts = cuts_of(held)
    if not cuts:
        return CUTS["release"]
    best = cuts[0]
    text = _words(best, held)
    if not best.of:
        return text
    remains = 0 if held.rate is None else _remains(best, held.rate)
    left = f"; {rate(remains, held.every)} remain" if remains else ""
    own = {expression(named(best.at)), expression(container(held))}
    others = {expression(named(each)): None for each in best.together if not _covers(held.anchor, each)}
    also = ", ".join(name for name in others if name not in own)
    also = f" (and the same in {also})" if also else ""
    return f"{text}{also}: releases {size(best.releases)} of {size(best.of)}{left}"


def _covers(folded: HolderPath, path: HolderPath) -> bool:
    """Whether a path is one of those that a folded path stands for."""
    alike = (a == b or "*" in a.name for a, b in zip(folded, path, strict=False))
    return len(folded) == len(path) and all(alike)


def as_found(held: Held) -> list[ReferenceCut]:
    """Return the cuts as a finding has them."""
    return [
        ReferenceCut(
            cut=cut.cut,
            at=in_words(cut.at),
            releases=cut.releases if cut.of else None,
            remains_per_event=None if held.rate is None or not cut.of else _remains(cut, held.rate),
            line=held.detail.stored_at,
        )
        for cut in cuts_of(held)
    ]


def words_of(held: Held) -> dict[str, str]:
    """Return the words of sentences about a holder: its own names, and what it stores."""
    value, own = kept_value(held), subject(held)
    several = held.anchor[-1].kind is SegmentKind.ITEM
    entries = held.detail.holder_kind if several and own[-1] != held.anchor[-1] else None
    of_array = held.ordinary or any(segment.name == "<ndarray>" for segment in held.anchor)
    copy = ".copy()" if of_array else ".clone()"
    name = last_name(own) if ANY_ITEM in own else expression(own)  # `[*]` is no code
    return {
        "subject": in_words(own),
        "name": name,
        "container": in_words(container(held)),
        "container_name": expression(container(held)),
        "attribute": in_words(tuple(filter(is_context_attribute, held.path))[:1]),
        "detached": f"`{value}.detach()`" + (f" (or `{value}.item()`)" if "loss" in value else ""),
        "copy": f"`{value}{'.detach()' if held.attached else ''}{copy}`",
        "carried": _DETACHED.get(entries, "{0}.detach()").format(name),
        "trained": "; `new.detach().requires_grad_()` for each tensor where it is trained" if several else "",
    }


def _words(cut: CutSeen, held: Held) -> str:
    words = words_of(held)
    kind: str = cut.cut
    if kind == "detach" and is_hook_of_node(held.anchor):
        kind = "unhook"
    elif kind == "detach" and is_carried(held) and not only_native(held):
        kind = "carry"
    if cut.cut == "context" and any(segment.name == "CheckpointFunctionBackward" for segment in held.path):
        kind = "reentrant"
    own = container(held) == subject(held) != held.anchor
    of_model = held.owner in ("parameter", "buffer") and held.detail.collected is None
    if cut.of and cut.cut == "bound":
        words["container_name"] = expression(named(cut.at))
    holder = cut.kind or ("Module" if of_model else held.detail.holder_kind if own else None) or ""
    if writable(cut.at) != cut.at:
        holder = ""
    bound = BOUNDS.get(_ALIKE.get(holder, holder), BOUNDS[""]).format_map(words)
    return CUTS[kind].format_map(
        {**words, "bound": bound, "at": in_words(cut.at), "place": last_name(anchor_of(cut.at))}
    )


_DETACHED: Final[Mapping[str | None, str]] = {
    "dict": "{{key: each.detach() for key, each in {0}.items()}}",
    "list": "[each.detach() for each in {0}]",
    "tuple": "tuple(each.detach() for each in {0})",
}
"""A copy of a container with detached entries, by its type."""
_ALIKE: Final = {"OrderedDict": "dict", "defaultdict": "dict", "ModuleList": "Module", "ModuleDict": "Module"}


def _grows_on(cut: CutSeen, held: Held) -> float:
    """Return the part of a growth that a cut leaves, in tenths; 0 if it stops it.

    A log of detached numbers may go on.
    """
    if cut.releases >= _STOPS * cut.of or (held.rate and _remains(cut, held.rate) < _LEAST):
        return 0.0
    return round(1 - cut.releases / cut.of, 1)


def _remains(cut: CutSeen, growth: float) -> int:
    """Return what a cut leaves of growth.

    One of whole entries leaves what the latest of them had, if the program still used these at the census.
    """
    left = cut.of - cut.releases
    in_use = _IN_USE * growth if cut.cut in _OF_ENTRIES else 0.0
    return round(growth * left / cut.of) if left > in_use else 0


def _is_in_place(cut: CutSeen, held: Held) -> bool:
    """Whether a cut is at what gets new entries, and not at a container around it."""
    if cut.cut == "close":
        return generators_pile_up(held)
    if is_native(held.anchor) or cut.cut not in ("bound", "remove"):
        return True
    grows, at = container(held), named(cut.at)
    return at == grows or (grows[: len(at)] != at and at[: len(grows)] != grows)


def applicable(held: Held) -> list[CutKind]:
    """Return the kinds of cuts that a path allows: those that are due to one kind of reference come first."""
    if has(held.anchor, SegmentKind.GARBAGE_CYCLE):
        return ["collect"]
    native = only_native(held) or is_hook_of_node(held.anchor)
    rules = _ANYWHERE if native else _ANYWHERE | _IN_PYTHON
    return [kind for kind, applies in rules.items() if applies(held)]


_ANYWHERE: Final[dict[CutKind, Callable[[Held], bool]]] = {
    "pack": lambda held: held.detail.packs_itself,
    "shorten": lambda held: held.lengthens and growing_part(held.detail.classes) is None,
    "create_graph": carries_graph,
    "context": on_context,
    "detach": lambda held: is_hook_of_node(held.anchor),
}
_IN_PYTHON: Final[dict[CutKind, Callable[[Held], bool]]] = {
    "remove": hooks_pile_up,
    "cache": lambda held: has(held.anchor, SegmentKind.LRU_CACHE),
    "traceback": lambda held: has(held.anchor, SegmentKind.TRACEBACK),
    "close": generators_pile_up,
    "no_grad": never_differentiated,
    "detach": lambda held: held.attached,
    "clone": lambda held: held.detail.shared,
    "bound": lambda held: (
        not has(held.anchor, SegmentKind.LRU_CACHE) and (ANY_ITEM in held.anchor or not held.attached)
    ),
}
"""Which kinds apply to a path: of what C++ alone keeps, only the first."""

_CHANGES: Final[tuple[CutKind, ...]] = (
    "collect", "pack", "no_grad", "shorten", "create_graph", "cache", "detach", "context", "clone", "grad",
    "traceback", "close", "remove", "bound", "break",
)  # fmt: skip
"""Kinds of cuts, the smallest change of what a program does first."""


def _change(cut: CutKind, held: Held) -> int:
    """Return how large a change is. In a cycle through C++, the program itself stores no tensor."""
    return len(_CHANGES) if cut == "detach" and only_native(held) else _CHANGES.index(cut)
