"""The census of another process: read several times while it runs, or once while it is stopped."""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memtriage.account.held import by_storage
from memtriage.account.native_sizes import SIZES
from memtriage.account.ownership import RANK
from memtriage.model.census import (
    GroupDetail,
    GroupKey,
    HolderGroup,
    Owner,
    StorageRecord,
    add_storage,
    counting_kept,
)
from memtriage.model.evidence import DataSeen
from memtriage.model.paths import HolderPath, SegmentKind, has, is_native
from memtriage.model.units import count, size
from memtriage.outside.containers import RemoteContainers
from memtriage.outside.gradients import Gradients, gradients_now, most_gradients
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.holders import Holders, RemoteHolding
from memtriage.outside.interpreter import (
    InterpreterLayout,
    RemoteInterpreter,
    check_self,
    measure,
    own_layout,
)
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import CHUNK, MOST_BYTES, GoneError, OutsideError, ProcessMemory, Words
from memtriage.outside.naming import RemoteNamer
from memtriage.outside.objects import Frame, RemoteHeap
from memtriage.outside.owners import owners_in
from memtriage.outside.pause import PART, PAUSE_S, paused
from memtriage.outside.python_layout import PythonLayout
from memtriage.outside.same_build import SharedFiles
from memtriage.outside.tensors import TorchReader
from memtriage.outside.torch_layout import TorchLayout, calibrate, libraries
from memtriage.outside.values import Translate
from memtriage.outside.walk import WORKER_FILE, RemoteWalk
from memtriage.process.collector import collector_paused
from memtriage.process.stdlib import time

_TORCH_FILES = "libtorch_python"
_FRAMES_AGAIN: Final = 8
"""Copies of frames alone; of a thread in the middle of a backward the first was whole in twelve of twelve."""
_READINGS: Final = 4
"""Readings at most, if something was missing in those before."""
_STOPS: Final = 4
"""Moments that are tried for a stop, of which one has all gradients."""
_LASTING: Final[tuple[Owner, ...]] = ("parameter", "buffer", "optimizer state")
"""What a step does not replace."""

Key = tuple[str, int]
"""Device and address of a storage."""


@dataclass(slots=True)
class RemoteStorage:
    """What one reading found of a storage.

    Attributes:
        record: with its owner and path.
        tensor: its C++ tensor.
        anchor: what the program itself holds it with.
        holding: what holds it in Python.
        attached: it hangs on the autograd graph.
        beyond: only libraries or C++ hold it.
        kept: bytes of its tensor objects and storage record, and of the nodes that its tensors hold.
        sure: it was read at one instant.
    """

    record: StorageRecord
    tensor: int
    anchor: HolderPath
    holding: RemoteHolding
    attached: bool
    beyond: bool
    kept: int
    sure: bool = False


@dataclass(slots=True)
class RemoteReading:
    """What one reading of a process found.

    Attributes:
        heap, torch: what it was read with.
        modules: of the process.
        at: when it was copied, in seconds of the monotonic clock.
        objects, nodes: Python objects and autograd nodes that were walked.
        chunks: numbers of the chunks that have the program's own objects.
        leaves: tensors that may have a gradient.
        storages: what was found of each.
        containers: by anchor, as `HolderGroup.containers`.
        whole: the stacks of all threads were found.
        lost: gradients that were there at other instants.
        stopped_s: how long the process was stopped for it.
        partial: why it is not complete.
        notes: what is not seen.
        data: containers of ordinary data that have grown since an earlier reading; nothing where they are
            not followed.
        trains: the program has an optimizer.
        again: it was read before.
    """

    heap: RemoteHeap
    torch: TorchReader
    modules: RemoteModules
    at: float
    objects: int = 0
    nodes: int = 0
    chunks: list[int] = field(default_factory=list)
    leaves: Words = field(default_factory=lambda: np.zeros(0, np.int64))
    storages: dict[Key, RemoteStorage] = field(default_factory=dict)
    containers: dict[HolderPath, list[int]] = field(default_factory=dict)
    whole: bool = True
    lost: int = 0
    stopped_s: float = 0.0
    partial: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: list[DataSeen] = field(default_factory=list)
    trains: bool = False
    again: bool = False

    def still(self, torch: TorchReader) -> Iterator[Key]:
        """Yield the storages that are still there, or that were read at one instant."""
        live = torch.live(np.array([one.tensor for one in self.storages.values()], np.int64))
        for (key, one), *now in zip(
            self.storages.items(), live.data.tolist(), live.sizes.tolist(), strict=True
        ):
            if one.sure or now == [key[1], one.record.nbytes]:
                yield key


