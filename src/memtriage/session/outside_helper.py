"""A process of the watch that reads the objects of the job's other processes, so that none of them waits.

Requests come over a socket that is its standard input, each with the memory of the process that it is about:
the program is the ancestor of that process, and may open what this one may not. Answers go to its standard
output, as lines of JSON. It is no child of the program, which sees no other process and waits for none.
"""

from __future__ import annotations

import gc
import math
import os
import select
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from memtriage.model.paths import HolderPath
from memtriage.observe.process_tree import sizes_of
from memtriage.outside.census import JobReader, RemoteReading, joined, own_build
from memtriage.outside.containers import RemoteContainers
from memtriage.outside.followed import FollowedOutside
from memtriage.outside.memory import GoneError, OutsideError
from memtriage.process.stdlib import time
from memtriage.session.outside_reader import ReadReply, ReadRequest

_NICE: Final = 1
_DIE_FIRST: Final = "1000"
_LINES_OF: Final = 4
"""Holders, the largest first, whose storing line is looked for."""
_FAILED_S: Final = 0.5
"""What a reading that failed counts as: the next one follows as after any other."""
_COUNTED_EVERY_S: Final = 0.25


@dataclass(slots=True)
class _LoopCounter:
    """A whole number in a variable, that rises again and again.

    Attributes:
        last: its value.
        total: how far it has risen, also after it began again.
        changes: how often it was seen to change.
        unit: the largest number that all its rises are multiples of.
    """

    last: int
    total: int = 0
    changes: int = 0
    unit: int = 0

    def add(self, value: int) -> None:
        """Take the next reading."""
        if value != self.last:
            more = value - self.last if value > self.last else value
            self.total += more
            self.unit = math.gcd(self.unit, more)
            self.changes += 1
            self.last = value


@dataclass(slots=True)
class ReadProcess:
    """One process that is read again and again."""

    pid: int
    opened: int
    reader: JobReader
    containers: RemoteContainers
    followed: FollowedOutside = field(default_factory=FollowedOutside)
    reading: RemoteReading | None = None
    counts: bool = False
    trains: bool = False
    running: bool = False
    counters: dict[tuple[str, str], _LoopCounter] = field(default_factory=dict)
    lines: dict[HolderPath, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, request: ReadRequest, opened: int) -> ReadProcess:
        """Begin with a process, whose `/proc/PID/mem` is open.

        Raises:
            OutsideError: it cannot be read.
        """
        containers = RemoteContainers(request.root)
        reader = JobReader(request.pid, containers=containers, opened=opened)
        return cls(request.pid, opened, reader, containers)

    def close(self) -> None:
        """Release the copies of its memory."""
        self.reader.close()
        os.close(self.opened)

    def read(self) -> ReadReply:
        """Read what the program itself holds.

        Raises:
            OutsideError: it cannot be read.
        """
        started, before = time.process_time(), self.reading
        earlier = self._counted()
        if before is None:
            reading = self.reading = self.reader.read(program_only=True)
        else:
            reading = self.reader.read_again(before, gradients=False)
            before.chunks = reading.chunks
        self.trains = self.trains or reading.trains
        if sizes_of(self.pid) is None:
            raise GoneError(f"the memory of process {self.pid} was freed while it was read")
        census = self.followed.add(joined([reading]), reading.at, reading.data, program_only=True)
        ran, self.running = self.running, self.reader.runs_program()
        if ran and not self.running:  # its functions have returned, and what their variables had is gone
            census.between = False
        largest = sorted(census.holders, key=lambda seen: -seen.size)[:_LINES_OF]
        files = reading.modules.files_of([])
        for seen in largest if before is not None else ():
            if seen.detail is not None:
                if seen.anchor not in self.lines:
                    self.lines[seen.anchor] = self.containers.stored_at(seen.anchor, files)
                seen.detail.stored_at = self.lines[seen.anchor]
        if before is not None:
            self.reader.release(reading)
        return ReadReply(
            self.pid, reading.at, time.process_time() - started, census,
            _between(earlier, self._counted(), reading.at),
        )  # fmt: skip

    def steps(self) -> int | None:
        """Return the passes of the loop that trains so far, by the variable that counts them."""
        if not self.trains:
            return None
        ones = [each for each in self.counters.values() if each.changes >= 3 and each.unit == 1]
        return max((each.total for each in ones), default=None)

    def count(self) -> ReadReply | None:
        """Return how often its loop has run, and its size; None where no loop is known."""
        at, steps = self._counted()
        sizes = sizes_of(self.pid)
        if steps is None or sizes is None:
            return None
        return ReadReply(self.pid, at, steps=steps, anonymous=sizes.anonymous)

    def _counted(self) -> tuple[float, int | None]:
        """Read the whole numbers in the variables of the program's running functions."""
        at = time.monotonic()
        for name, number in self.reader.numbers() if self.counts else ():
            if name in self.counters:
                self.counters[name].add(number)
            else:
                self.counters[name] = _LoopCounter(number)
        return at, self.steps()


def _between(earlier: tuple[float, int | None], later: tuple[float, int | None], at: float) -> int | None:
    """Return the steps at a time between two counts; None where these are not known."""
    (start, fewer), (end, more) = earlier, later
    if fewer is None or more is None or end <= start:
        return None
    return round(fewer + (more - fewer) * min(1.0, max(0.0, (at - start) / (end - start))))


def answer_all() -> None:
    """Answer requests until there are no more."""
    followed: dict[int, ReadProcess] = {}
    requests = socket.socket(fileno=0)
    while True:
        counted = [each for each in followed.values() if each.counts]
        ready = select.select([0], [], [], _COUNTED_EVERY_S if counted else None)[0]
        if ready:
            data, opened, _, _ = socket.recv_fds(requests, 1 << 16, 1)
            if not data:
                return
            _answer(msgspec.json.decode(data, type=ReadRequest), opened[0], followed)
        for each in counted:
            with suppress(Exception):  # as in `_answer`
                if (reply := each.count()) is not None:
                    _say(reply)


def _answer(request: ReadRequest, opened: int, followed: dict[int, ReadProcess]) -> None:
    for pid in [pid for pid in followed if sizes_of(pid) is None]:
        followed.pop(pid).close()
    try:
        if request.pid in followed:
            os.close(opened)
        else:
            followed[request.pid] = ReadProcess.of(request, opened)
        each = followed[request.pid]
        each.counts = request.counts
        _say(each.read())
        gc.collect()
    except BrokenPipeError:
        raise
    except Exception as error:  # memory that changes while it is read may lead anywhere: read it again later
        final = isinstance(error, OutsideError) and not isinstance(error, GoneError)
        reason = str(error) if final else None
        _say(ReadReply(request.pid, time.monotonic(), took_s=_FAILED_S, error=reason))


def _say(reply: ReadReply) -> None:
    data = memoryview(msgspec.json.encode(reply) + b"\n")
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Leave the program's process tree, its terminal and its files, and answer_all."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in map(int, os.listdir("/proc/self/fd")):  # there may be a billion numbers
        if number > 2:
            with suppress(OSError):
                os.close(number)
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_DIE_FIRST)
    with suppress(Exception):  # an answer says why
        own_build()  # takes seconds: no request should wait for it
    with suppress(BrokenPipeError):
        answer_all()
