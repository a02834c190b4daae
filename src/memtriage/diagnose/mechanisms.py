"""Leak mechanisms: why a holder keeps memory.

The first rule of `_RULES` that applies to the segments of its path decides. What to say is in
`playbook/mechanisms.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from memtriage.catalogue.catalogue import holders
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.growing import growing_part
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    PathSegment,
    SegmentKind,
    has,
    in_words,
    last_name,
    without_last_item,
)
from memtriage.playbook.mechanisms import MECHANISMS, Mechanism, MechanismText


@dataclass(frozen=True, slots=True)
class Held:
    """What the rules look at: facts about one holder.

    Attributes:
        path: whole path of what grew most.
        anchor: its part before the autograd graph.
        attached: the path continues through the autograd graph.
        owner: what most of the bytes are.
        kind: type of the holding Python object, e.g. `list`.
        lengthens: it is one storage that grows at its end.
        shared: its storages are in shared memory.
        known: the entry of the catalogue of known holders that keeps most of it.
        gradients: the program has computed gradients.
        differentiated: its graph has nodes that differentiate a gradient.
        entries_grow: the anchor names more objects than before; None where that is unknown.
        holders_multiply: new containers like the last one on the anchor appear, and each keeps its length.
        anchor_owner: what the tensor is that the anchor names.
        packs_itself: a pack hook returned the tensor that it was given, which its own node saves.
        stored_value: source of what the program stores there.
        stored_at: the line that does.
        stored_by_hook: that line is in a hook of a module.
        carried: what it stores is made of what was there before.
        classes: classes of the objects on the way to the holder.
        in_optimizer: one of these objects is an optimizer.
        collected: what it belongs to, where whole modules or optimizers are collected.
        ordinary: what grows is ordinary data, and no tensors.
        every: what it grows with, for the sentence.
    """

    path: HolderPath
    anchor: HolderPath
    attached: bool
    owner: str
    kind: str | None = None
    lengthens: bool = False
    shared: bool = False
    known: str | None = None
    gradients: bool = True
    differentiated: bool = False
    entries_grow: bool | None = None
    holders_multiply: bool = False
    anchor_owner: str | None = None
    packs_itself: bool = False
    stored_value: str | None = None
    stored_at: str | None = None
    stored_by_hook: bool = False
    carried: bool = False
    classes: tuple[str, ...] = ()
    in_optimizer: bool = False
    collected: Literal["module", "optimizer"] | None = None
    ordinary: bool = False
    every: Literal["step", "backward", "second", "run"] = "step"


MechanismRule = tuple[Callable[[Held], bool], Mechanism | Callable[[Held], MechanismText]]


def mechanism_of(held: Held) -> MechanismText:
    """Return the mechanism behind a holder path, and the fix."""
    for applies, says in _RULES:
        if applies(held):
            return says(held) if callable(says) else _text(says, held)
    return _text("collection", held)


def mechanism_of_known(entry: Holder) -> MechanismText:
    """Say what an entry of the catalogue of known holders keeps, and what clears it."""
    action = f"{entry.why}; what clears it: {entry.clears or 'nothing'}"
    if entry.policy != "never":
        action = f"memtriage.clear_caches([{entry.name!r}]) where a phase ends ({entry.clears})"
    return MechanismText(
        f"{entry.library}: {entry.symbol} ({entry.name}) holds {entry.holds}",
        f"{action}; `memtriage holders` shows when that is safe and how it refills",
    )


# --- words for the texts ------------------------------------------------------------------------------------


def _text(mechanism: Mechanism, held: Held, container: HolderPath | None = None) -> MechanismText:
    """The text of a mechanism for one holder.

    Args:
        container: what gets new entries, where the anchor does not say.
    """
    subject = _subject(held)
    container = _container(held) if container is None else _subject(replace(held, anchor=container))
    words = {
        "anchor": in_words(held.anchor),
        "subject": in_words(subject),
        "name": last_name(subject),
        "container": in_words(container),
        "container_name": last_name(container),
        "all_items": in_words(without_last_item(held.anchor)),
        "members": in_words((PathSegment(SegmentKind.CLASS, held.anchor[0].name), *held.anchor[1:])),
        "attribute": in_words(tuple(filter(_is_context_attribute, held.path))[:1]),
        "how_often": _HOW_OFTEN.get(held.every, "all the time"),
        "kind": f" ({held.kind})" if held.kind else "",
        "hook": _pack_hook(held),
        "detached": _detached(held),
    }
    return MECHANISMS[mechanism].filled(words)


_HOW_OFTEN: Final = {"step": "at every step", "backward": "with every backward"}


def _subject(held: Held) -> HolderPath:
    """Return the variable to name: the anchor without frame, and without its item in the last container."""
    path = held.anchor[1:] if held.anchor[0].kind is SegmentKind.THREAD else held.anchor
    if len(path) > 1 and path[0].kind is SegmentKind.FRAME:
        path = path[1:]
    return without_last_item(path)


def _container(held: Held) -> HolderPath:
    """Return what gets new entries: of entries that are objects with tensors, the container of these."""
    path = _subject(held)
    ends_in_items = without_last_item(held.anchor) != held.anchor and not held.holders_multiply
    if ends_in_items or held.entries_grow is False or ANY_ITEM not in path:
        return path
    place = len(path) - 1 - path[::-1].index(ANY_ITEM)
    parts = path[place:]
    own = all(part.kind in _PARTS for part in parts)
    return path[:place] if own else path


_PARTS: Final = frozenset(
    (
        SegmentKind.ATTRIBUTE,
        SegmentKind.ITEM,
        SegmentKind.GRADIENT,
        SegmentKind.PARTIAL,
        SegmentKind.CLOSURE,
        SegmentKind.VARIABLE,
    )
)
"""Kinds that lead from an object to a part of its own."""


def _is_context_attribute(segment: PathSegment) -> bool:
    return segment.kind is SegmentKind.CONTEXT and bool(segment.name)


def _known_holder(held: Held) -> MechanismText:
    """In the catalogue's words; the program that is judged may have registered the entry itself."""
    entry = next((holder for holder in holders() if holder.name == held.known), None)
    return _text("collection", held) if entry is None else mechanism_of_known(entry)


