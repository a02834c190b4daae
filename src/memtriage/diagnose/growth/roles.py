"""Join what the processes of a job show of growth: one finding per kind of work and holder. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from memtriage.diagnose.causes import summed
from memtriage.diagnose.growth.attribution import INTERVALS, MINOR, Rise
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.facts import Counted, Leak
from memtriage.model.evidence import Role
from memtriage.model.findings import DEVICE_HOST
from memtriage.model.units import MIB

ITSELF: Final = "this process"
"""Role of the main process while it makes no step, and may only wait for the others."""
SEGMENTS: Final = "/dev/shm"
"""Role of the shared memory that processes of the job have open and none has mapped."""
LIVING: Final = "its child processes"
"""Role of all processes below the main one together: of how many there are."""


def of_each(role: Role, leak: Leak) -> Leak:
    """Return growth of the number of processes as that of their memory."""
    each, counted = role.each / MIB, leak.shown_by
    assert isinstance(counted, Counted)
    found = counted.growth
    growth = replace(
        found,
        rate=each * found.rate,
        low=each * found.low,
        high=each * found.high,
        recent=each * found.recent,
    )
    nbytes = round(each * leak.nbytes)
    return replace(leak.times(each), shown_by=replace(counted, growth=growth), nbytes=nbytes)


def risen(role: Evidence) -> int:
    """Return by how much a process has grown at most: what it has from its parent is no growth."""
    track = role.run["second"].tracks.get("cpu")
    points = None if track is None else track.points()
    if points is None or role.role is None or not len(points.at):
        return 0
    return role.role.highest - int(points.floors.min())


def ended(role: Evidence) -> bool:
    """Whether a process only grew early, as it loaded: hardly at all in the later half of what is known."""
    points = role.run["second"].tracks["cpu"].points()
    later = points.since((points.at[0] + points.at[-1]) / 2).floors
    return len(later) >= INTERVALS and bool(np.ptp(later) < MINOR * risen(role))


def of_job(found: Sequence[tuple[Role, Leak]]) -> list[Leak]:
    """Join what processes that do the same work have in common: the same holder, their rates together.

    The objects of one of them are read. What grows in the others has the same holder, as a part as large.
    """
    joined: list[list[tuple[Role, Leak]]] = []
    for role, leak in sorted(found, key=lambda each: (each[1].path is None, -each[1].rate)):
        key = role.group, leak.kind, leak.rates.keys()
        for members in joined:
            other, named = members[0]
            alike = key == (other.group, named.kind, named.rates.keys())
            if alike and leak.path in (None, named.path) and role not in [each for each, _ in members]:
                if isinstance(named.shown_by, Rise) and isinstance(leak.shown_by, Counted):
                    leak = leak.times(min(1.0, named.shown_by.share or 1.0))
                members.append((role, leak))
                break
        else:
            joined.append([(role, leak)])
    return [_joined(members) for members in joined]


def _joined(members: Sequence[tuple[Role, Leak]]) -> Leak:
    role, first = members[0]
    process = role.role if len(members) == 1 else f"{len(members)} {role.group}"
    return replace(
        summed(first, [leak for _, leak in members]),
        device=DEVICE_HOST,
        nbytes_step=None,
        where=role.where,
        process=None if role.where == "main" else process,
        unread=role.unread,
        by_role=tuple((each.role, leak.rate) for each, leak in members) if len(members) > 1 else (),
    )