@dataclass(slots=True)
class OutsideCensus:
    """A census that was read from outside.

    Attributes:
        groups: largest first, of storages that were there at the end, or at one instant. Holders are known
            by their addresses, and so are storages, which are all witnesses. `objects` of a group is not
            worked out.
        storages: their records.
        details: type and bound of the container of each group.
        at: when the last reading was copied, in seconds of the monotonic clock.
        objects, nodes: that were walked.
        moved: storages that came and went meanwhile; None where all were read at one instant.
        seconds: that reading took; the process went on.
        stopped_s: how long it was stopped; 0 without a pause.
        missing: what is incomplete; nothing where the census is complete.
        notes: what else is to be known.
    """

    groups: list[HolderGroup]
    storages: list[StorageRecord]
    details: dict[GroupKey, GroupDetail]
    at: float
    objects: int
    nodes: int
    moved: int | None
    seconds: float
    stopped_s: float
    missing: list[str]
    notes: list[str]


@functools.cache
def own_build() -> tuple[PythonLayout, InterpreterLayout, TorchLayout]:
    """Measure and check this process's Python and torch, once."""
    layout = own_layout()
    found = measure(layout)
    check_self(layout, found)
    return layout, found, calibrate()


def take_census(
    pid: int, *, pause: bool = False, pause_s: float = PAUSE_S, within_s: float = 60.0
) -> OutsideCensus:
    """Take a census of a process that was not prepared for it.

    Args:
        pid: the process: of the same builds of Python and torch as this one.
        pause: stop it, and copy what changes meanwhile. Else it is read twice, and again if something is
            missing.
        pause_s: the longest that it is stopped.
        within_s: seconds for each reading; beyond them it is partial.

    Raises:
        OutsideError: it cannot be read: another build, no right, or it ended.
    """
    started = time.perf_counter()
    with JobReader(pid, within_s) as job:
        readings = [job.read()]
        if pause:
            readings.append(job.read_again(readings[0], pause_s=pause_s))
        census = joined(readings)
        while not pause and (len(readings) == 1 or (census.missing and len(readings) < _READINGS)):
            readings.append(job.read_again(readings[0]))
            census = joined(readings)
    census.seconds = time.perf_counter() - started
    return census


