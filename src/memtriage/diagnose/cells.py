"""Censuses before and after executions of a notebook cell: what each changed, and what grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from memtriage.account.followed import changed, grew_most
from memtriage.diagnose.growth.attribution import HolderRise, accumulates, attribute
from memtriage.diagnose.growth.evidence import Comparison
from memtriage.diagnose.growth.facts import Leak
from memtriage.diagnose.growth.judgment import of_censuses
from memtriage.model.cell import HolderChange
from memtriage.model.census import Census, HolderGroup
from memtriage.model.evidence import CensusSeen, HolderSeen
from memtriage.model.paths import HolderPath
from memtriage.model.position import TrainingPosition

JUDGED_FROM: Final = 3
"""Executions needed to judge growth: a first one, which may make what stays, and two rises after it."""
_LEAST_CHANGE: Final = 1024
"""Smaller changes of a holder, in bytes, are left out: counters, steps and other numbers in tensors."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """The holders before and after an execution, by id, and its number."""

    number: int
    before: dict[int, HolderSeen]
    after: dict[int, HolderSeen]

    def adds_to(self, holder: int) -> bool:
        """Return whether it gave a holder more, in a way that may never end."""
        after = self.after.get(holder)
        return after is not None and accumulates(self.before.get(holder, _nothing(after)), after, 1.0)


def _nothing(seen: HolderSeen) -> HolderSeen:
    """Return a holder before it had anything."""
    return msgspec.structs.replace(seen, nbytes=0, kept=0, storages=0, nodes=0)


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
        path = grew_most(before_group, after_group) if before_group and after_group else group.path
        count = (after_group.count if after_group else 0) - (before_group.count if before_group else 0)
        holder_changes.append(_change(group, path, nbytes, count))
    holder_changes.sort(key=lambda change: -abs(change.bytes))
    more = [change for change in holder_changes if change.bytes > 0]
    less = [change for change in holder_changes if change.bytes < 0]
    return more, less


def holders(census: Census) -> list[HolderChange]:
    """Return every holder that is not tiny, with all that it has, largest first."""
    return [
        _change(group, group.path, group.nbytes, group.count)
        for group in census.groups
        if group.nbytes >= _LEAST_CHANGE
    ]


def _change(group: HolderGroup, path: HolderPath, nbytes: int, count: int) -> HolderChange:
    owner = max(group.owners, key=lambda name: group.owners[name])
    return HolderChange(device=group.device, holder_path=path, bytes=nbytes, count=count, owner=owner)


def by_device(census: Census) -> dict[str, int]:
    """Return bytes in live tensors by device."""
    total: dict[str, int] = {}
    for group in census.groups:
        total[group.device] = total.get(group.device, 0) + group.nbytes
    return total


def growing(runs: Sequence[CellRun]) -> list[tuple[HolderRise, HolderSeen]]:
    """Return what the last executions added to and what stayed from each to the next, with what it has now.

    Only the cell works between its two censuses, and does the same each time. So two rises are enough.

    Args:
        runs: the last executions of one cell, in order; with fewer than two, nothing is returned.
    """
    last = runs[-JUDGED_FROM:]
    grown = []
    for rise in attribute(_compared(last)):
        if not isinstance(rise, HolderRise):
            continue
        seen = last[-1].after[rise.seen.id]
        throughout = len(rise.points) == len(last) and all(run.adds_to(seen.id) for run in last[-2:])
        if throughout and rise.rate >= _LEAST_CHANGE:
            judged = len(last) == JUDGED_FROM and rise.reason == "few"
            grown.append((replace(rise, certainty="proven", reason=None) if judged else rise, seen))
    return grown


def leaks(runs: Sequence[CellRun], rises: Sequence[HolderRise]) -> list[Leak]:
    """Return the leaks of what grows from run to run; containers with a bound of their own do not.

    Args:
        runs: as for `growing`.
        rises: what that found; the holders have their details now.
    """
    return of_censuses(_compared(runs[-JUDGED_FROM:]), rises)


def _compared(runs: Sequence[CellRun]) -> Comparison:
    """Return what stayed after each of some executions. Before a holder was there, it had nothing."""
    comparison = Comparison("run")
    latest: dict[int, HolderSeen] = {}
    for run, following in zip(runs, [*runs[1:], runs[-1]], strict=True):
        before = {holder: _nothing(seen) for holder, seen in following.after.items()}
        holders, gone = changed((before | run.after).values(), latest)
        position = TrainingPosition(step=run.number)
        comparison.censuses.append(CensusSeen(position=position, holders=holders, gone=gone))
    return comparison
