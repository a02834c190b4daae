"""What a message proves: its label, and the labels that it cannot rule out."""

from __future__ import annotations

from typing import Final

from memtriage.messages.figures import POLICY, judge_figures
from memtriage.messages.forms import FORMS, MessageForm
from memtriage.messages.grammar.message import ALLOCATORS, Message, figures
from memtriage.model.explanation import Label
from memtriage.model.units import GIB

_OTHERS: Final[Label] = "other_process_or_outside_allocator"

_BUFFER: Final[tuple[Label, ...]] = ("does_not_fit", "driver_refused_though_free", "allocator_limit")
_METAL_OTHERS_SHARE: Final = 0.4
_CUT_UNIT: Final = GIB


def judge(message: Message) -> tuple[Label, ...]:
    """Return what a message proves, then what it cannot rule out, the likelier first: one to three labels.

    Empty for what other processes say when one has died.
    """
    requested = message.number("requested") or _shape_bytes(message)
    if "absurd" in message.facts or (requested is not None and requested >= POLICY.absurd):
        return ("absurd_request",)
    if message.family == "mps":
        return _judge_metal(message)
    if message.family == "allocation":
        return _judge_allocation(message)
    if message.family in ALLOCATORS:
        return ("does_not_fit", "unknown") if _fills_the_card(message) else judge_figures(figures(message))
    labels = FORMS.get((message.family, message.form), MessageForm()).labels
    return ("not_memory",) if not labels and message.family == "not-memory" else labels


def _judge_allocation(message: Message) -> tuple[Label, ...]:
    """What the figures of any runtime's failed allocation prove; most do not say who has the rest."""
    if message.form == "survived":
        return ("informational",)
    requested, used, free = (message.number(name) for name in ("requested", "used", "free"))
    total, cap, largest = (message.number(name) for name in ("total", "allowed", "max_buffer"))
    asked = requested or _shape_bytes(message) or 0
    if total is not None and max(asked, used or 0) > total:
        return ("does_not_fit",)
    if message.form == "single":
        return _BUFFER if largest is None or asked > largest else ("unknown", "does_not_fit")
    if cap is not None and (message.number("allocated") or 0) + asked > cap:
        return ("allocator_limit", "does_not_fit")
    if message.device == "host":
        too_much = free is not None and asked > free
        return ("does_not_fit", "host_alloc_failed") if too_much else ("host_alloc_failed",)
    if free is not None and asked > free:
        return ("does_not_fit", "unknown")  # who has the rest is not told
    if free is not None and free - asked >= POLICY.full:
        return ("driver_refused_though_free", "unknown")
    return ("unknown", "does_not_fit", _OTHERS)


def _shape_bytes(message: Message) -> int | None:
    """Return the request where the message gives a shape instead of a size."""
    size = message.facts.get("shape_bytes")
    return size if isinstance(size, int) else None


def _judge_metal(message: Message) -> tuple[Label, ...]:
    """On Metal the limit is one that PyTorch sets itself, and other allocations count against it."""
    if message.form == "buffer":
        return _BUFFER
    allocated, other = message.number("allocated"), message.number("other")
    if allocated is not None and other is not None and other > allocated:
        return (_OTHERS, "allocator_limit")
    labels: tuple[Label, ...] = ("allocator_limit", "does_not_fit")
    if "max_allowed" not in message.fields and not message.missing:
        labels = ("does_not_fit", "allocator_limit")  # the limit is switched off
    if allocated is not None and other is not None and other >= _METAL_OTHERS_SHARE * (allocated + other):
        labels = (*labels, _OTHERS)
    return labels


def _fills_the_card(message: Message) -> bool:
    """Whether the text ends inside of the allocated bytes, and these, in GiB, fill the device."""
    cut, total, free = message.facts.get("allocated_cut"), message.number("total"), message.number("free")
    requested = message.number("requested")
    if not isinstance(cut, str) or total is None or free is None or requested is None or free >= requested:
        return False
    allocated = float(cut.replace(",", "")) * _CUT_UNIT
    return POLICY.live * total <= allocated <= total