class JobReader:
    """Reads one process, once or several times. A context manager, which releases the copies.

    Args:
        within_s: seconds for each reading.
        containers: follows the containers of ordinary data as well; None if they do not matter.
        opened: as `ProcessMemory` has it.

    Raises:
        OutsideError: it cannot be read.
    """

    def __init__(
        self,
        pid: int,
        within_s: float = 60.0,
        containers: RemoteContainers | None = None,
        opened: int | None = None,
    ) -> None:
        self._pid, self._within_s, self._containers = pid, within_s, containers
        self._opened = opened
        self._born = _started_at(pid)
        self._copies: list[ProcessMemory] = []
        memory = self._open()
        files = SharedFiles(pid, memory.mappings)
        if not any(_TORCH_FILES in mapping.path for mapping in memory.mappings):
            raise OutsideError(f"process {pid} has not loaded torch: it has no tensors to list")
        if not _has_torch():
            raise files.other_build("this Python has no torch, whose layout is measured here")
        self._layout, self._found, self._torch = own_build()
        files = SharedFiles(pid, memory.mappings)  # what the measuring has loaded is there now
        files.require(files.own_files(*libraries()), "torch")
        self._translate = files.theirs

    def __enter__(self) -> JobReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the copies."""
        for memory in self._copies:
            memory.release()

    def _open(self) -> ProcessMemory:
        self._copies.append(ProcessMemory(self._pid, self._opened))
        return self._copies[-1]

    def release(self, reading: RemoteReading) -> None:
        """Release the copy of a reading that is not needed any more."""
        reading.heap.memory.release()
        self._copies = [memory for memory in self._copies if memory is not reading.heap.memory]

    def read(self, *, program_only: bool = False, within_s: float = math.inf) -> RemoteReading:
        """Read all of it, or what the program itself holds.

        Args:
            program_only: leave out what only libraries and C++ hold.
            within_s: seconds, if these are fewer than for any reading; beyond them it is partial.

        Raises:
            OutsideError: it cannot be read, or has no Python.
        """
        is_late, memory = self._deadline(within_s), self._open()
        if not program_only:
            memory.read_ahead(memory.own_chunks())
        return self._walked(self._reading(memory, None), is_late, program_only=program_only)

    def read_again(
        self, before: RemoteReading, *, pause_s: float = 0.0, gradients: bool = True
    ) -> RemoteReading:
        """Read what the program itself holds again.

        Args:
            before: an earlier reading.
            pause_s: seconds for which it may be stopped.
            gradients: look for the instant with most gradients.

        Raises:
            OutsideError: it cannot be read.
        """
        memory = self._open()
        memory.read_ahead(before.chunks)
        if self._containers is not None:
            self._containers.begin(memory, self._layout.size)
        reading = self._reading(memory, before)
        leaves = before.leaves if gradients else before.leaves[:0]
        found, ever = most_gradients(reading.torch, leaves, self._deadline())
        if pause_s:
            stopped, then = self._stop(reading, before, int(found.there.sum()), pause_s)
            if stopped.heap.memory.steady:
                stopped.stopped_s = reading.stopped_s
                reading, found = stopped, then
        for addresses, words in found.parts:
            reading.heap.memory.put(addresses, words)
        data = set(found.tensors.data[found.there].tolist())
        self._walked(reading, self._deadline(), program_only=True)
        reading.lost = int((ever & ~found.there).sum()) + len(data - {key[1] for key in reading.storages})
        for key, one in reading.storages.items():
            one.sure = reading.heap.memory.steady or key[1] in data
        return reading

    def _stop(
        self, running: RemoteReading, before: RemoteReading, most: int, pause_s: float
    ) -> tuple[RemoteReading, Gradients]:
        """Copy what differs between two readings while the process is stopped, when it has most gradients.

        Args:
            running: copied a moment ago.
            before: copied earlier.
            most: gradients that there are at most.
            pause_s: seconds of all stops.

        Returns:
            A reading of the copies, which are steady if all that differs was copied in time; the gradients.
        """
        memory, earlier = self._open(), before.heap.memory
        busy = [number for number in before.chunks if not running.heap.memory.agrees(earlier, number)]
        copied = -1
        for number in range(_STOPS):
            left_s = pause_s - running.stopped_s
            with paused(self._pid, lambda: memory.make_room(len(busy)), left_s) as stop:
                found = gradients_now(running.torch, before.leaves)
                if int(found.there.sum()) >= most or number == _STOPS - 1 or left_s < pause_s / 2:
                    copied = stop.copy(memory, busy)
            running.stopped_s += stop.seconds
            if copied >= 0:
                break
        if copied < len(busy):
            needed = math.ceil(1000 * pause_s * len(busy) / max(PART, copied) / 10) * 10
            running.partial.append(
                f"{1000 * pause_s:.0f} ms were too short to copy the {size(len(busy) * CHUNK)} that change: "
                f"try --pause={needed}ms"
            )
        memory.adopt(running.heap.memory)
        memory.steady = copied == len(busy)
        return self._reading(memory, before), found

    def runs_program(self) -> bool:
        """Return whether one of the program's functions runs, or the loop of a `DataLoader`'s worker."""
        return any(
            modules.is_user_file(frame.file) or frame.file.endswith(WORKER_FILE)
            for _, modules, frame in self._running_now()
        )

    def numbers(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield whole numbers in variables of what runs, by the function (or module) and the variable."""
        for heap, modules, frame in self._running_now():
            if modules.is_user_file(frame.file):
                for name, address in frame.variables or heap.variables_of_module(frame):
                    if (number := heap.number(address)) is not None:
                        yield (frame.name, name), number

    def _running_now(self) -> Iterator[tuple[RemoteHeap, RemoteModules, Frame]]:
        """Yield what runs in the process. Copies frames alone, which takes about a millisecond."""
        memory = ProcessMemory(self._pid, self._opened)
        heap = RemoteHeap(memory, self._layout, self._translate)
        modules = RemoteModules(heap)
        try:
            for _, frame in RemoteInterpreter(heap, self._found, self._translate).frames(self._pid)[0]:
                yield heap, modules, frame
        finally:
            memory.release()

    def _reading(self, memory: ProcessMemory, before: RemoteReading | None) -> RemoteReading:
        """Return a reading that has a copy, and nothing in it yet."""
        heap = RemoteHeap(memory, self._layout, self._translate, None if before is None else before.heap)
        modules = RemoteModules(heap, None if before is None else before.modules)
        return RemoteReading(
            heap, TorchReader(heap, self._torch), modules, time.monotonic(), again=before is not None
        )

    def _deadline(self, within_s: float = math.inf) -> Callable[[], bool]:
        end = time.monotonic() + min(within_s, self._within_s)
        return lambda: time.monotonic() > end

    def _walked(
        self, reading: RemoteReading, is_late: Callable[[], bool], *, program_only: bool
    ) -> RemoteReading:
        with collector_paused():  # it would take a seventh of the time
            interpreter = RemoteInterpreter(reading.heap, self._found, self._translate)
            frames, reading.whole = self._frames(interpreter, steady=reading.heap.memory.steady)
            walk_once(
                reading, interpreter, frames, self._translate, is_late, self._containers,
                program_only=program_only,
            )  # fmt: skip
        if failed := reading.heap.memory.failed:
            reading.notes.append(f"{count(failed, 'range')} of its memory were unmapped while they were read")
        if reading.heap.memory.full:
            reading.partial.append(f"more than {MOST_BYTES >> 30} GiB had to be read")
        if _started_at(self._pid) != self._born:
            raise GoneError(f"process {self._pid} ended while it was read")
        return reading

    def _frames(
        self, interpreter: RemoteInterpreter, *, steady: bool
    ) -> tuple[list[tuple[int | None, Frame]], bool]:
        """Return what runs in the process, and whether that is all.

        Copying the heap takes a tenth of a second and more, in which its threads call and return. So frames
        alone are copied, which takes some microseconds, until two copies have the same outermost one.

        Args:
            interpreter: has a copy.
            steady: it is of one instant.
        """
        frames, outermost = interpreter.frames(self._pid)
        met: set[int] = set()
        for _ in range(_FRAMES_AGAIN):
            if outermost and (steady or outermost in met):
                return frames, True
            met.add(outermost)
            memory = ProcessMemory(self._pid, self._opened)
            heap = RemoteHeap(memory, self._layout, self._translate)
            again, outermost = RemoteInterpreter(heap, self._found, self._translate).frames(self._pid)
            frames = again if outermost or len(again) > len(frames) else frames
            memory.release()
        return frames, False