def _part_of_library(held: Held) -> MechanismText:
    part = growing_part(held.classes)
    assert part is not None
    grows = "gets longer" if held.lengthens else f"gets new {'entries' if held.ordinary else 'tensors'}"
    return MechanismText(f"{in_words(_subject(held))} {grows}: {part.why}", part.fix)


def _coroutines(held: Held) -> MechanismText:
    return _text("unfinished coroutines", held, _outside_generator(held.anchor))


def _outside_generator(path: HolderPath) -> HolderPath:
    """Return the path up to the item of a container that a generator or coroutine is part of."""
    kinds = [segment.kind for segment in path]
    generator = kinds.index(SegmentKind.GENERATOR)
    items = [at for at, segment in enumerate(path[:generator]) if segment == ANY_ITEM]
    return path[: items[-1] + 1] if items else path


def _collected(held: Held) -> MechanismText:
    mechanism: Mechanism = "collected optimizers" if held.collected == "optimizer" else "collected modules"
    return _text(mechanism, held, held.anchor[: held.anchor.index(ANY_ITEM)])


def _pack_hook(held: Held) -> str:
    hook = f" `{held.stored_value}`" if held.stored_value is not None else ""
    where = f" ({held.stored_at})" if held.stored_at is not None else ""
    return f"{hook}{where}"


def _detached(held: Held) -> str:
    value = _kept_value(held)
    return f"`{value}.detach()`" + (f" (or `{value}.item()`)" if "loss" in value else "")


def _kept_value(held: Held) -> str:
    """Return what the program stores, as an expression that a method can be called on; `loss` of `losses`."""
    value = held.stored_value
    if value and value[0] not in "([{":
        return value if re.fullmatch(r"[\w.]+([(\[].*[)\]])?", value) else f"({value})"
    key = held.anchor[-1]
    if key.kind is SegmentKind.ITEM and key.name[1:-1].isidentifier():
        return key.name[1:-1]
    variables = [
        segment.name
        for segment in held.anchor
        if segment.kind in (SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE)
    ]
    plural = variables[-1] if variables else "values"
    if "loss" in plural:
        return "loss"
    return plural[:-1] if plural.endswith("s") and len(plural) > 2 else "value"


# --- the rules ----------------------------------------------------------------------------------------------


def _carries_graph(held: Held) -> bool:
    """Whether a gradient carries a graph: on the way to what is held, or as what is held itself."""
    hops = pairwise(segment.kind for segment in held.path)
    graph = (SegmentKind.GRADIENT, SegmentKind.GRAD_FN) in hops
    return graph or (held.attached and held.anchor[-1].kind is SegmentKind.GRADIENT)


def _on_context(held: Held) -> bool:
    return any(map(_is_context_attribute, held.path))


