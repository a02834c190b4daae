"""What a failure proves: its label, and the labels that it cannot rule out.

A message is judged by its form (`forms.py`) or by its figures; figures by rules in order, of which the first
that applies decides. Errors of a running program and of a recording are judged by the same rules.

The reasons for the thresholds: full cards still report up to 26 MiB free, so a margin under 64 MiB is "full".
A context with its libraries takes 0.73 to 0.75 GiB outside the allocator on an H200, so up to 1 GiB is not a
sign of another process. Where perfect compaction would leave under 5 % of the card, the run would soon fail
again, so "does not fit" is reported with "fragmentation".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memtriage.messages.forms import FORMS, OTHERS, form_of
from memtriage.messages.grammar.message import ALLOCATORS, SUM_ERROR, Message, OomFields, figures
from memtriage.model.explanation import Label
from memtriage.model.units import GIB, MIB

# Thresholds, in bytes or as shares of the device.

_ABSURD = 2**46  # a request of 64 TiB or more is garbage
_FULL = 64 * MIB  # a device with less than this beyond the request counts as full
_CLOSE, _CLOSE_SHARE = 256 * MIB, 0.01  # a margin below both may be gone a moment later
_CAPPED_SHARE = 0.98  # a cap only counts below this share of the device
_CAP_REACHED, _CAP_NEAR = 0.995, 0.95  # shares of the cap: it refused, it cannot be ruled out
_ROOMY = 0.60  # where free memory is unknown: reserved plus request leave room
BASELINE = GIB  # what one process usually has outside its allocator
_OUTSIDE, _OUTSIDE_ALONE = 0.20, 0.40  # memory outside is the cause, beyond the baseline or with it
_OUTSIDE_POSSIBLE, _OUTSIDE_POSSIBLE_ALONE = 0.05, 0.25  # the same two, where it cannot be ruled out
_HOLES, _HOLES_SHARE = GIB, 0.02  # holes are large from the smaller of the two on
TIGHT = 0.05  # what compaction has to leave free to help for long
LIVE = 0.85  # a device with so much allocated is full of live bytes

_MOST: Final = 3


def judge(message: Message) -> tuple[Label, ...]:
    """Return what a message proves, then what it cannot rule out, the likelier first: one to three labels.

    Empty for what other processes say when one has died.
    """
    requested = message.number("requested") or message.number("shape_bytes")
    if "absurd" in message.facts or (requested is not None and requested >= _ABSURD):
        return ("absurd_request",)
    if message.family in ALLOCATORS:
        return ("does_not_fit", "unknown") if _fills_the_card(message) else judge_figures(figures(message))
    if by_words := form_of(message).labels:
        return by_words
    if message.family == "mps":
        return _judge_metal(message)
    return _judge_allocation(message) if message.family == "allocation" else ()


def judge_figures(fields: OomFields) -> tuple[Label, ...]:
    """Return what the figures prove, then what they cannot rule out: one to three labels.

    Where only the holes are unknown (a message cut near its end), the answer holds for every value they can
    have, or is `unknown`.
    """
    labels = _early(fields)
    if labels is None:
        holes = fields.reserved_unallocated
        rest = (fields.total or 0) - (fields.free or 0) - (fields.allocated or 0)
        least, labels = (
            _judge_whole(replace(fields, reserved_unallocated=size))
            for size in (holes or 0, max(0, rest) if holes is None else holes)
        )
        labels = least if least[0] == labels[0] else ("unknown", labels[0], least[0])
    return tuple(dict.fromkeys(labels))[:_MOST]


def holes_are_large(fields: OomFields) -> bool:
    """Whether closing the holes is worth a setting; not where they are unknown."""
    total, holes = fields.total, fields.reserved_unallocated
    return total is not None and holes is not None and holes >= min(_HOLES_SHARE * total, _HOLES)


def _early(fields: OomFields) -> tuple[Label, ...] | None:
    """The rules that do not need every figure; None where none of them decides."""
    requested, total, allocated = fields.requested, fields.total, fields.allocated
    if requested is not None and requested >= _ABSURD:
        return ("absurd_request",)
    # Sums of printed figures are off by up to SUM_ERROR; allocated is one figure.
    spilled = total is not None and (
        (allocated is not None and allocated > total)
        or (fields.reserved is not None and fields.reserved > total + SUM_ERROR)
    )
    if spilled:
        return ("system_memory_fallback", "does_not_fit")
    if requested is None or total is None:
        return ("unknown", "does_not_fit", OTHERS)
    if requested > total:
        return ("does_not_fit",)
    reserved = fields.reserved if fields.reserved is not None else allocated
    cap = fields.allowed
    capped = cap is not None and cap < _CAPPED_SHARE * total
    if capped and reserved is not None and reserved + requested > _CAP_REACHED * (cap or 0):
        return ("allocator_limit",)
    if fields.free is None and fields.reserved is not None and fields.reserved + requested <= _ROOMY * total:
        return ("driver_refused_though_free", OTHERS, "unknown")
    if allocated is not None and allocated + requested > total:
        return ("does_not_fit",) if fields.free is None else None
    if allocated is None and fields.free is not None and fields.free - requested >= _FULL:
        return ("driver_refused_though_free", "unknown")
    if allocated is None or fields.free is None:
        return ("unknown", "does_not_fit", OTHERS)
    return None


def _judge_whole(fields: OomFields) -> tuple[Label, ...]:
    """The rules for figures that are all there."""
    requested, total, free = fields.requested or 0, fields.total or 0, fields.free or 0
    allocated, holes = fields.allocated or 0, fields.reserved_unallocated or 0
    outside, pools, margin = fields.outside or 0, fields.private_pools or 0, free - requested
    large = holes_are_large(fields)
    tight = free + holes - requested < TIGHT * total or allocated >= LIVE * total
    # Where even all that is not live would not do, whoever has it is not the reason.
    others_possible = free + holes + outside >= requested and (
        outside - BASELINE >= _OUTSIDE_POSSIBLE * total or outside >= _OUTSIDE_POSSIBLE_ALONE * total
    )
    others: list[Label] = [OTHERS] * others_possible
    in_holes: list[Label] = ["fragmentation"] * (requested <= holes)
    parked: list[Label] = ["private_pools"] * (pools >= requested)
    barely: list[Label] = ["driver_refused_though_free"] * (margin >= 0)
    full: list[Label]
    if margin >= _FULL:
        full = ["does_not_fit"] * (margin < min(_CLOSE, _CLOSE_SHARE * total))
        near = fields.allowed is not None and allocated + holes + requested > _CAP_NEAR * fields.allowed
        capped: list[Label] = ["allocator_limit"] * near
        return ("driver_refused_though_free", *capped, *full, *others, *in_holes)
    if (
        outside > allocated + holes
        or outside - BASELINE >= _OUTSIDE * total
        or outside >= _OUTSIDE_ALONE * total
    ):
        full = ["does_not_fit"] * (outside < BASELINE)
        in_holes = ["fragmentation"] * (requested <= free + holes and large)
        return (OTHERS, *full, *in_holes, *barely)
    if pools >= requested > holes:
        return ("private_pools", "does_not_fit")
    if requested <= holes and large:
        full = ["does_not_fit"] * tight
        return ("fragmentation", *full, *others, *parked, *barely)
    if max(free, holes) < requested <= free + holes:
        if tight:
            return ("does_not_fit", "fragmentation", *others)
        return ("fragmentation", "does_not_fit", *others)
    return ("does_not_fit", *in_holes, *others, *parked, *barely)


def _judge_allocation(message: Message) -> tuple[Label, ...]:
    """What the figures of any runtime's failed allocation prove; most do not say who has the rest."""
    requested, used, free = (message.number(name) for name in ("requested", "used", "free"))
    total, cap, largest = (message.number(name) for name in ("total", "allowed", "max_buffer"))
    asked = requested or message.number("shape_bytes") or 0
    if total is not None and max(asked, used or 0) > total:
        return ("does_not_fit",)
    if message.form == "single":
        buffer = FORMS["mps", "buffer"].labels
        return buffer if largest is None or asked > largest else ("unknown", "does_not_fit")
    if cap is not None and (message.number("allocated") or 0) + asked > cap:
        return ("allocator_limit", "does_not_fit")
    if message.device == "host":
        too_much = free is not None and asked > free
        return ("does_not_fit", "host_alloc_failed") if too_much else ("host_alloc_failed",)
    if free is not None and asked > free:
        return ("does_not_fit", "unknown")  # who has the rest is not told
    if free is not None and free - asked >= _FULL:
        return ("driver_refused_though_free", "unknown")
    return ("unknown", "does_not_fit", OTHERS)


def _judge_metal(message: Message) -> tuple[Label, ...]:
    """On Metal the limit is one that PyTorch sets itself, and other allocations count against it."""
    allocated, other = message.number("allocated"), message.number("other")
    if allocated is not None and other is not None and other > allocated:
        return (OTHERS, "allocator_limit")
    if "max_allowed" not in message.fields and not message.missing:
        return ("does_not_fit", "allocator_limit")  # the limit is switched off
    return ("allocator_limit", "does_not_fit")


def _fills_the_card(message: Message) -> bool:
    """Whether the text ends inside of the allocated bytes, and these, in GiB, fill the device."""
    cut, total, free = message.facts.get("allocated_cut"), message.number("total"), message.number("free")
    requested = message.number("requested")
    if not isinstance(cut, str) or total is None or free is None or requested is None or free >= requested:
        return False
    allocated = float(cut.replace(",", "")) * GIB
    return LIVE * total <= allocated <= total
