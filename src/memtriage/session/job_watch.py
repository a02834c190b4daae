"""Follow the memory of the other processes of the job by role: workers, children, ranks it started."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from memtriage.account.job_ledger import job_ledger
from memtriage.diagnose.growth.estimate import FEWEST
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.roles import ITSELF, LIVING, SEGMENTS
from memtriage.diagnose.growth.track import Floats
from memtriage.model.evidence import EvidenceLine
from memtriage.model.ledger import Ledger
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB, size
from memtriage.observe.cgroup import CgroupMemory
from memtriage.observe.host import ChildSample, HostSample, dev_shm
from memtriage.observe.loaders import Epoch
from memtriage.observe.process_tree import (
    Named,
    children_of_program,
    command_of,
    descendants,
    is_helper,
    is_worker,
    parent_of,
    sizes_of,
    started_at,
    unmapped_segments,
)
from memtriage.process.stdlib import os, threading, time
from memtriage.session.outside_reader import OutsideReader, ReadReply, ReadRequest

_MOST_ROLES: Final = 256
_COMMAND: Final = 60
"""Characters of a command line that name a process."""


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """How often the processes are read.

    Attributes:
        apart_s: least seconds between two readings at first: a run of a few seconds needs enough of them.
        later_s: the same once the run has gone on for a hundred times as long.
        share: part of the time that readings of sizes may take, and those of `/dev/shm`, which are dearer.
        settles_s: seconds after which a new process is named: by then it has become what it will be.
        unnamed_s: the same for a worker of a loader that is not known yet.
        again: growth is estimated again when there are this many times as many readings.
        several: from so many processes on, their number is followed.
        rises: bytes by which a process must have grown to be read, and half of them lately.
        first_s: least seconds between two readings of what a process that grows holds.
        read_share: part of the time since it was first read that lies between two readings of it.
        read_cost: part of the time that readings may take, of another processor; not the first `few` that
            find more than those before: while a process starts, there is nothing to find.
    """

    apart_s: float = 0.1
    later_s: float = 1.0
    share: float = 0.01
    settles_s: float = 0.25
    unnamed_s: float = 10.0
    again: float = 1.2
    first_s: float = 0.5
    read_share: float = 0.3
    read_cost: float = 0.1
    few: int = 6
    several: int = 4
    rises: int = 2 * MIB


POLICY: Final = JobPolicy()


@dataclass(slots=True)
class _JobProcess:
    """One process.

    Attributes:
        pid, started: which one.
        named: what it is; None before that is known, and of a process that only serves others.
        first_s, last_s: when it was first and last seen.
    """

    pid: int
    started: int | None
    first_s: float
    last_s: float
    named: Named | None = None


@dataclass(slots=True)
class _RoleReading:
    """What is read of a role that grows.

    Attributes:
        pid: of the process that is read.
        first_s, due_s: when it was first read, and is to be read again.
        asked: a reading has been asked for that has not come yet.
        most: bytes that were held at one, the most so far.
        taken: how many have come that found more than those before.
        base, highest: what is added to the numbers that holders have in its process, and the highest so far:
            another process begins again with 1.
        risen: bytes by which it has grown lately.
        estimate_at: readings of its size at which its growth is estimated again.
    """

    pid: int = 0
    first_s: float | None = None
    due_s: float = 0.0
    asked: bool = False
    most: int = 0
    taken: int = 0
    base: int = 0
    highest: int = 0
    risen: float = 0.0
    estimate_at: float = 0.0


@dataclass(slots=True)
class JobWatch:
    """Reads the sizes of all processes below this one, in the sampler's thread.

    Attributes:
        evidence: gets what is read, by role, while `lock` is held.
        lock: held while evidence of roles is added or judged.
        ledger: the latest of the whole job; None while there are no other processes.

    Args:
        evidence: of the run.
        now: returns where training stands, with the time.
        root: folder of the program's script.
        write: takes lines of the record.
    """

    evidence: Evidence
    now: Callable[[], TrainingPosition]
    root: str | None
    write: Callable[[EvidenceLine], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    ledger: Ledger | None = None
    _shared_at_first: int | None = None
    _living: tuple[TrainingPosition, int] | None = None
    _processes: dict[int, _JobProcess] = field(default_factory=dict)
    _loaders: list[tuple[Epoch, dict[int, Named]]] = field(default_factory=list)
    _unnamed: set[int] = field(default_factory=set)
    _due_s: float = 0.0
    _segments_due_s: float = 0.0
    _reader: OutsideReader = field(default_factory=OutsideReader)
    _readings: dict[str, _RoleReading] = field(default_factory=dict)
    _positions: deque[tuple[float, TrainingPosition]] = field(default_factory=lambda: deque(maxlen=4096))

    def passes(self, epoch: Epoch) -> None:
        """Take a pass over a loader that begins: it names its workers."""
        group = f"workers of {epoch.name}"
        named = {
            pid: Named("worker", group, f"worker {place} of {epoch.name}")
            for place, pid in enumerate(epoch.workers)
        }
        if named:
            self._loaders = [*self._loaders[-7:], (epoch, named)]

    def at_mark(self, position: TrainingPosition) -> None:
        """Note when the program was where, while there are other processes: readings come later."""
        if self._processes or not self._positions:
            self._positions.append((time.monotonic(), position))

    def at_wake(self) -> None:
        """Read the processes if that is due."""
        position = self.now()
        if position.time_s < self._due_s:
            return
        started = time.thread_time()  # waiting for the interpreter does not count
        self.at_mark(position)
        pids = descendants()
        self._read(pids, position)
        with self.lock:
            for reply in self._reader.replies():
                self._take(reply)
        self._ask(position.time_s)
        apart = min(POLICY.later_s, max(POLICY.apart_s, POLICY.share * position.time_s))
        self._due_s = position.time_s + max(apart, (time.thread_time() - started) / POLICY.share)
        if pids and position.time_s >= self._segments_due_s:
            started = time.thread_time()
            with self.lock:
                self._add_segments(pids, position)
            self._segments_due_s = position.time_s + max(apart, (time.thread_time() - started) / POLICY.share)

    def stop(self) -> None:
        """Take what has been read by now, and let the reading process end."""
        with self.lock:
            for reply in self._reader.replies():
                self._take(reply)
        self._reader.stop()

    # --- reading what grows ---------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Ask for readings of what grows, those of one process for each kind of work."""
        for role, pid in self._to_read():
            reading, about = self._readings[role], self.evidence.roles[role].role
            assert about is not None
            if reading.asked or now < reading.due_s:
                continue
            if pid != reading.pid:
                reading.pid, reading.first_s, reading.base = pid, None, reading.highest
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                about.unread = self._reader.ask(ReadRequest(pid, self.root, counts=not self.now().step))
                reading.asked = about.unread is None

    def _to_read(self) -> list[tuple[str, int]]:
        """Return the roles that grow and are to be read, each with its process."""
        chosen: dict[str, tuple[float, bool, str, int]] = {}
        for process in self._processes.values():
            if process.named is None:
                continue
            role = process.named.role
            evidence, reading = self.evidence.roles[role], self._readings.setdefault(role, _RoleReading())
            if evidence.role is None or evidence.role.unread is not None:
                continue
            track = evidence.run["second"].tracks.get("cpu")
            if track is not None and track.readings >= reading.estimate_at:
                reading.estimate_at = track.readings * POLICY.again
                reading.risen = _risen_lately(track.points().floors)
                if reading.risen and not reading.pid:
                    reading.pid = -1
            if reading.pid:
                known = chosen.get(process.named.group)
                # While they start, all rise. Another than the one that is read has to rise twice as fast.
                is_read = reading.pid > 0
                rank = -reading.risen * (1 + is_read), not is_read, role, process.pid
                chosen[process.named.group] = rank if known is None else min(known, rank)
        return [(role, pid) for _, _, role, pid in chosen.values()]

    def _take(self, reply: ReadReply) -> None:
        """Take a reading that was asked for."""
        found = next(((role, each) for role, each in self._readings.items() if each.pid == reply.pid), None)
        if found is None:
            return
        role, reading = found
        evidence = self.evidence.roles[role]
        if evidence.role is not None:
            evidence.role.unread = reply.error
        near_s, position = min(list(self._positions), key=lambda each: abs(each[0] - reply.at))
        position = replace(position, time_s=max(0.0, position.time_s + reply.at - near_s))
        if reply.steps is not None and not position.step:
            position = replace(position, step=reply.steps)
            if reply.anonymous is not None:
                evidence.run["step"].read(reply.steps, {"cpu": reply.anonymous})
        if reply.census is not None:
            census = replace(
                reply.census,
                position=position,
                work_s=position.time_s,
                role=role,
                holders=[replace(seen, id=seen.id + reading.base) for seen in reply.census.holders],
                data=[replace(seen, id=seen.id + reading.base) for seen in reply.census.data],
                gone=[number + reading.base for number in reply.census.gone],
            )
            holders, data = (seen.id for seen in census.holders), (seen.id for seen in census.data)
            reading.highest = max([reading.highest, *holders, *data])
            self.evidence.add(census)
            self.write(census)
            held = sum(seen.size for seen in census.holders)
            held += sum(seen.entries * seen.entry_bytes for seen in census.data)
            reading.taken += held > reading.most
            reading.most = max(held, reading.most)
        if reply.took_s:
            now, reading.asked = self.now().time_s, False
            reading.first_s = reading.first_s or now
            cost_s = reply.took_s / POLICY.read_cost if reading.taken > POLICY.few else 0.0
            reading.due_s = now + max(POLICY.first_s, POLICY.read_share * (now - reading.first_s), cost_s)

    def _read(self, pids: list[int], position: TrainingPosition) -> None:
        with self.lock:
            self._follow(pids, position.time_s)
            if pids and not position.step and not position.backwards:
                self._add_itself(position)
            # At its end a program ends them one after the other: a reading counts if a step follows it.
            if self._living is not None and position.step > self._living[0].step:
                at, count = self._living
                if LIVING in self.evidence.roles or count >= POLICY.several:
                    self._add_always(Named("child", LIVING, LIVING), at, {"cpu": count * MIB})
            self._living = position, len(pids)
            for process in self._processes.values():
                process.last_s = position.time_s
                if process.named is not None and (sizes := sizes_of(process.pid)) is not None:
                    values = {"cpu": sizes.anonymous, "shared": sizes.shared}
                    self._add(process.named.role, process, position, values)

    def _add_itself(self, position: TrainingPosition) -> None:
        """Add a reading of this process, which may only wait for the others and make no marks."""
        sizes = sizes_of(os.getpid())
        if sizes is not None:
            values = {"cpu": sizes.anonymous, "shared": sizes.shared}
            self._add_always(Named("main", ITSELF, ITSELF), position, values)

    def _add_segments(self, pids: list[int], position: TrainingPosition) -> None:
        """Add a reading of the shared memory that is mapped nowhere, once `/dev/shm` has begun to fill."""
        space = dev_shm()
        if space is None:
            return
        first = space.used if self._shared_at_first is None else self._shared_at_first
        self._shared_at_first = min(space.used, first)
        if SEGMENTS in self.evidence.roles or space.used - self._shared_at_first >= POLICY.rises:
            unmapped = unmapped_segments([os.getpid(), *pids])
            self._add_always(Named("child", SEGMENTS, SEGMENTS), position, {"cpu": unmapped})

    def _add_always(self, named: Named, position: TrainingPosition, values: dict[str, int]) -> None:
        """Add a reading of a role that no process below this one has."""
        if named.role not in self.evidence.roles:
            self._enter(named)
        self._add(named.role, _JobProcess(os.getpid(), None, 0.0, position.time_s, named), position, values)

    def _add(
        self, role: str, process: _JobProcess, position: TrainingPosition, values: dict[str, int]
    ) -> None:
        of_role = self.evidence.of_role(role)
        about = of_role.role
        assert about is not None
        about.lived_s = max(about.lived_s, round(process.last_s - process.first_s, 3))
        about.highest = max(about.highest, values["cpu"])
        if position.step:
            of_role.run["step"].read(position.step, values)
        elif position.backwards:
            of_role.run["microbatch"].read(position.backwards, values)
        of_role.run["second"].read(position.time_s, values)

    def at_sample(self, own: HostSample, below: list[ChildSample], group: CgroupMemory | None) -> None:
        """Take the ledger of the job; the last one with other processes counts."""
        if below:
            work = {pid: each.named.group for pid, each in list(self._processes.items()) if each.named}
            self.ledger = job_ledger(own, below, dev_shm(), group, work)
            self.ledger.step = self.now().step
            with self.lock:
                self._describe_living(below, work)

    def _describe_living(self, below: list[ChildSample], work: dict[int, str]) -> None:
        """Note what all processes together are, and what each has of its own, if their number is followed."""
        living = self.evidence.roles.get(LIVING)
        if living is None or living.role is None or (len(below) + 1) * MIB < living.role.highest:
            return  # while others end, pages that they shared become a process's own
        (name, most), *_ = Counter(work.get(child.pid, child.name) for child in below).most_common(1)
        each = sum(child.uss or child.rss or 0 for child in below) // len(below)
        living.role.each = each
        living.role.unread = f"{len(below):,} now, {most:,} of them {name}, each with {size(each)} of its own"

    def lines(self, *, last: bool = False) -> Iterator[EvidenceLine]:
        """Yield what is new, for the record; `last` as for `Comparison.new_readings`."""
        for name, of_role in self.evidence.roles.items():
            if of_role.role is not None:
                yield of_role.role
            for comparison in of_role.run.values():
                for line in comparison.new_readings(last=last):
                    yield replace(line, role=name)

    # --- which process is what ------------------------------------------------------------------------------

    def _follow(self, pids: list[int], now: float) -> None:
        """Keep the processes that still live, and name those that have lived long enough."""
        if self._processes.keys() - set(pids) or len(pids) > len(self._processes):
            alive = {pid: self._processes[pid] for pid in pids if pid in self._processes}
            alive = {pid: process for pid, process in alive.items() if started_at(pid) == process.started}
            new = {pid: _JobProcess(pid, started_at(pid), now, now) for pid in pids if pid not in alive}
            self._processes = alive | new
            self._unnamed |= new.keys()
        self._unnamed &= self._processes.keys()
        settled = now - POLICY.settles_s
        due = sorted(pid for pid in self._unnamed if self._processes[pid].first_s <= settled)
        names: dict[int, Named] = {}
        for pid, named in children_of_program() if due else ():
            names.setdefault(pid, named)
        for pid in due:
            process = self._processes[pid]
            of_loader = next((named[pid] for _, named in self._loaders if pid in named), None)
            own_worker = is_worker(pid) and parent_of(pid) == os.getpid()
            if of_loader is None and own_worker and now - process.first_s < POLICY.unnamed_s:
                continue
            self._unnamed.discard(pid)
            process.named = of_loader or self._named(pid, names.get(pid))
            if process.named is not None:
                self._enter(process.named)
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe"):
                        self._reader.start()

    def _named(self, pid: int, named: Named | None) -> Named | None:
        """Return what a process is that is not the worker of a loader; None where that does not matter."""
        if is_helper(pid):
            return None
        taken = {process.named.role for process in self._processes.values() if process.named is not None}
        above = None if named is not None else self._processes.get(parent_of(pid) or 0)
        if above is not None and above.named is not None:
            one, several = ("worker", "workers") if is_worker(pid) else ("process", "processes")
            roles = (f"{one} {n} of {above.named.role}" for n in range(_MOST_ROLES))
            free = next((role for role in roles if role not in taken), "")
            named = Named("child", f"{several} of {above.named.group}", free)
        if named is None:
            short = " ".join("/".join(part.split("/")[-2:]) for part in command_of(pid).split())
            named = Named("child", short[:_COMMAND] or "a process without a name", "")
        if named.role:
            return named
        one = named.group.removesuffix(" processes")
        places = (one if named.group == one and not n else f"{one} {n}" for n in range(_MOST_ROLES))
        role = next((role for role in places if role not in taken), None)
        return None if role is None else Named(named.where, named.group, role)

    def _enter(self, named: Named) -> None:
        about = self.evidence.of_role(named.role).role
        assert about is not None
        about.processes += about.group != ""
        about.where, about.group = named.where, named.group


def _risen_lately(floors: Floats) -> float:
    """Return the bytes by which sizes have risen lately; 0 if they are not worth a first reading.

    They are long before growth is certain.
    """
    if len(floors) < FEWEST:
        return 0.0
    half = float(floors[-1] - floors[len(floors) // 2])
    return half if floors[-1] - floors[0] >= POLICY.rises and half >= POLICY.rises / 2 else 0.0
