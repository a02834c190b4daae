"""The census of another process: read twice while it runs, or once while it is stopped."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from memtriage.account.ownership import RANK
from memtriage.model.census import GroupDetail, GroupKey, HolderGroup, Owner, StorageRecord
from memtriage.model.paths import HolderPath, SegmentKind, is_native
from memtriage.observe.tensors import StorageFacts
from memtriage.outside.holders import Holders, RemoteHolding
from memtriage.outside.interpreter import (
    InterpreterLayout,
    RemoteInterpreter,
    check_self,
    measure,
    own_layout,
)
from memtriage.outside.memory import MOST_BYTES, GoneError, OutsideError, ProcessMemory, RemoteMemory, Words
from memtriage.outside.naming import RemoteNamer
from memtriage.outside.objects import Frame, RemoteHeap
from memtriage.outside.owners import owners_in
from memtriage.outside.pause import PAUSE_S, paused
from memtriage.outside.python_layout import PythonLayout
from memtriage.outside.same_build import SharedFiles
from memtriage.outside.tensors import TorchReader
from memtriage.outside.torch_layout import TorchLayout, calibrate, libraries
from memtriage.outside.values import Translate
from memtriage.outside.walk import RemoteWalk
from memtriage.process.collector import collector_paused
from memtriage.process.stdlib import time

_TORCH_FILES = "libtorch_python"
_FRAMES_AGAIN: Final = 8
"""Copies of frames alone; of a thread in the middle of a backward the first was whole in twelve of twelve."""


@dataclass(slots=True)
class RemoteReading:
    """What one reading of a process found.

    Attributes:
        storages: records with an owner and a path, by device and address.
        anchors: what the program itself holds each of them with.
        attached: keys of storages that hang on the autograd graph.
        holdings: what holds each of them in Python.
        objects, nodes: Python objects and autograd nodes that were walked.
        unread: nodes of types that are not known here.
        heap, tracked: the objects, and which of them the collector follows: the next reading is compared.
        notes: what is missing.
    """

    storages: dict[tuple[str, int], StorageRecord]
    anchors: dict[tuple[str, int], HolderPath]
    attached: set[tuple[str, int]]
    holdings: dict[tuple[str, int], RemoteHolding]
    objects: int
    nodes: int
    unread: int
    heap: RemoteHeap
    tracked: Words
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OutsideCensus:
    """A census that was read from outside.

    Attributes:
        groups: largest first; a storage is in one of them if both readings agree about it. Holders are known
            by their addresses, and so are storages, which are all witnesses. `kept` and `objects` of a group
            are not worked out.
        storages: their records.
        details: type and bound of the container of each group.
        at: when the last reading was copied, in seconds of the monotonic clock.
        objects, nodes: that were walked in the last reading.
        moved: storages about which two readings disagree; None where only one counts.
        moved_bytes: their bytes.
        seconds: that reading took; the process went on.
        stopped_s: how long it was stopped; 0 without `pause`.
        notes: what is missing.
    """

    groups: list[HolderGroup]
    storages: list[StorageRecord]
    details: dict[GroupKey, GroupDetail]
    at: float
    objects: int
    nodes: int
    moved: int | None
    moved_bytes: int
    seconds: float
    stopped_s: float
    notes: list[str]


@functools.cache
def _own_build() -> tuple[PythonLayout, InterpreterLayout, TorchLayout]:
    """Measure and check this process's Python and torch, once."""
    layout = own_layout()
    found = measure(layout)
    check_self(layout, found)
    return layout, found, calibrate()


def take_census(
    pid: int, *, pause: bool = False, twice: bool = True, within_s: float = 60.0
) -> OutsideCensus:
    """Take a census of a process that was not prepared for it.

    Args:
        pid: the process: of the same builds of Python and torch as this one.
        pause: stop it for at most 50 ms, and copy what was read before meanwhile.
        twice: read it twice, and keep what agrees. Once is enough to see what accumulates over many censuses.
        within_s: seconds for each reading; beyond them it is partial.

    Raises:
        OutsideError: it cannot be read: another build, no right, or it ended.
    """
    with contextlib.ExitStack() as copies:
        return _take(pid, pause, twice, within_s, copies)


