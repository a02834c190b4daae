"""Infer what each block of a recording is, from its allocation stack and its lifetime.

Known limitations: a recording has no tensors, so a name like `gradient` is an inference: allocated in
backward and alive when the step ends. Where no stacks were recorded, only size and time are left to judge by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtriage.account.workspaces import DEFAULT_WORKSPACES, HANDLES_PER_STREAM, WorkspaceSizes
from memtriage.allocator.replay import ReplayedTrace
from memtriage.allocator.trace_columns import TraceColumns
from memtriage.model.recording import ALLOC, OWNERS, Bytes8
from memtriage.snapshots.stacks import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    NONE,
    OPTIMIZER,
    PLACEMENT,
    StackFacts,
    phase_codes,
)

_CODE: Final = {name: code for code, name in enumerate(OWNERS)}
_LONG_LIVED: Final = 2
"""Step ends that a block must see to outlive what each step allocates again (gradients see one)."""


def steps_survived(replayed: ReplayedTrace, ends: Sequence[int]) -> NDArray[np.int64]:
    """Return how many step ends each life sees.

    Args:
        replayed: the lives.
        ends: index of the first event after each step.
    """
    at = np.asarray(ends, np.int64)
    alive = np.where(replayed.died < 0, np.iinfo(np.int32).max, replayed.died)
    # born before the end, and not yet freed when the event at the end happens
    return np.searchsorted(at, alive, "right") - np.searchsorted(at, replayed.born, "right")


def owners_of(
    trace: TraceColumns,
    replayed: ReplayedTrace,
    facts: Sequence[StackFacts],
    ends: Sequence[int],
    workspaces: WorkspaceSizes = DEFAULT_WORKSPACES,
) -> Bytes8:
    """Return the owner of each life, as indices into `OWNERS`.

    Args:
        trace: the events.
        replayed: the lives.
        facts: what each stack says.
        ends: index of the first event after each step; empty where no steps were found.
        workspaces: sizes by which a cuBLAS workspace is recognized.
    """
    phases = phase_codes(facts)
    born, died = replayed.born, replayed.died
    phase = phases[replayed.stack]
    survived = steps_survived(replayed, ends)
    kept = (survived > 0) if len(ends) else (died < 0)
    owners = np.full(len(born), _CODE["variable"], np.uint8)

    owners[phase == PLACEMENT] = _CODE["parameter"]
    owners[phase == COMMUNICATION] = _CODE["communication buffer"]

    states = np.array([fact.state for fact in facts])[replayed.stack]
    owners[phase == OPTIMIZER] = _CODE["optimizer temporary"]
    owners[(phase == OPTIMIZER) & (kept | (states & (died < 0)))] = _CODE["optimizer state"]

    forward = phase == FORWARD
    owners[forward] = _CODE["forward temporary"]
    outlives = (died < 0) | (_phase_at(trace, phases, died) != FORWARD)
    if len(ends) or (phases[trace.stack[trace.kind == ALLOC]] == BACKWARD).any():
        owners[forward & outlives] = _CODE["saved for backward"]
    else:  # nothing shows that it trains: a cache of keys and values is made in forward, too
        owners[forward & outlives] = _CODE["variable"]

    custom = np.array([fact.custom for fact in facts])[replayed.stack]
    first_end = ends[0] if len(ends) else 0
    owners[phase == BACKWARD] = _CODE["backward temporary"]
    owners[(phase == BACKWARD) & kept] = _CODE["gradient"]
    # what a custom backward makes and what outlives the zeroing of gradients was put on its context
    late = custom & (survived >= _LONG_LIVED) & (born >= first_end)
    owners[(phase == BACKWARD) & late] = _CODE["autograd context"]

    bare = ~np.array([fact.frames for fact in facts])[replayed.stack]
    if not len(ends) or bare.all():
        owners[bare] = _CODE["c++ only"]
    owners[bare & (born < 0)] = _CODE["before the recording"]
    library = (phase != PLACEMENT) & (phase != OPTIMIZER)
    owners[_workspaces(replayed, library, first_end, workspaces)] = _CODE["cuBLAS workspace"]
    return owners


def _phase_at(trace: TraceColumns, phases: Bytes8, events: NDArray[np.int32]) -> Bytes8:
    """Return the phase of the last allocation before each event: a free may not have a stack of its own."""
    allocs = np.flatnonzero(trace.kind == ALLOC)
    if not len(allocs):
        return np.full(len(events), NONE, np.uint8)
    before = np.searchsorted(allocs, events) - 1
    latest: Bytes8 = phases[trace.stack[allocs[np.maximum(before, 0)]]]
    return np.where(before < 0, np.uint8(NONE), latest)


def _workspaces(
    replayed: ReplayedTrace, possible: NDArray[np.bool_], first_end: int, sizes: WorkspaceSizes
) -> NDArray[np.bool_]:
    """Mark the possible lives that are cuBLAS workspaces: of its size, of the first step, never freed, and
    few.

    As in the live ledger, more of one size on one stream than there are handles means that some of them are
    something else; the small cuBLASLt size is common, and needs a cuBLAS workspace from its stack beside it.
    """
    early = (
        possible & (replayed.died < 0) & ((replayed.born < first_end) if first_end else (replayed.born >= 0))
    )
    keys = {
        life: (int(replayed.stream[life]), int(replayed.requested[life]))
        for life in np.flatnonzero(
            early & np.isin(replayed.requested, [*sizes.cublas, *sizes.cublaslt])
        ).tolist()
    }

    def few(lives: Iterable[int]) -> list[int]:
        candidates = list(lives)
        counts = Counter(keys[life] for life in candidates)
        return [life for life in candidates if counts[keys[life]] <= HANDLES_PER_STREAM]

    cublas = few(life for life in keys if keys[life][1] in sizes.cublas)
    stacks = {int(replayed.stack[life]) for life in cublas}
    beside = few(life for life in keys if life not in cublas and int(replayed.stack[life]) in stacks)
    chosen = np.zeros(len(replayed.born), np.bool_)
    chosen[[*cublas, *beside]] = True
    return chosen