def walk_once(
    reading: RemoteReading,
    interpreter: RemoteInterpreter,
    frames: Sequence[tuple[int | None, Frame]],
    translate: Translate,
    is_late: Callable[[], bool],
    containers: RemoteContainers | None = None,
    *,
    program_only: bool = False,
) -> None:
    """Walk a copy of a process once, and name what holds its storages.

    Args:
        reading: has the copy, and gets what is found.
    """
    torch = reading.torch
    walk = RemoteWalk(
        reading.heap, torch, interpreter, reading.modules, translate, frames, is_late,
        outermost_first=containers is not None,
    )  # fmt: skip
    graph = walk.run(program_only=program_only)
    namer = RemoteNamer(graph)
    found = ((position, torch.storage(graph.objects[position])) for position in graph.tensors)
    held = by_storage(found, owners_in(graph, namer), namer)
    keys = {at: key for key, one in held.items() for at in one.tensors}
    if containers is not None:
        if not reading.again:
            reading.at = time.monotonic()  # the lengths of its containers are of this instant
        reading.data = containers.add(graph, namer, translate, reading.modules)
    holders = Holders(graph, namer)
    below: dict[HolderPath, list[int]] = {}
    for key, one in held.items():
        facts, position = one.facts, one.position
        path, tensor = namer.path(position), graph.objects[position]
        record = StorageRecord(
            device=facts.device, address=facts.address, nbytes=facts.nbytes, owner=one.owner, path=path.whole,
            shared=torch.is_shared(facts),
        )  # fmt: skip
        reading.storages[key] = RemoteStorage(
            record, tensor, path.anchor, holders.of(position), path.attached or bool(torch.node(tensor)),
            beyond=position >= walk.program_end, kept=SIZES.storage_on(facts.device),
        )  # fmt: skip
        below.setdefault(path.anchor, []).append(position)
    reading.containers = {anchor: holders.containers(positions) for anchor, positions in below.items()}
    for position, key in keys.items():
        reading.storages[key].kept += SIZES.tensor + (
            SIZES.wrapper if torch.wrapper(graph.objects[position]) else 0
        )
    for position, nbytes in _kept_in_nodes(graph):
        if position in keys:
            reading.storages[keys[position]].kept += nbytes
    reading.trains = bool(graph.optimizers)
    reading.objects, reading.nodes, reading.chunks = len(graph.objects), len(graph.nodes), walk.chunks
    reading.leaves = torch.leaves(np.array([graph.objects[at] for at in graph.tensors], np.int64))
    if graph.cut is not None:
        reading.partial.append(graph.cut)
    if interpreter.cut and not program_only:
        reading.notes.append("the collector was at work: what only C++ holds may be missing")
    if interpreter.has_others():
        reading.notes.append("the process has more than one interpreter; only the main one was read")
    if torch.unread:
        count = len(torch.unread)
        reading.notes.append(
            f"what {count:,} autograd nodes of unknown types save for backward is not listed"
        )