def _take(pid: int, pause: bool, twice: bool, within_s: float, copies: contextlib.ExitStack) -> OutsideCensus:
    started = time.perf_counter()
    born = _started_at(pid)
    memory = ProcessMemory(pid)
    copies.callback(memory.release)
    files = SharedFiles(pid, memory.mappings)
    if not any(_TORCH_FILES in mapping.path for mapping in memory.mappings):
        raise OutsideError(f"process {pid} has not loaded torch: it has no tensors to list")
    if not _has_torch():
        raise files.other_build("this Python has no torch, whose layout is measured here")
    layout, found, torch = _own_build()
    files = SharedFiles(pid, memory.mappings)  # what the measuring has loaded is there now
    files.require(files.own_files(*libraries()), "torch")

    def read(source: RemoteMemory, before: RemoteReading | None = None) -> RemoteReading:
        deadline = time.monotonic() + within_s
        with collector_paused():  # it would take a seventh of the time
            heap = RemoteHeap(source, layout, files.theirs, None if before is None else before.heap)
            tracked = None if before is None else before.tracked
            return read_once(
                heap, found, torch, files.theirs, pid, lambda: time.monotonic() > deadline, tracked
            )

    memory.read_ahead(memory.own_chunks())
    at = time.monotonic()
    second = first = read(memory)
    moved: dict[tuple[str, int], int] | None = None
    stopped_s, complete, full = 0.0, False, memory.full
    if twice or pause:
        wanted = memory.asked()
        again = ProcessMemory(pid)
        copies.callback(again.release)
        if pause:
            with paused(pid, lambda: again.make_room(len(wanted))) as stop:
                complete = stop.copy(again, wanted)
            stopped_s = stop.seconds
        else:
            again.read_ahead(wanted)
        at = time.monotonic()
        second, full = read(again, first), memory.full or again.full
    agreed = second
    if second is not first and not complete:
        agreed, moved = _agreed(first, second)
    if pause and not complete:
        agreed.notes.append(
            f"{PAUSE_S * 1000:.0f} ms were too short to copy the heap, so the rest was read while it ran"
        )
    if full:
        agreed.notes.append(f"a partial census: more than {MOST_BYTES >> 30} GiB had to be read")
    if _started_at(pid) != born:
        raise GoneError(f"process {pid} ended while it was read")
    return OutsideCensus(
        groups=_groups(agreed),
        storages=list(agreed.storages.values()),
        details=_details(agreed),
        at=at,
        objects=second.objects,
        nodes=second.nodes,
        moved=None if moved is None else len(moved),
        moved_bytes=sum((moved or {}).values()),
        seconds=time.perf_counter() - started,
        stopped_s=stopped_s,
        notes=agreed.notes,
    )


def read_once(
    heap: RemoteHeap,
    found: InterpreterLayout,
    torch: TorchLayout,
    translate: Translate,
    pid: int,
    is_late: Callable[[], bool],
    tracked_before: Words | None = None,
) -> RemoteReading:
    """Walk a process once, and name what holds its storages.

    Args:
        heap, torch, translate, is_late, tracked_before: as `RemoteWalk` has them.
        found: where its interpreter is.
        pid: the process, whose frames may have to be copied again.

    Raises:
        OutsideError: it cannot be read, or has no Python.
    """
    reader = TorchReader(heap, torch)
    interpreter = RemoteInterpreter(heap, found, translate)
    frames = _frames(interpreter, heap.layout, found, translate, pid)
    walk = RemoteWalk(heap, reader, interpreter, translate, frames, is_late, tracked_before)
    graph = walk.run()
    namer = RemoteNamer(graph)
    owners = owners_in(graph, namer)
    held: dict[tuple[str, int], tuple[StorageFacts, int, Owner]] = {}
    for position in graph.tensors:
        facts = reader.storage(graph.objects[position])
        if facts is None:
            continue
        owner = owners.of(position)
        key = (facts.device, facts.address)
        known = held.get(key)
        if known is not None:
            _, at, before = known
            owner = min(owner, before, key=RANK.__getitem__)
            position = position if is_native(namer.path(at).anchor) else at
        held[key] = facts, position, owner
    holders = Holders(graph, namer)
    reading = RemoteReading(
        {}, {}, set(), {}, len(graph.objects), len(graph.nodes), len(reader.unread), heap, walk.tracked
    )
    for key, (facts, position, owner) in held.items():
        path = namer.path(position)
        shared = reader.is_shared(facts)
        reading.storages[key] = StorageRecord(
            device=facts.device, address=facts.address, nbytes=facts.nbytes, owner=owner, path=path.whole,
            shared=shared,
        )  # fmt: skip
        reading.anchors[key] = path.anchor
        reading.holdings[key] = holders.of(position)
        if path.attached:
            reading.attached.add(key)
    if graph.cut is not None:
        reading.notes.append(f"a partial census: {graph.cut}")
    if interpreter.cut:
        reading.notes.append("the collector was at work: what only C++ holds may be missing")
    if interpreter.has_others():
        reading.notes.append("the process has more than one interpreter; only the main one was read")
    if reader.unread:
        count = len(reader.unread)
        reading.notes.append(
            f"what {count:,} autograd nodes of unknown types save for backward is not listed"
        )
    return reading


