"""Censuses before and after executions of a notebook cell: what each changed, and what grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtriage.diagnose.growth.holders import stops_when_full
from memtriage.diagnose.growth.leaks import CensusPoint, GroupGrowth, accumulates, growth_between, persistent
from memtriage.diagnose.mechanisms import Held, mechanism_of
from memtriage.model.cell import HolderChange
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.model.findings import Finding
from memtriage.model.paths import SegmentKind, has
from memtriage.model.units import size
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.mechanisms import MECHANISMS, MechanismText

JUDGED_FROM: Final = 3
"""Executions needed to judge growth: a first one, which may make what stays, and two rises after it."""
_LEAST_CHANGE: Final = 1024
"""Smaller changes of a holder, in bytes, are left out: counters, steps and other numbers in tensors."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """The censuses before and after one execution; their position is its number."""

    before: CensusPoint
    after: CensusPoint


def changes(before: Census, after: Census) -> tuple[list[HolderChange], list[HolderChange]]:
    """Return the holders that grew and those that shrank, each largest first."""
    old = {group.key: group for group in before.groups}
    new = {group.key: group for group in after.groups}
    holder_changes = []
    for key in {**old, **new}:
        after_group, before_group = new.get(key), old.get(key)
        nbytes = (after_group.nbytes if after_group else 0) - (before_group.nbytes if before_group else 0)
        if abs(nbytes) < _LEAST_CHANGE:
            continue
        group = after_group or before_group
        assert group is not None
        count = (after_group.count if after_group else 0) - (before_group.count if before_group else 0)
        holder_changes.append(_change(group, nbytes, count))
    holder_changes.sort(key=lambda change: -abs(change.bytes))
    more = [change for change in holder_changes if change.bytes > 0]
    less = [change for change in holder_changes if change.bytes < 0]
    return more, less


def holders(census: Census) -> list[HolderChange]:
    """Return every holder that is not tiny, with all that it has, largest first."""
    return [
        _change(group, group.nbytes, group.count) for group in census.groups if group.nbytes >= _LEAST_CHANGE
    ]


def _change(group: HolderGroup, nbytes: int, count: int) -> HolderChange:
    owner = max(group.owners, key=lambda name: group.owners[name])
    return HolderChange(device=group.device, holder_path=group.path, bytes=nbytes, count=count, owner=owner)


def by_device(census: Census) -> dict[str, int]:
    """Return bytes in live tensors by device."""
    total: dict[str, int] = {}
    for group in census.groups:
        total[group.device] = total.get(group.device, 0) + group.nbytes
    return total


def growing(runs: Sequence[CellRun]) -> list[GroupGrowth]:
    """Return what grew inside each of the last executions, and stayed from each to the next.

    Args:
        runs: the last executions of one cell, in order; with fewer than two, nothing is returned.
    """
    if len(runs) < 2:
        return []
    last = runs[-JUDGED_FROM:]
    inside = [{growth.key: growth for growth in growth_between(run.before, run.after)} for run in last]
    stayed = persistent([run.after for run in last])
    # The first one may have made what the others only add to.
    return [
        growth
        for growth in stayed
        if all(growth.key in run and _adds(growth, run[growth.key]) for run in inside[-2:])
    ]


def _adds(overall: GroupGrowth, inside: GroupGrowth) -> bool:
    """Whether one run added what all runs added: more storages, or to a longer one."""
    return accumulates(inside) if overall.count else inside.nbytes > 0


def run_finding(growth: GroupGrowth, detail: GroupDetail, runs: Sequence[CellRun]) -> Finding | None:
    """Make the finding of what grows from run to run; None if it has a bound.

    Args:
        growth: one of `growing(runs)`.
        detail: a closer look at its group.
        runs: the executions, `JUDGED_FROM` or more.
    """
    if stops_when_full(detail, attached=growth.group.attached):
        return None
    explanation = _explanation(growth, detail)
    rate = round(growth.rate)
    last = runs[-JUDGED_FROM:]
    inside = [
        next(
            (change.nbytes for change in growth_between(run.before, run.after) if change.key == growth.key), 0
        )
        for run in last
    ]
    by_run = ", ".join(
        f"run {run.after.position} added {size(nbytes)}"
        for run, nbytes in zip(last, inside, strict=True)
        if nbytes
    )
    return Finding(
        kind="leak",
        device=growth.group.device,
        bytes=growth.group.nbytes,
        holder_path=growth.path,
        also_held_by_paths=detail.also_held_by,
        mechanism=f"{explanation.mechanism}: {size(rate)} more with every run of this cell",
        fix=explanation.fix,
        playbook=LEAKS,
        evidence=[f"censuses before and after the cell: {by_run}"],
    )


def _explanation(growth: GroupGrowth, detail: GroupDetail) -> MechanismText:
    if has(growth.group.anchor, SegmentKind.OUTPUT):
        return MECHANISMS["shown values of cells"]
    owner = max(growth.group.owners, key=lambda name: growth.group.owners[name])
    return mechanism_of(
        Held(
            path=growth.path,
            anchor=growth.group.anchor,
            attached=growth.group.attached,
            owner=owner,
            kind=detail.holder_kind,
            lengthens=growth.count == 0,
            shared=detail.shared,
            every="run",
        )
    )
