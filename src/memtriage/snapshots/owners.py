"""What each block of a recording is, by its stack and lifetime, and bytes by owner, site and label.

Known limitations: a recording has no tensors, so a name like `gradient` is an inference: allocated in
backward and alive when the step ends. Where no stacks were recorded, only size and time are left to judge by.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtriage.account.workspaces import DEFAULT_WORKSPACES, HANDLES_PER_STREAM
from memtriage.allocator.replay import ReplayedTrace
from memtriage.model.recording import ALLOC, OWNERS, Bytes8, Events, Int64s, LabelRow, OwnedBytes, Stack
from memtriage.snapshots.steps import (
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
LONG_LIVED: Final = 2
"""Step ends that a block must see to outlive what each step allocates again (gradients see one)."""


def steps_survived(replayed: ReplayedTrace, ends: Sequence[int]) -> NDArray[np.int64]:
    """Return how many step ends each life sees, given the index of the first event after each step."""
    at = np.asarray(ends, np.int64)
    alive = np.where(replayed.died < 0, np.iinfo(np.int32).max, replayed.died)
    # born before the end, and not yet freed when the event at the end happens
    return np.searchsorted(at, alive, "right") - np.searchsorted(at, replayed.born, "right")


def owners_of(
    trace: Events,
    replayed: ReplayedTrace,
    facts: Sequence[StackFacts],
    ends: Sequence[int],
) -> Bytes8:
    """Return the owner of each life, as indices into `OWNERS`; `ends` is empty where no steps were found."""
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
    # where nothing shows that it trains: a cache of keys and values is made in forward, too
    trains = len(ends) > 0 or (phases[trace.stack[trace.kind == ALLOC]] == BACKWARD).any()
    owners[forward & outlives] = _CODE["saved for backward" if trains else "variable"]

    custom = np.array([fact.custom for fact in facts])[replayed.stack]
    first_end = ends[0] if len(ends) else 0
    owners[phase == BACKWARD] = _CODE["backward temporary"]
    owners[(phase == BACKWARD) & kept] = _CODE["gradient"]
    # what a custom backward makes and what outlives the zeroing of gradients was put on its context
    late = custom & (survived >= LONG_LIVED) & (born >= first_end)
    owners[(phase == BACKWARD) & late] = _CODE["autograd context"]

    bare = ~np.array([fact.frames for fact in facts])[replayed.stack]
    if not len(ends) or bare.all():
        owners[bare] = _CODE["c++ only"]
    owners[bare & (born < 0)] = _CODE["before the recording"]
    library = (phase != PLACEMENT) & (phase != OPTIMIZER)
    owners[_workspaces(replayed, library, first_end)] = _CODE["cuBLAS workspace"]
    return owners


def _phase_at(trace: Events, phases: Bytes8, events: NDArray[np.int32]) -> Bytes8:
    """Return the phase of the last allocation before each event: a free may not have a stack of its own."""
    allocs = np.flatnonzero(trace.kind == ALLOC)
    if not len(allocs):
        return np.full(len(events), NONE, np.uint8)
    before = np.searchsorted(allocs, events) - 1
    latest: Bytes8 = phases[trace.stack[allocs[np.maximum(before, 0)]]]
    return np.where(before < 0, np.uint8(NONE), latest)


def _workspaces(replayed: ReplayedTrace, possible: NDArray[np.bool_], first_end: int) -> NDArray[np.bool_]:
    """Mark the possible lives that are cuBLAS workspaces: of its size, of the first step, never freed, and
    few.

    As in the live ledger, more of one size on one stream than there are handles means that some of them are
    something else; the small cuBLASLt size is common, and needs a cuBLAS workspace from its stack beside it.
    """
    sizes = DEFAULT_WORKSPACES
    early = (replayed.born < first_end) if first_end else (replayed.born >= 0)
    of_size = np.isin(replayed.requested, [*sizes.cublas, *sizes.cublaslt])
    keys = {
        life: (int(replayed.stream[life]), int(replayed.requested[life]))
        for life in np.flatnonzero(possible & (replayed.died < 0) & early & of_size).tolist()
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


# Bytes by owner, by allocation site and by the labels that the program gave


@dataclass(frozen=True, slots=True)
class SiteIndex:
    """The allocation sites of a recording, and the site of every life.

    Attributes:
        names: the distinct sites.
        of_life: index into `names` for each life.
    """

    names: tuple[str, ...]
    of_life: NDArray[np.int64]


def index_sites(replayed: ReplayedTrace, stacks: Sequence[Stack]) -> SiteIndex:
    """Number the sites. Stacks that end in the same line of the same function are one site."""
    numbers: dict[str, int] = {}
    of_stack = np.array([numbers.setdefault(stack.site, len(numbers)) for stack in stacks], np.int64)
    return SiteIndex(tuple(numbers), of_stack[replayed.stack])


def alive_at(replayed: ReplayedTrace, event: int) -> NDArray[np.bool_]:
    """Which lives are allocated after an event; -1 means before the first one."""
    ended = (replayed.died >= 0) & (replayed.died <= event)
    return (replayed.born <= event) & ~ended


def owned_bytes(
    alive: NDArray[np.bool_], size: Int64s, owners: Bytes8, sites: SiteIndex
) -> tuple[OwnedBytes, ...]:
    """The bytes of the marked lives by owner and site, biggest first."""
    keys = owners[alive].astype(np.int64) * len(sites.names) + sites.of_life[alive]
    distinct, where, counts = np.unique(keys, return_inverse=True, return_counts=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, where.reshape(-1), size[alive])
    rows = [
        OwnedBytes(OWNERS[key // len(sites.names)], sites.names[key % len(sites.names)], total, count)
        for key, total, count in zip(distinct.tolist(), totals.tolist(), counts.tolist(), strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.owner, row.site)))


@dataclass(frozen=True, slots=True)
class SiteSeries:
    """What each site has alive at the ends of steps: rows are sites, columns are the steps looked at.

    Attributes:
        steps: number of each step looked at, counted from 1.
        bytes, blocks: alive at its end.
    """

    steps: NDArray[np.int64]
    bytes: NDArray[np.int64]
    blocks: NDArray[np.int64]


def site_series(replayed: ReplayedTrace, sites: SiteIndex, ends: Sequence[int], most: int) -> SiteSeries:
    """Follow the sites over at most so many steps, evenly spread, of which `ends` has the first event after
    each. The last one is among them.
    """
    spread = np.unique(np.linspace(len(ends) - 1, 0, min(most, len(ends))).round().astype(np.int64))
    marks = np.asarray(ends, np.int64)[spread]
    first = np.searchsorted(marks, replayed.born, "right")
    end = np.where(replayed.died < 0, len(marks), np.searchsorted(marks, replayed.died, "right"))
    seen = first < end
    shape = (len(sites.names), len(marks) + 1)
    totals, blocks = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    site, size = sites.of_life[seen], replayed.size[seen]
    np.add.at(totals, (site, first[seen]), size)
    np.subtract.at(totals, (site, end[seen]), size)
    np.add.at(blocks, (site, first[seen]), 1)
    np.subtract.at(blocks, (site, end[seen]), 1)
    return SiteSeries(
        steps=spread + 1,
        bytes=np.cumsum(totals, axis=1)[:, :-1],
        blocks=np.cumsum(blocks, axis=1)[:, :-1],
    )


def label_rows(
    trace: Events, replayed: ReplayedTrace, at_peak: NDArray[np.bool_], at_end: NDArray[np.bool_]
) -> tuple[LabelRow, ...]:
    """Return the bytes of each label (`_set_memory_metadata` and `_annotate_tensor` of torch), most first.

    A block with several labels counts for each of them.
    """
    lives: dict[str, set[int]] = {}
    for life, label in _labelled(trace, replayed):
        lives.setdefault(label, set()).add(life)
    rows = [
        LabelRow(
            label=label,
            at_peak=sum(int(replayed.size[life]) for life in marked if at_peak[life]),
            at_end=sum(int(replayed.size[life]) for life in marked if at_end[life]),
            blocks=len(marked),
        )
        for label, marked in lives.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-max(row.at_peak, row.at_end), row.label)))


def _labelled(trace: Events, replayed: ReplayedTrace) -> Iterator[tuple[int, str]]:
    """Yield each life that has a label. An annotation names the block that is at its address then."""
    annotated = any(trace.kind[event] != ALLOC for event in trace.labels)
    births = zip(replayed.address.tolist(), replayed.born.tolist(), range(len(replayed.born)), strict=True)
    by_address = sorted(births) if annotated else []
    for event, label in trace.labels.items():
        if trace.kind[event] == ALLOC:
            yield int(replayed.life[event]), label
            continue
        address = int(trace.address[event])
        at = bisect_right(by_address, (address, event, len(by_address))) - 1
        if at >= 0 and by_address[at][0] == address:
            life = by_address[at][2]
            if not 0 <= replayed.died[life] < event:
                yield life, label