def _frames(
    interpreter: RemoteInterpreter,
    layout: PythonLayout,
    found: InterpreterLayout,
    translate: Translate,
    pid: int,
) -> list[tuple[int | None, Frame]]:
    """Return what runs in a process.

    Copying the heap takes a tenth of a second and more, in which its threads call and return. Where that made
    their outer frames unreachable, frames alone are copied, which takes some microseconds.
    """
    frames, whole = interpreter.frames(pid)
    for _ in range(_FRAMES_AGAIN):
        if whole:
            break
        memory = ProcessMemory(pid)
        frames, whole = RemoteInterpreter(RemoteHeap(memory, layout, translate), found, translate).frames(pid)
        memory.release()
    return frames


def _agreed(first: RemoteReading, second: RemoteReading) -> tuple[RemoteReading, dict[tuple[str, int], int]]:
    """Keep what both readings say of a storage; return that, and the bytes of the others.

    Functions are called and return meanwhile: which of them has a variable for it does not matter.
    """
    moved = {}
    for key in first.storages.keys() | second.storages.keys():
        one, two = first.storages.get(key), second.storages.get(key)
        if one is None or two is None or one.nbytes != two.nbytes or _place(one) != _place(two):
            moved[key] = max(record.nbytes for record in (one, two) if record is not None)
    agreed = RemoteReading(
        storages={key: record for key, record in second.storages.items() if key not in moved},
        anchors=second.anchors,
        attached=second.attached,
        holdings=second.holdings,
        objects=second.objects,
        nodes=second.nodes,
        unread=second.unread,
        heap=second.heap,
        tracked=second.tracked,
        notes=second.notes,
    )
    return agreed, moved


def _place(record: StorageRecord) -> HolderPath:
    """Return a storage's path; where it begins at a running function, what follows the variable there."""
    path = record.path or ()
    after = next((at + 2 for at, segment in enumerate(path[:2]) if segment.kind is SegmentKind.FRAME), 0)
    return path[after:]


def _groups(reading: RemoteReading) -> list[HolderGroup]:
    groups: dict[GroupKey, HolderGroup] = {}
    elements: dict[GroupKey, set[int]] = {}
    witnesses: dict[GroupKey, list[int]] = {}
    for key, record in reading.storages.items():
        anchor, whole = reading.anchors[key], record.path or ()
        group = groups.get((record.device, anchor))
        if group is None:
            group = groups[record.device, anchor] = HolderGroup(
                device=record.device, anchor=anchor, path=whole, count=0, nbytes=0,
                by_path={}, owners={}, attached=False,
            )  # fmt: skip
        group.count += 1
        group.nbytes += record.nbytes
        group.by_path[whole] = group.by_path.get(whole, 0) + record.nbytes
        group.owners[record.owner] = group.owners.get(record.owner, 0) + record.nbytes
        group.attached = group.attached or key in reading.attached
        holding = reading.holdings[key]
        group.holders[holding.holder] = group.holders.get(holding.holder, 0) + record.nbytes
        elements.setdefault(group.key, set()).add(holding.element)
        witnesses.setdefault(group.key, []).append(record.address)
    for group in groups.values():
        group.entries = len(elements[group.key])
        group.witnesses = frozenset(witnesses[group.key])
        group.path = max(group.by_path, key=lambda path: group.by_path[path])
    return sorted(groups.values(), key=lambda group: -group.nbytes)


def _details(reading: RemoteReading) -> dict[GroupKey, GroupDetail]:
    details: dict[GroupKey, GroupDetail] = {}
    for key, record in reading.storages.items():
        holding = reading.holdings[key]
        group = (record.device, reading.anchors[key])
        if group not in details:
            details[group] = GroupDetail(holder_kind=holding.kind, bound=holding.bound, shared=record.shared)
    return details


def _started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks: a number may be given to another process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        raise GoneError(f"process {pid} ended while it was read") from None


def _has_torch() -> bool:
    import importlib.util

    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None
