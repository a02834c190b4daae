"""A finding: one diagnosed cause, with its bytes, its holder and its fix."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

import msgspec

from memtriage.model.bounds import Whole
from memtriage.model.paths import HolderPath, in_words
from memtriage.model.units import size

FindingKind = Literal[
    "leak",
    "garbage_cycle",
    "residue",
    "fragmentation",
    "private_pool",
    "stream_pool",
    "out_of_memory",
    "pinned_rounding",
    "malloc_retention",
    "worker_copy_on_write",
    "shared_memory",
    "host_limit",
    "rank_differs",
]
Verdict = Literal[
    "clean", "leak", "residue", "fragmentation", "out_of_memory", "killed", "not_judged", "error"
]


class KindTraits(NamedTuple):
    """What a kind of finding means to verdicts and reports.

    Attributes:
        verdict: what a proven finding makes of a run, if the script died of it for `out_of_memory`.
        course: whether memory over time shows it. With wasted host memory, a healthy run looks like a leak.
        per_rank: whether its evidence differs from rank to rank.
    """

    verdict: Verdict | None = None
    course: bool = True
    per_rank: bool = False


TRAITS: Final[dict[FindingKind, KindTraits]] = {
    "leak": KindTraits("leak"),
    "garbage_cycle": KindTraits("leak"),
    "residue": KindTraits("residue"),
    "fragmentation": KindTraits("fragmentation"),
    "private_pool": KindTraits(),
    "stream_pool": KindTraits(),
    "out_of_memory": KindTraits("out_of_memory"),
    "pinned_rounding": KindTraits(course=False),
    "malloc_retention": KindTraits(course=False),
    "worker_copy_on_write": KindTraits(course=False),
    "shared_memory": KindTraits(course=False),
    "host_limit": KindTraits(course=False, per_rank=True),
    "rank_differs": KindTraits(per_rank=True),
}
GROWING: Final = frozenset(kind for kind, traits in TRAITS.items() if traits.verdict == "leak")
"""Kinds of findings whose growth matters more than their bytes."""
SEVERE: Final = GROWING | {"out_of_memory"}
"""Kinds of findings that end a run sooner or later."""

VERDICTS_OF_A_RUN: Final[tuple[Verdict, ...]] = tuple(word for word in get_args(Verdict) if word != "killed")
"""The verdicts that a run can reach at its own end; a process that was killed is judged from its record."""
ProcessKind = Literal["main", "worker", "child", "rank"]
"""The process that was started, a worker of a `DataLoader`, another child, a rank."""
Event = Literal["step", "microbatch", "backward", "save", "evaluation", "epoch", "call", "batch", "sample"]
"""What growth comes with."""
Certainty = Literal["proven", "suspected"]
"""Growth is proven if one holder was seen to grow over several intervals and no counter contradicts it."""

DEVICE_HOST: Final = "host"
"""Device name for host memory other than tensors (`cpu` is CPU tensors, `cuda:N` a GPU)."""


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """When memory runs out if growth continues at its rate, or with a batch that is still to come.

    Attributes:
        device: as the finding has it.
        limit: bytes at which the device is full.
        step: the optimizer step at which it is full.
        microbatches: micro-batches of a step after which it is full, if memory only grows within a step.
        backward: the backward at which it is full, in a program without optimizer steps.
        shares: percent of the growth by process, where several processes fill the same memory.
    """

    device: str
    limit: Whole
    step: Whole | None = None
    microbatches: Whole | None = None
    backward: Whole | None = None
    shares: dict[str, Whole] | None = None

    def __str__(self) -> str:
        full = f"at this rate {self.device} (limit {size(self.limit)}) is full"
        if self.step is not None:
            by = "" if self.shares is None else f": {self.in_shares}"
            return f"{full} at step {self.step:,}{by}"
        if self.backward is not None:
            return f"{full} at backward {self.backward:,}"
        return f"{full} {self.microbatches:,} micro-batches into a step"

    @property
    def in_shares(self) -> str:
        """Which process has which part in it."""
        return ", ".join(f"{process} {percent} %" for process, percent in (self.shares or {}).items())


class ReferenceCut(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the program that removes references to what grows, and what it would release.

    Attributes:
        cut: the kind of change, e.g. `detach`, `clone`, `bound` (see the playbook's M21).
        at: the path to what is no longer referred to.
        releases: bytes that nothing would keep alive, of those that the holder had; None if not measured.
        remains_per_event: growth that would remain, in bytes per step (backward, second).
        line: `file.py:line in function` where the reference is made; None if not certain.
    """

    cut: str
    at: str
    releases: Whole | None = None
    remains_per_event: Whole | None = None
    line: str | None = None


