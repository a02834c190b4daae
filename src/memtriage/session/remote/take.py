"""Take the census that another process has asked for."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from memtriage.account.census import CensusView, Look
from memtriage.account.host_reading import read_host
from memtriage.account.ledgers import take_ledgers
from memtriage.model.asked import Answer, HeldHere
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.observe import cuda
from memtriage.observe.alone import backward_runs
from memtriage.observe.autograd import unread_saved_tensors
from memtriage.observe.identity import Addresses
from memtriage.process.stdlib import os, time

MOST_HOLDERS: Final = 500
"""Holders with a separate row; the smaller ones share one row per device."""


def take_answer(
    baselines: Mapping[int, int] | None = None, script_root: str | None = None, follow: bool = False
) -> Answer | None:
    """Take a census of this process now, in the calling thread; None if it must not be inspected now.

    It must not while a backward runs in any thread, or this thread captures a CUDA graph. The answer keeps no
    tensor alive.

    Args:
        baselines: bytes outside the allocator when a device was first seen, by CUDA index.
        script_root: folder of the user's script, for allocation sites.
        follow: add what is needed to compare this census with later ones.
    """
    if backward_runs() or (cuda.initialized() and cuda.capturing()):
        return None
    started = time.perf_counter()
    on_host = read_host()  # before the census, whose own memory is not the program's
    groups: list[HolderGroup] = []
    details: list[GroupDetail] = []
    with Look(identities=Addresses() if follow else None) as view:
        census = view.census()
        if follow:
            groups, details = _to_follow(view, census)
    partial = None if census.partial is None else f"a partial census: {census.partial}"
    unread = unread_saved_tensors() if census.nodes else None
    ledgers = take_ledgers(census.storages, dict(baselines or {}), script_root, on_host, census.parameters)
    return Answer(
        pid=os.getpid(),
        host=socket.gethostname(),
        argv=list(sys.argv),
        time=time.time(),
        paused_s=round(time.perf_counter() - started, 6),
        ledgers=ledgers,
        holders=held_rows([group for group in census.groups if group.count]),
        objects=census.objects,
        nodes=census.nodes,
        groups=groups,
        details=details,
        notes=[note for note in (partial, unread) if note is not None],
    )


def _to_follow(view: CensusView, census: Census) -> tuple[list[HolderGroup], list[GroupDetail]]:
    """Return the largest groups, without what cannot be sent, and their details."""
    largest = sorted(census.groups, key=lambda group: -(group.nbytes + group.kept))[:MOST_HOLDERS]
    details = view.details([group.key for group in largest], lambda tensor: None, alone=())
    sent = [msgspec.structs.replace(group, by_path={}) for group in largest]
    return sent, [details.get(group.key, GroupDetail()) for group in largest]


def held_rows(groups: list[HolderGroup]) -> list[HeldHere]:
    """Return the groups of a census, largest first; after `MOST_HOLDERS`, one row per device for the rest."""
    ordered = sorted(groups, key=lambda group: -group.nbytes)
    rows = [
        HeldHere(
            device=group.device,
            holder_path=group.path,
            count=group.count,
            bytes=group.nbytes,
            owners=group.owners,
            known=group.known,
        )
        for group in ordered[:MOST_HOLDERS]
    ]
    rest: dict[str, HeldHere] = {}
    for group in ordered[MOST_HOLDERS:]:
        row = rest.setdefault(group.device, HeldHere(device=group.device, count=0, bytes=0))
        row.count += group.count
        row.bytes += group.nbytes
        for owner, nbytes in group.owners.items():
            row.owners[owner] = row.owners.get(owner, 0) + nbytes
    return rows + list(rest.values())
