"""Censuses before and after a notebook cell: what it changed."""

from __future__ import annotations

from typing import Final

from memtriage.account.followed import grew_most
from memtriage.model.cell import HolderChange
from memtriage.model.census import Census, HolderGroup
from memtriage.model.paths import HolderPath

_LEAST_CHANGE: Final = 1024
"""Smaller changes of a holder, in bytes, are left out: counters, steps and other numbers in tensors."""


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