class Finding(msgspec.Struct, kw_only=True):
    """One diagnosed cause. Every size is in bytes; what is unknown is None and prints as `n/a`.

    Attributes:
        kind: what was diagnosed; all growth is a `leak` or a `garbage_cycle`. A suspected `out_of_memory` is
            about a batch that is still to come.
        device: `cuda:N`, `cpu` (CPU tensors) or `host` (anything else in the process).
        rank: the rank it was seen on; None in a run without ranks.
        bytes: its size at the end (for an OOM: what was requested; for one to come: what its step needs).
        bytes_step: the step of the census that `bytes` is from, if a holder grows from step to step.
        bytes_per_step: growth per optimizer step.
        bytes_per_microbatch: growth per completed `torch.autograd.backward`.
        bytes_per_second: growth over time, in a program without steps and backwards.
        event: what the growth comes with; None where nothing that was counted explains it.
        bytes_per_event: growth per event.
        where: which kind of process grows.
        process: the process in words; None for the main one.
        certainty: whether growth is proven; `suspected` for an OOM to come; else None.
        holder: the holder path as printed, e.g. `train.losses['lm'][*] -> grad_fn WrapBackward ->
            ctx.context[1]`. Made from `holder_path` if that is given.
        holder_path: its segments; None if no object is known, and in old records.
        also_held_by: other holder paths that must release it as well, as printed.
        also_held_by_paths: their segments.
        allocated_at: `file.py:line in function` of the allocation.
        stored_at: the line that stores into the holder, in the same form; None if not certain.
        mechanism: in one sentence, why this keeps memory.
        fix: what to change.
        cuts: changes that would release it, the best one first.
        playbook: `M1` ... `M21`.
        phase: forward, backward, optimizer, evaluation, or a user's phase name.
        step: the step at which it was found (for an OOM: at which it died).
        projection: when memory runs out at this rate; None where that is unknown.
        evidence: the measurements that the finding rests on, one sentence each.
    """

    kind: FindingKind
    device: str
    rank: Whole | None = None
    bytes: Whole | None = None
    bytes_step: Whole | None = None
    bytes_per_step: Whole | None = None
    bytes_per_microbatch: Whole | None = None
    bytes_per_second: Whole | None = None
    event: Event | None = None
    bytes_per_event: Whole | None = None
    where: ProcessKind | None = None
    process: str | None = None
    certainty: Certainty | None = None
    holder: str | None = None
    holder_path: HolderPath | None = None
    also_held_by: list[str] = msgspec.field(default_factory=list)
    also_held_by_paths: list[HolderPath] = msgspec.field(default_factory=list)
    allocated_at: str | None = None
    stored_at: str | None = None
    mechanism: str | None = None
    fix: str | None = None
    cuts: list[ReferenceCut] = msgspec.field(default_factory=list)
    playbook: str | None = None
    phase: str | None = None
    step: Whole | None = None
    projection: Projection | None = None
    evidence: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.holder is None and self.holder_path is not None:
            self.holder = in_words(self.holder_path)
        if not self.also_held_by:
            self.also_held_by = [in_words(path) for path in self.also_held_by_paths]

    @property
    def rates(self) -> dict[str, int]:
        """The known growth rates by unit (step, micro-batch, second), the most telling one first.

        That of a step with one micro-batch is named once.
        """
        several = self.bytes_per_microbatch != self.bytes_per_step
        of_event = self.event if self.event not in ("step", "microbatch", "backward") else None
        known: dict[str, int | None] = {
            **({} if of_event is None else {of_event: self.bytes_per_event}),
            "step": self.bytes_per_step,
            "micro-batch": self.bytes_per_microbatch if several else None,
            "second": self.bytes_per_second,
        }
        return {per: rate for per, rate in known.items() if rate is not None}

    @property
    def ahead(self) -> bool:
        """Whether it predicts an out-of-memory error: a batch to come will not fit."""
        return self.kind == "out_of_memory" and self.certainty == "suspected"

    @property
    def held_at(self) -> HolderPath | str | None:
        """Identifies the holder: its segments, or its text in a record without segments."""
        return self.holder if self.holder_path is None else self.holder_path
