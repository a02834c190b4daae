"""Leak mechanisms: why a holder keeps memory.

The first rule of `_RULES` that applies to the segments of its path decides. What to say is in
`playbook/mechanisms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from memtriage.catalogue.catalogue import holders
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.growing import growing_part
from memtriage.diagnose.cuts import applicable, fix_of, words_of
from memtriage.diagnose.held import (
    Held,
    is_carried,
    never_differentiated,
    only_native,
    subject,
)
from memtriage.model.census import CutKind
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind, has, in_words, is_hook_of_node
from memtriage.playbook.mechanisms import MECHANISMS, MechanismText

MechanismRule = tuple[Callable[[Held], object], str | Callable[[Held], MechanismText]]


def mechanism_of(held: Held) -> MechanismText:
    """Return the mechanism behind a holder path, and the fix."""
    for applies, says in _RULES:
        if applies(held):
            return says(held) if callable(says) else _text(says, held)
    return _text("bound", held)


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


def _text(mechanism: str, held: Held) -> MechanismText:
    """The text of a mechanism for one holder; its fix is the best cut unless it has one of its own."""
    words = {
        "members": in_words((PathSegment(SegmentKind.CLASS, held.anchor[0].name), *held.anchor[1:])),
        "anchor": in_words(held.anchor),
        "what": _what(held),
        "how_often": _HOW_OFTEN.get(held.every, "all the time"),
        "as_what": "numpy.concatenate and pandas.concat do" if held.ordinary else "torch.cat does",
        "hook": _pack_hook(held),
        "hooked": in_words(held.anchor[2:]),
        "of_step": f"every step's {'nodes' if held.detail.backward_ran else 'saved activations'}",
        **words_of(held),
    }
    text = MECHANISMS[mechanism].filled(words)
    return text if text.fix else replace(text, fix=fix_of(held))


_HOW_OFTEN: Final = {
    "step": "at every step", "backward": "with every backward", "save": "at every save",
    "evaluation": "in every evaluation", "epoch": "in every epoch", "batch": "with every batch",
    "call": "in every call",
}  # fmt: skip


def _what(held: Held) -> str:
    if held.attached:
        return "tensors that still carry a grad_fn"
    collected = held.detail.collected
    return f"{collected}s" if collected else "entries" if held.ordinary else "tensors"


def _known_holder(held: Held) -> MechanismText:
    """In the catalogue's words; the program that is judged may have registered the entry itself."""
    entry = next((holder for holder in holders() if holder.name == held.known), None)
    return _text("bound", held) if entry is None else mechanism_of_known(entry)


def _part_of_library(held: Held) -> MechanismText:
    part = growing_part(held.detail.classes)
    assert part is not None
    grows = "gets longer" if held.lengthens else f"gets new {'entries' if held.ordinary else 'tensors'}"
    return MechanismText(f"{in_words(subject(held))} {grows}: {part.why}", part.fix)


def _pack_hook(held: Held) -> str:
    detail = held.detail
    hook = f" `{detail.stored_value}`" if detail.stored_value is not None else ""
    where = f" ({detail.stored_at})" if detail.stored_at is not None else ""
    return f"{hook}{where}"


# --- the rules ----------------------------------------------------------------------------------------------


def _threads_pile_up(held: Held) -> bool:
    """Whether threads with one name hold it, each its part: not where a container in one of them grows."""
    several = held.anchor[0].kind is SegmentKind.THREAD and "*" in held.anchor[0].name
    return several and (held.holders_multiply or ANY_ITEM not in held.anchor)


def _is_unseen(held: Held) -> bool:
    """Whether C code alone holds it, or a function that it will call.

    What a running loop iterates over is not: its attributes have names.
    """
    root, is_named = held.anchor[0], has(held.anchor[1:], SegmentKind.ATTRIBUTE)
    is_callback = root.name in ("function", "method", "partial")
    return root.kind is SegmentKind.UNSEEN and (is_callback or not is_named)


def _is_in_library(held: Held) -> bool:
    """Whether a part of a library grows: where it only grows longer itself, not where new ones are kept."""
    part = growing_part(held.detail.classes)
    return part is not None and held.detail.collected is None and not (part.alone and held.holders_multiply)


def _in_optimizer(held: Held) -> bool:
    parts = ("param_groups", "state") if held.detail.in_optimizer else ("param_groups",)
    return held.owner == "optimizer state" or any(
        PathSegment(SegmentKind.ATTRIBUTE, part) in held.anchor for part in parts
    )


def _by_cut(held: Held) -> CutKind | None:
    """Return the kind of cut that a holder is due to, as its path shows; None where it is due to none."""
    kinds = (kind for kind in applicable(held) if kind in _DUE_TO)
    return next(kinds, None)


_DUE_TO: Final = MECHANISMS.keys() - {"no_grad", "bound"}
"""Cuts which always say why, where they apply."""

_RULES: tuple[MechanismRule, ...] = (
    (lambda h: has(h.anchor, SegmentKind.OUTPUT), "shown values of cells"),
    (lambda h: h.known is not None and not h.attached, _known_holder),
    (lambda h: _by_cut(h) == "context" and only_native(h), "context in a cycle"),
    (lambda h: _by_cut(h) == "close" and h.detail.holder_kind == "coroutine", "unfinished coroutines"),
    (_by_cut, lambda h: _text(_by_cut(h) or "bound", h)),
    (lambda h: is_hook_of_node(h.anchor), "hook of a node"),
    (_threads_pile_up, "unfinished threads"),
    (only_native, "only C++"),
    (_is_unseen, "only C code"),
    (lambda h: never_differentiated(h) and is_carried(h), "no_grad"),
    (_is_in_library, _part_of_library),
    (lambda h: _in_optimizer(h) and h.detail.collected is None, "new parameters in the optimizer"),
    (never_differentiated, "no_grad"),
    (lambda h: h.attached and is_carried(h), "carried state"),
    (lambda h: h.owner in ("parameter", "buffer") and h.detail.collected is None, "model grows"),
)
"""The first that applies decides, so what is special comes before what is general. What no rule takes is a
collection that grows."""
