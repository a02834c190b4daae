"""A message about memory as it was read, and the figures that rules use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from memtriage.model.explanation import Field
from memtriage.model.units import MIB

Family = Literal[
    "cuda-v1",
    "cuda-v2",
    "cuda-async",
    "hip-v2",
    "xpu-v1",
    "xpu-v2",
    "npu-v1",
    "npu-v2",
    "mps",
    "cuda-runtime",
    "cuda-driver",
    "xpu-runtime",
    "nvml-assert",
    "alloc-assert",
    "cublas",
    "cudnn",
    "nccl",
    "tensorrt",
    "allocation",
    "cpu-alloc",
    "python-alloc",
    "kernel-oom",
    "slurm",
    "k8s",
    "ray",
    "oomd",
    "notebook",
    "launcher",
    "dataloader-killed",
    "shm",
    "vllm",
    "engine",
    "deepspeed-mem",
    "python",
    "not-memory",
    "aftermath",
    "mention",
]
"""Who wrote the message. `npu-v1` and `npu-v2` are PyTorch's allocators for devices outside its own tree,
`allocation` any other runtime's failed allocation with figures, `aftermath` what other processes say when one
has died, `mention` a line that says that memory ran out in no known form."""

ALLOCATORS: Final[frozenset[Family]] = frozenset(
    {"cuda-v1", "cuda-v2", "cuda-async", "hip-v2", "xpu-v1", "xpu-v2", "npu-v1", "npu-v2"}
)
"""PyTorch's device allocators, whose messages have figures of the same meaning."""
NOT_TORCH: Final[frozenset[Family]] = frozenset({"allocation", "engine", "vllm", "tensorrt", "mention"})
"""Messages of programs that PyTorch's settings and advice for training do not concern."""

SUM_ERROR: Final = 64 * MIB
"""Sums of a message's figures say nothing below this: each GiB figure is up to 5 MiB off, and free is read a
moment later than the rest."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        family: its grammar.
        form: which of the family's wordings, where rules depend on it.
        fields: its sizes in bytes, under the names that the message itself uses; None where the text names a
            figure but does not have it (cut off, or printed as a number that means "unknown").
        facts: what else it tells: pids, signals, limits, steps.
        device: `cuda:N` (of HIP too), `xpu:N`, `mps`, `cpu` for the CPU allocator, `host`; None if untold.
        missing: figures that this form of the message should have had.
        ran_out: it says, or can only mean, that memory ran out, where it was written.
        length: characters that it takes of the text that was read; at least those of its start.
    """

    family: Family
    form: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)
    device: str | None = None
    missing: tuple[str, ...] = ()
    ran_out: bool = True
    length: int = 0

    def number(self, name: str) -> int | None:
        """The size of that name; None if there is none."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None


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
    family: Family,
    pattern: str,
    *,
    form: str = "",
    device: str | None = None,
    ran_out: bool = True,
    tight: bool = True,
) -> Grammar:
    """Make the grammar of a message without figures."""
    message = Message(family, form=form, device=device, ran_out=ran_out)
    return Grammar(re.compile(pattern), lambda *_: message, tight)


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
        process_total: of this process on the device, context and libraries included.
    """

    device: str | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved_unallocated: int | None = None
    private_pools: int | None = None
    allowed: int | None = None
    process_total: int | None = None

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
    allocated, unallocated = message.number("allocated"), message.number("reserved_unallocated")
    reserved, cached = message.number("reserved"), message.number("cached")
    if cached is not None:
        unallocated = cached
    elif reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    allowed = message.number("allowed")
    return OomFields(
        device=message.device,
        requested=message.number("requested"),
        total=message.number("total"),
        free=message.number("free"),
        allocated=allocated,
        reserved_unallocated=unallocated,
        private_pools=message.number("private_pools"),
        allowed=message.number("max_allowed") if allowed is None else allowed,
        process_total=message.number("this_process"),
    )
