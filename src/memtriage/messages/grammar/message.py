"""A message about memory as it was read, the figures that rules use, and sizes as messages print them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Final

from memtriage.model.explanation import Field
from memtriage.model.units import MIB

ALLOCATORS: Final = frozenset(
    {"cuda-v1", "cuda-v2", "cuda-async", "hip-v2", "xpu-v1", "xpu-v2", "npu-v1", "npu-v2"}
)
"""PyTorch's device allocators, whose messages have figures of the same meaning."""
NOT_TORCH: Final = frozenset({"allocation", "engine", "vllm", "tensorrt", "mention"})
"""Messages of programs that PyTorch's settings and advice for training do not concern."""

SUM_ERROR: Final = 64 * MIB
"""Sums of a message's figures say nothing below this: each GiB figure is up to 5 MiB off, and free is read a
moment later than the rest."""

# The look-behind and the bounds keep a long run of digits from costing quadratic time.
NUMBER: Final = r"(?<!\d)(?<!\d\.)\d[\d,]{0,30}(?:\.\d{0,9})?"
SIZE: Final = rf"({NUMBER})(bytes?|[KMGTPE]i?B)"
"""Two groups: number and unit. KB, MB and GB are powers of 1024 too wherever these messages use them."""

_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("b", "k", "m", "g", "t", "p", "e"))}
_UNLIMITED: Final = 2**63
"""Figures from here on are a driver's "unknown" (2**64 bytes) or an unset limit."""

_NO_FAILURE: Final = re.compile(
    "not-memory|alloc-assert|dataloader-killed|launcher|aftermath|deepspeed-mem|mention|tactic|hidden|"
    "not initialized|gone|descriptors|opening|resource tracker|survived|preempted|weights|report|"
    "breakdown"
)
"""Families and forms whose words alone do not mean that memory ran out."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        family: who wrote it; docs/explain.md lists them. `npu-v1` and `npu-v2` are PyTorch's allocators for
            devices outside its own tree, `allocation` any other runtime's failed allocation with figures,
            `aftermath` what other processes say when one has died, `mention` a line that says that memory ran
            out in no known form.
        form: which of the family's wordings, where rules depend on it.
        fields: its sizes in bytes, under the names that the message itself uses; None where the text names a
            figure but does not have it (cut off, or printed as a number that means "unknown").
        facts: what else it tells: pids, signals, limits, steps.
        device: `cuda:N` (of HIP too), `xpu:N`, `mps`, `cpu` for the CPU allocator, `host`; None if untold.
        missing: figures that this form of the message should have had.
        length: characters that it takes of the text that was read; at least those of its start.
    """

    family: str
    form: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)
    device: str | None = None
    missing: tuple[str, ...] = ()
    length: int = 0

    def number(self, name: str) -> int | None:
        """The size, or the number among the facts, of that name; None if there is none."""
        value = self.fields.get(name, self.facts.get(name))
        return value if isinstance(value, int) else None

    @property
    def ran_out(self) -> bool:
        """Whether it says, or can only mean, that memory ran out, where it was written."""
        return not any(map(_NO_FAILURE.fullmatch, (self.family, self.form)))


@dataclass(frozen=True, slots=True)
class Grammar:
    """How to find and read the messages of a group of families.

    Attributes:
        start: where a message may begin.
        read: reads it: the match of `start`, and the text from there to where the next one begins. None
            where it is none after all.
        tight: patterns are for text without any white space, so that no wrap, not even one inside of a word,
            and no doubled space matters. Else they are for cleaned lines, where digits could run together,
            each with a line break at its end.
    """

    start: re.Pattern[str]
    read: Callable[[re.Match[str], str], Message | None]
    tight: bool = True


