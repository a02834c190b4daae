"""What a failure proves: its label, and the labels that it cannot rule out.

A message is judged by its form (`forms.py`) or by its figures; figures by rules in order, of which the first
that applies decides. Errors of a running program and of a recording are judged by the same rules.

The reasons for the thresholds: full cards still report up to 26 MiB free, so a margin under 64 MiB is "full".
A context with its libraries takes 0.73 to 0.75 GiB outside the allocator on an H200, so up to 1 GiB is not a
sign of another process. What is free or in holes, less the request, is what perfect compaction would leave.
If that is under 5 % of the card, the run would soon fail again, so "does not fit" is reported with
"fragmentation".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from memtriage.messages.forms import FORMS, MessageForm
from memtriage.messages.grammar.message import ALLOCATORS, SUM_ERROR, Message, OomFields, figures
from memtriage.model.explanation import Label
from memtriage.model.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class JudgePolicy:
    """Thresholds of the rules, in bytes or as shares of the device.

    Attributes:
        absurd: a request of this size (64 TiB) or more is garbage.
        full: if the free memory exceeds the request by less than this, the device counts as full.
        close, close_share: a margin below both may be gone a moment later.
        capped_share: a cap only counts if it is below this share of the device.
        cap_reached: the cap refused if reserved plus request exceed this share of it.
        cap_near: the cap cannot be ruled out if they exceed this share of it.
        roomy: if free memory is unknown, the device has room if reserved plus request are within this share.
        baseline: what one process usually has outside its allocator.
        outside_share: memory outside the allocator is the cause if it exceeds the baseline by this share of
            the device,
        outside_alone: or if it is this share of the device, baseline included.
        outside_possible, outside_possible_alone: the same two shares from which it cannot be ruled out.
        holes_share, holes: holes are large from the smaller of the two on.
        tight: if compaction leaves less free memory than this share of the device, it does not help for long.
        live: if allocated is at least this share of the device, the device is full of live bytes.
        metal_others: on Metal, other memory of this share of what counts cannot be ruled out.
    """

    absurd: int = 2**46
    full: int = 64 * MIB
    close: int = 256 * MIB
    close_share: float = 0.01
    capped_share: float = 0.98
    cap_reached: float = 0.995
    cap_near: float = 0.95
    roomy: float = 0.60
    baseline: int = GIB
    outside_share: float = 0.20
    outside_alone: float = 0.40
    outside_possible: float = 0.05
    outside_possible_alone: float = 0.25
    holes_share: float = 0.02
    holes: int = GIB
    tight: float = 0.05
    live: float = 0.85
    metal_others: float = 0.4


POLICY: Final = JudgePolicy()

_MOST: Final = 3
_OTHERS: Final[Label] = "other_process_or_outside_allocator"


def judge(message: Message) -> tuple[Label, ...]:
    """Return what a message proves, then what it cannot rule out, the likelier first: one to three labels.

    Empty for what other processes say when one has died.
    """
    requested = message.number("requested") or _shape_bytes(message)
    if "absurd" in message.facts or (requested is not None and requested >= POLICY.absurd):
        return ("absurd_request",)
    if message.family in ALLOCATORS:
        return ("does_not_fit", "unknown") if _fills_the_card(message) else judge_figures(figures(message))
    if by_words := FORMS.get((message.family, message.form), MessageForm()).labels:
        return by_words
    if message.family == "mps":
        return _judge_metal(message)
    return _judge_allocation(message) if message.family == "allocation" else ()


def judge_figures(fields: OomFields, policy: JudgePolicy = POLICY) -> tuple[Label, ...]:
    """Return what the figures prove, then what they cannot rule out: one to three labels.

    Where only the holes are unknown (a message cut near its end), the answer holds for every value they can
    have, or is `unknown`.
    """
    labels = _early(fields, policy)
    if labels is None and fields.reserved_unallocated is None and _largest_holes(fields) is not None:
        none, most = (
            _judge_whole(replace(fields, reserved_unallocated=holes), policy)
            for holes in (0, _largest_holes(fields))
        )
        labels = none if none[0] == most[0] else ("unknown", most[0], none[0])
    if labels is None:
        labels = _judge_whole(fields, policy)
    return tuple(dict.fromkeys(labels))[:_MOST]


def holes_are_large(fields: OomFields, policy: JudgePolicy = POLICY) -> bool:
    """Whether closing the holes is worth a setting; not where they are unknown."""
    total, holes = fields.total, fields.reserved_unallocated
    return total is not None and holes is not None and holes >= min(policy.holes_share * total, policy.holes)


def _largest_holes(fields: OomFields) -> int | None:
    if fields.total is None or fields.free is None or fields.allocated is None:
        return None
    return max(0, fields.total - fields.free - fields.allocated)


def _early(fields: OomFields, policy: JudgePolicy) -> tuple[Label, ...] | None:
    """The rules that do not need every figure; None where none of them decides."""
    requested, total, allocated = fields.requested, fields.total, fields.allocated
    if requested is not None and requested >= policy.absurd:
        return ("absurd_request",)
    # Sums of printed figures are off by up to SUM_ERROR; allocated is one figure.
    spilled = total is not None and (
        (allocated is not None and allocated > total)
        or (fields.reserved is not None and fields.reserved > total + SUM_ERROR)
    )
    if spilled:
        return ("system_memory_fallback", "does_not_fit")
    if requested is None or total is None:
        return ("unknown", "does_not_fit", _OTHERS)
    if requested > total:
        return ("does_not_fit",)
    reserved = fields.reserved if fields.reserved is not None else allocated
    cap = fields.allowed
    capped = cap is not None and cap < policy.capped_share * total
    if capped and reserved is not None and reserved + requested > policy.cap_reached * (cap or 0):
        return ("allocator_limit",)
    whole = fields.reserved
    if fields.free is None and whole is not None and whole + requested <= policy.roomy * total:
        return ("driver_refused_though_free", _OTHERS, "unknown")
    if allocated is not None and allocated + requested > total:
        return ("does_not_fit",) if fields.free is None else None
    if allocated is None and fields.free is not None and fields.free - requested >= policy.full:
        return ("driver_refused_though_free", "unknown")
    if allocated is None or fields.free is None:
        return ("unknown", "does_not_fit", _OTHERS)
    return None


def _judge_whole(fields: OomFields, policy: JudgePolicy) -> tuple[Label, ...]:
    """The rules for figures that are all there."""
    requested, total, free = fields.requested, fields.total, fields.free
    allocated, holes = fields.allocated, fields.reserved_unallocated
    if requested is None or total is None or free is None or allocated is None or holes is None:
        return ("unknown",)
    outside = fields.outside or 0
    reserved = allocated + holes
    pools = fields.private_pools or 0
    large = holes_are_large(fields, policy)
    tight = free + holes - requested < policy.tight * total or allocated >= policy.live * total
    # Where even all that is not live would not do, whoever has it is not the reason.
    others_possible = free + holes + outside >= requested and (
        outside - policy.baseline >= policy.outside_possible * total
        or outside >= policy.outside_possible_alone * total
    )
    margin = free - requested
    also: list[Label] = []
    if margin >= policy.full:
        if fields.allowed is not None and reserved + requested > policy.cap_near * fields.allowed:
            also.append("allocator_limit")
        if margin < policy.close and margin < policy.close_share * total:
            also.append("does_not_fit")
        also += [_OTHERS] * others_possible
        also += ["fragmentation"] * (requested <= holes)
        return ("driver_refused_though_free", *also)
    if (
        outside > reserved
        or outside - policy.baseline >= policy.outside_share * total
        or outside >= policy.outside_alone * total
    ):
        also += ["does_not_fit"] * (outside < policy.baseline)
        also += ["fragmentation"] * (requested <= free + holes and large)
        return (_OTHERS, *also, *_barely(margin))
    if pools >= requested > holes:
        return ("private_pools", "does_not_fit")
    if requested <= holes and large:
        also += ["does_not_fit"] * tight
        also += [_OTHERS] * others_possible
        also += ["private_pools"] * (pools >= requested)
        return ("fragmentation", *also, *_barely(margin))
    if requested > free and holes < requested <= free + holes:
        both: tuple[Label, Label] = (
            ("does_not_fit", "fragmentation") if tight else ("fragmentation", "does_not_fit")
        )
        return (*both, *([_OTHERS] * others_possible))
    also += ["fragmentation"] * (requested <= holes)
    also += [_OTHERS] * others_possible
    also += ["private_pools"] * (pools >= requested)
    return ("does_not_fit", *also, *_barely(margin))


def _barely(margin: int) -> tuple[Label, ...]:
    return ("driver_refused_though_free",) if margin >= 0 else ()


def _judge_allocation(message: Message) -> tuple[Label, ...]:
    """What the figures of any runtime's failed allocation prove; most do not say who has the rest."""
    requested, used, free = (message.number(name) for name in ("requested", "used", "free"))
    total, cap, largest = (message.number(name) for name in ("total", "allowed", "max_buffer"))
    asked = requested or _shape_bytes(message) or 0
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
    if free is not None and free - asked >= POLICY.full:
        return ("driver_refused_though_free", "unknown")
    return ("unknown", "does_not_fit", _OTHERS)


