"""Take the census that another process has asked for."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from memtriage.account.census import CensusView, Look
from memtriage.account.host_reading import HostReading, read_host
from memtriage.account.ledgers import DeviceReading, read_devices, take_ledgers
from memtriage.model.asked import Answer, HeldHere
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.observe import cuda
from memtriage.observe.alone import backward_runs, imports_torch
from memtriage.observe.autograd import unread_saved_tensors
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.host import in_use
from memtriage.observe.identity import Addresses
from memtriage.observe.objects import instances
from memtriage.observe.tensors import is_pinned, storage_facts, undisturbed
from memtriage.process.copies import Copy, copies_are_made, work_in_copy
from memtriage.process.json_text import encode
from memtriage.process.stdlib import os, time

MOST_HOLDERS: Final = 500
"""Holders with a separate row; the smaller ones share one row per device."""
_COPIED_AT_ONCE: Final = 256 << 20
"""Most bytes of page-locked private memory (`cudaHostRegister`) with which a copy is made. The kernel copies
such pages before the program goes on: 8 GiB took 2.9 to 4.1 s."""


class _Beforehand(NamedTuple):
    """What is read before a census: its own memory is not the program's, and a copy must not call CUDA.

    Attributes:
        pid: this process.
        baselines: as for `take_answer`.
        host, devices: the counters.
        pinned: bytes of page-locked storages by address; None to ask torch for each.
    """

    pid: int
    baselines: dict[int, int]
    host: HostReading | None
    devices: Sequence[DeviceReading]
    pinned: Mapping[int, int] | None = None


def take_answer(
    baselines: Mapping[int, int] | None = None, script_root: str | None = None, follow: bool = False
) -> Answer | None:
    """Take a census of this process now, in the calling thread; None if it must not be inspected now.

    It must not while a backward runs in any thread, this thread captures a CUDA graph, or torch is being
    imported. The answer keeps no tensor alive.

    Args:
        baselines: bytes outside the allocator when a device was first seen, by CUDA index.
        script_root: folder of the user's script, for allocation sites.
        follow: add what is needed to compare this census with later ones.
    """
    known = _read_beforehand(baselines, script_root)
    return None if known is None else _answer(known, follow)


def answer_in_copy(baselines: Mapping[int, int], script_root: str | None, follow: bool) -> Copy | None:
    """Have a copy of this process take such an answer, and encode it as JSON.

    None where no copy can be made, where one might need more than half of the memory that is left, if the
    program wrote to all of its own meanwhile, or where too much would be copied at once.
    """
    limit, used = host_limit(), in_use()
    if not copies_are_made() or used is None or 2 * used.resident > limit.bytes - counted(limit, used):
        return None
    known = _read_beforehand(baselines, script_root)
    if known is None:
        return None
    known = known._replace(pinned=_pinned_storages() if cuda.initialized() else {})
    if _copied_at_once(known) > _COPIED_AT_ONCE:
        return None
    return work_in_copy(lambda: encode(_answer(known, follow)))


def _read_beforehand(baselines: Mapping[int, int] | None, script_root: str | None) -> _Beforehand | None:
    if imports_torch() or backward_runs() or (cuda.initialized() and cuda.capturing()):
        return None
    return _Beforehand(os.getpid(), dict(baselines or {}), read_host(), read_devices(script_root))


def _answer(known: _Beforehand, follow: bool) -> Answer:
    started = time.perf_counter()
    groups: list[HolderGroup] = []
    details: list[GroupDetail] = []
    with Look(identities=Addresses() if follow else None, pinned=known.pinned) as view:
        census = view.census()
        if follow:
            groups, details = _to_follow(view, census)
    partial = None if census.partial is None else f"a partial census: {census.partial}"
    unread = unread_saved_tensors() if census.nodes else None
    ledgers = take_ledgers(census.storages, known.baselines, known.devices, known.host, census.parameters)
    return Answer(
        pid=known.pid,
        host=socket.gethostname(),
        argv=list(sys.argv),
        time=time.time(),
        took_s=round(time.perf_counter() - started, 6),
        ledgers=ledgers,
        holders=held_rows([group for group in census.groups if group.count]),
        objects=census.objects,
        nodes=census.nodes,
        groups=groups,
        details=details,
        notes=[note for note in (partial, unread) if note is not None],
    )


def _copied_at_once(known: _Beforehand) -> int:
    """Return the bytes of page-locked tensors in memory that a copy gets its own pages of."""
    if known.host is None or known.pinned is None:
        return 0
    covered = known.host.classes.covering
    found = (piece for at, nbytes in known.pinned.items() for piece in covered(at, at + nbytes))
    return sum(end - start for start, end, mapping in found if mapping.kind in ("heap", "anonymous"))


def _pinned_storages() -> dict[int, int]:
    """Return the bytes of the page-locked storages of this process's tensors, by address."""
    tensors = instances(lambda kind: issubclass(kind, sys.modules["torch"].Tensor))
    with undisturbed():
        found = ((tensor, storage_facts(tensor)) for tensor in tensors)
        on_cpu = ((tensor, facts) for tensor, facts in found if facts is not None and facts.device == "cpu")
        return {facts.address: facts.nbytes for tensor, facts in on_cpu if is_pinned(tensor)}


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