def _generators_pile_up(held: Held) -> bool:
    """Whether suspended generators keep it, each its part: not where a container in one of them grows."""
    kinds = [segment.kind for segment in held.anchor]
    if SegmentKind.GENERATOR not in kinds:
        return False
    inside = held.anchor[kinds.index(SegmentKind.GENERATOR) :]
    of_last = inside[:-1] if inside[-1].kind is SegmentKind.ITEM else inside
    return ANY_ITEM not in (of_last if held.holders_multiply else inside)


def _threads_pile_up(held: Held) -> bool:
    """Whether threads with one name hold it, each its part: not where a container in one of them grows."""
    several = held.anchor[0].kind is SegmentKind.THREAD and "*" in held.anchor[0].name
    return several and (held.holders_multiply or ANY_ITEM not in held.anchor)


def _gets_longer(held: Held) -> bool:
    return held.lengthens and growing_part(held.classes) is None


def _only_native(held: Held) -> bool:
    return held.anchor[0].kind is SegmentKind.NATIVE


def _is_unseen(held: Held) -> bool:
    """Whether C code alone holds it. What a running loop iterates over is not: its attributes have names."""
    return held.anchor[0].kind is SegmentKind.UNSEEN and not has(held.anchor[1:], SegmentKind.ATTRIBUTE)


def _is_carried(held: Held) -> bool:
    """Whether the same variables get longer graphs, and no container gets more entries."""
    if held.entries_grow is not None:
        return not held.entries_grow
    return held.carried or ANY_ITEM not in held.anchor


def _never_differentiated(held: Held) -> bool:
    return held.attached and not (held.gradients or held.differentiated)


def _holds_several(held: Held) -> bool:
    """Whether the anchor names an item of a container, or the graph differentiates gradients: then several
    tensors are updated, and not one.
    """
    return held.differentiated or held.anchor[-1].kind is SegmentKind.ITEM


def _in_hook(held: Held) -> bool:
    return held.stored_by_hook or has(held.anchor, SegmentKind.HOOKS, SegmentKind.HOOK_CLOSURE)


def _in_optimizer(held: Held) -> bool:
    parts = ("param_groups", "state") if held.in_optimizer else ("param_groups",)
    return held.owner == "optimizer state" or any(
        PathSegment(SegmentKind.ATTRIBUTE, part) in held.anchor for part in parts
    )


_RULES: tuple[MechanismRule, ...] = (
    (lambda h: has(h.anchor, SegmentKind.OUTPUT), "shown values of cells"),
    (lambda h: has(h.anchor, SegmentKind.GARBAGE_CYCLE), "garbage cycle"),
    (lambda h: h.known is not None and not h.attached, _known_holder),
    (lambda h: h.packs_itself, "pack hook"),
    (lambda h: _gets_longer(h) and h.ordinary, "array gets longer"),
    (_gets_longer, "tensor gets longer"),
    (lambda h: h.shared and not h.attached, "shared memory"),
    (_carries_graph, "gradient with a graph"),
    (lambda h: _on_context(h) and _only_native(h), "context in a cycle"),
    (_on_context, "context"),
    (_in_hook, "hook"),
    (lambda h: has(h.anchor, SegmentKind.LRU_CACHE), "lru_cache"),
    (lambda h: has(h.anchor, SegmentKind.TRACEBACK), "kept exceptions"),
    (lambda h: _generators_pile_up(h) and h.kind == "coroutine", _coroutines),
    (_generators_pile_up, "unfinished generators"),
    (lambda h: has(h.anchor, SegmentKind.DEFAULT_ARGUMENT), "default argument"),
    (_threads_pile_up, "unfinished threads"),
    (lambda h: has(h.anchor, SegmentKind.THREAD), "thread"),
    (_only_native, "only C++"),
    (_is_unseen, "only C code"),
    (lambda h: h.collected is not None and not h.attached, _collected),
    (lambda h: _never_differentiated(h) and _is_carried(h), "no backward"),
    (lambda h: growing_part(h.classes) is not None, _part_of_library),
    (lambda h: h.attached and h.anchor_owner == "buffer" and _is_carried(h), "buffer with a graph"),
    (_in_optimizer, "new parameters in the optimizer"),
    (_never_differentiated, "no backward"),
    (lambda h: h.attached and _is_carried(h) and _holds_several(h), "updated parameters"),
    (lambda h: h.attached and _is_carried(h), "carried state"),
    (lambda h: h.owner in ("parameter", "buffer"), "model grows"),
    (lambda h: h.ordinary, "ordinary data"),
    (lambda h: h.attached, "collection with graphs"),
)
"""The first that applies decides, so what is special comes before what is general. What no rule takes is a
collection that grows."""