def _shape_bytes(message: Message) -> int | None:
    """Return the request where the message gives a shape instead of a size."""
    size = message.facts.get("shape_bytes")
    return size if isinstance(size, int) else None


def _judge_metal(message: Message) -> tuple[Label, ...]:
    """On Metal the limit is one that PyTorch sets itself, and other allocations count against it."""
    allocated, other = message.number("allocated"), message.number("other")
    if allocated is not None and other is not None and other > allocated:
        return (_OTHERS, "allocator_limit")
    labels: tuple[Label, ...] = ("allocator_limit", "does_not_fit")
    if "max_allowed" not in message.fields and not message.missing:
        labels = ("does_not_fit", "allocator_limit")  # the limit is switched off
    if allocated is not None and other is not None and other >= POLICY.metal_others * (allocated + other):
        labels = (*labels, _OTHERS)
    return labels


def _fills_the_card(message: Message) -> bool:
    """Whether the text ends inside of the allocated bytes, and these, in GiB, fill the device."""
    cut, total, free = message.facts.get("allocated_cut"), message.number("total"), message.number("free")
    requested = message.number("requested")
    if not isinstance(cut, str) or total is None or free is None or requested is None or free >= requested:
        return False
    allocated = float(cut.replace(",", "")) * GIB
    return POLICY.live * total <= allocated <= total