def _kept_in_nodes(graph: RemoteGraph) -> Iterator[tuple[int, int]]:
    """Yield the objects that hold autograd nodes, and the bytes of the nodes that each holds first."""
    nodes = np.array(graph.nodes, np.int64)
    parents = np.array(graph.parents, np.int64)
    holder = np.arange(len(parents))
    holder[nodes] = parents[nodes]
    while not np.array_equal(holder, above := holder[holder]):
        holder = above
    holders, which = np.unique(holder[nodes], return_inverse=True)
    objects = np.array(graph.objects, np.int64)
    nbytes = np.bincount(which, graph.torch.node_bytes(objects[nodes]), len(holders))
    yield from zip(holders.tolist(), nbytes.astype(np.int64).tolist(), strict=True)


def joined(readings: Sequence[RemoteReading]) -> OutsideCensus:
    """Return what is there according to one reading or several, the first of which is of all.

    Storages are compared, not their paths: a step of the optimizer has its states in variables, too. Of two
    records that of the stronger owner counts, then that of a holder in Python, then the later one. Gradients
    are those of the last reading. If that is of one instant, so is all that it does not leave out.
    """
    first, last = readings[0], readings[-1]
    chosen: dict[Key, tuple[tuple[int, bool, int], RemoteStorage]] = {}
    for number, reading in enumerate(readings):
        for key in reading.still(last.torch):
            one = reading.storages[key]
            replaced = last.heap.memory.steady or has(one.record.path or (), SegmentKind.GRADIENT)
            if replaced and reading is not last and not one.beyond:
                continue
            weight = min(RANK[one.record.owner], RANK["garbage"]), is_native(one.anchor), -number
            if key not in chosen or weight < chosen[key][0]:
                chosen[key] = weight, one
    found = [one for _, one in chosen.values()]
    gone = {
        key: one.record for reading in readings for key, one in reading.storages.items() if key not in chosen
    }
    lost = Counter(one.owner for one in gone.values() if one.owner in _LASTING)
    missing = [
        f"{count(number, name)} changed while {'it was' if number == 1 else 'they were'} read"
        for name, number in (("gradient", last.lost), *lost.items())
        if number
    ]
    if not any(reading.whole for reading in readings):
        missing.append("what runs in the main thread could not be read")
    return OutsideCensus(
        groups=_groups(found, first.containers | last.containers),
        storages=[one.record for one in found],
        details={(one.record.device, one.anchor): _detail(one) for one in reversed(found)},
        at=last.at,
        objects=first.objects,
        nodes=last.nodes,
        moved=None if last.heap.memory.steady else len(gone),
        seconds=0.0,
        stopped_s=sum(reading.stopped_s for reading in readings),
        missing=[*missing, *dict.fromkeys((*first.partial, *last.partial))],
        notes=list(dict.fromkeys((*first.notes, *last.notes))),
    )


def _groups(found: Iterable[RemoteStorage], containers: dict[HolderPath, list[int]]) -> list[HolderGroup]:
    groups: dict[GroupKey, HolderGroup] = {}
    members: dict[GroupKey, list[RemoteStorage]] = {}
    for one in found:
        group = add_storage(groups, one.record, one.anchor, attached=one.attached)
        holder = one.holding.holder
        group.holders[holder] = group.holders.get(holder, 0) + one.record.nbytes
        members.setdefault(group.key, []).append(one)
    for group in groups.values():
        group.entries = len({one.holding.element for one in members[group.key]})
        group.witnesses = frozenset(one.record.address for one in members[group.key])
        group.containers, group.path = containers[group.anchor], group.largest_path
    counting = counting_kept(groups.values())
    for one in found:
        counting[one.anchor].kept += one.kept
    return sorted(groups.values(), key=lambda group: -group.nbytes)


def _detail(one: RemoteStorage) -> GroupDetail:
    return GroupDetail(holder_kind=one.holding.kind, bound=one.holding.bound, shared=one.record.shared)


def _started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks: a number may be given to another process.

    Raises:
        GoneError: it ended; also of one that waits for its parent, whose memory is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        fields = ["X"]
    if fields[0] in "ZX":
        raise GoneError(f"process {pid} ended while it was read")
    return fields[19]


def _has_torch() -> bool:
    import importlib.util

    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None