def plain(
    family: str,
    pattern: str,
    *,
    form: str = "",
    device: str | None = None,
    tight: bool = True,
    unit: str = "",
) -> Grammar:
    """Make the grammar of a fixed wording.

    What the pattern names is a fact. With a unit it is a size in it, or in one of its own.
    """

    def read(start: re.Match[str], text: str) -> Message:
        named = {name: found for name, found in start.groupdict().items() if found}
        sizes = {name: re.findall(rf"({NUMBER})(\w*)", found)[0] for name, found in named.items() if unit}
        fields = {name: to_bytes(number, own or unit) for name, (number, own) in sizes.items()}
        facts = {name: int(found) if found.isdigit() else found for name, found in named.items() if not unit}
        return Message(family, form, fields, facts, device=device)

    return Grammar(re.compile(pattern), read, tight)


@dataclass(frozen=True, slots=True)
class OomFields:
    """Figures of a failed allocation, in bytes; None where the text (or the observer) does not say.

    Attributes:
        device: `cuda:N` (of HIP too: torch calls it so), `xpu:N`, `mps`, `cpu` where the CPU allocator
            refused a tensor, `host` for any other failure of the host.
        requested: what was asked. On a GPU that is what was asked of the driver: the tensor's size rounded up
            to 2 MiB, 20 MiB for tensors of 1 to 10 MiB.
        total: the device's capacity.
        free: free on the device.
        allocated: live blocks of this process. From a text, free memory in private pools is counted here.
        reserved_unallocated: reserved by the allocator, but free.
        private_pools: the free memory in private pools (CUDA graphs).
        allowed: the cap set for this process (`set_per_process_memory_fraction`).
    """

    device: str | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved_unallocated: int | None = None
    private_pools: int | None = None
    allowed: int | None = None

    @property
    def reserved(self) -> int | None:
        """What the allocator has from the driver."""
        if self.allocated is None or self.reserved_unallocated is None:
            return None
        return self.allocated + self.reserved_unallocated

    @property
    def outside(self) -> int | None:
        """In use on the device but not of this process's allocator; None also where the figures disagree."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        rest = self.total - self.free - self.reserved
        return max(0, rest) if rest > -SUM_ERROR else None


def figures(message: Message) -> OomFields:
    """The message's figures under one set of names.

    Releases up to 1.3 print `cached` without the allocated bytes, from 1.4 on `reserved` with them.
    """
    names = ("requested", "total", "free", "allocated", "reserved_unallocated", "private_pools", "allowed")
    known = OomFields(message.device, *map(message.number, names))
    reserved, cached = message.number("reserved"), message.number("cached")
    if cached is not None:
        known = replace(known, reserved_unallocated=cached)
    elif reserved is not None and known.allocated is not None:
        known = replace(known, reserved_unallocated=max(0, reserved - known.allocated))
    return known if known.allowed is not None else replace(known, allowed=message.number("max_allowed"))


def to_bytes(number: str, unit: str = "") -> int | None:
    """Bytes of a printed size, to the nearest; None for a number that means "unknown".

    Without a unit it is a count in full: "unknown" only where it is more than 64 bits can hold.

    >>> to_bytes("2.87", "GiB"), to_bytes("153,700,88", "kB"), to_bytes("17179869184.00", "GiB")
    (3081639035, 15738970112, None)
    """
    # Exact: as a float, a figure in GiB could be rounded to the other neighbor.
    exact = Decimal(number.replace(",", "")) * _UNITS[unit[:1].lower() or "b"]
    return None if exact >= (_UNLIMITED if unit else 2**64) else int(exact.to_integral_value())


def as_printed(nbytes: int) -> str:
    """Bytes as torch prints them (`format_size`): the step to the next unit is above 1024, not at it.

    >>> as_printed(3081639035), as_printed(1024**3), as_printed(0)
    ('2.87 GiB', '1024.00 MiB', '0 bytes')
    """
    unit = printed_unit(nbytes)
    name = {1: "bytes", 1024: "KiB", 1024**2: "MiB", 1024**3: "GiB"}[unit]
    return f"{nbytes} {name}" if unit == 1 else f"{nbytes / unit:.2f} {name}"


def printed_unit(nbytes: int) -> int:
    """Bytes of the unit that torch prints a size in."""
    for unit in (1024, 1024**2):
        if abs(nbytes) <= 1024 * unit:
            return unit if abs(nbytes) > 1024 else 1
    return 1024**3
