"""A finding: one diagnosed cause, with its bytes, its holder and its fix."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

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
GROWING: Final[frozenset[FindingKind]] = frozenset({"leak", "garbage_cycle"})
"""Kinds of findings whose growth says more than their bytes."""
Verdict = Literal["clean", "leak", "residue", "fragmentation", "out_of_memory", "killed", "error"]

DEVICE_HOST: Final = "host"
"""Device name for memory of the process that is no tensor's (`cpu` is CPU tensors, `cuda:N` a GPU)."""


class Finding(msgspec.Struct, kw_only=True):
    """One diagnosed cause. Every size is in bytes; what is unknown is None and prints as `n/a`.

    Attributes:
        kind: what was diagnosed; whatever grows is a `leak` or a `garbage_cycle`.
        device: `cuda:N`, `cpu` (CPU tensors) or `host` (anything else in the process).
        rank: the rank it was seen on; None when the run has one process that is no rank.
        bytes: what it holds at the end (for an OOM: what was asked).
        bytes_per_step: growth per optimizer step.
        bytes_per_microbatch: growth per completed `torch.autograd.backward`.
        holder: the holder path, e.g. `train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]`.
        also_held_by: other holder paths that must let go as well.
        allocated_at: `file.py:line in function` of the allocation.
        mechanism: in one sentence, why this keeps memory.
        fix: what to change.
        playbook: `M1` ... `M20`.
        phase: forward, backward, optimizer, evaluation, or a user's phase name.
        step: the step at which it was found (for an OOM: at which it died).
        evidence: the measurements that the finding rests on, one sentence each.
    """

    kind: FindingKind
    device: str
    rank: int | None = None
    bytes: int | None = None
    bytes_per_step: int | None = None
    bytes_per_microbatch: int | None = None
    holder: str | None = None
    also_held_by: list[str] = msgspec.field(default_factory=list)
    allocated_at: str | None = None
    mechanism: str | None = None
    fix: str | None = None
    playbook: str | None = None
    phase: str | None = None
    step: int | None = None
    evidence: list[str] = msgspec.field(default_factory=list)
