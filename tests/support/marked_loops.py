"""Training loops that mark as a session does, followed by a script of counters and holders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.census import HolderGroup
from memtriage.model.evidence import Situation
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB
from memtriage.session.schedule.investigation import Investigator
from memtriage.session.schedule.scheduler import CensusScheduler
from support.censuses import group
from support.judged import InWords, judge
from support.simulated import StandInInvestigator

LOOK: Any = object()  # what the session asks of a view; handed through
LOSSES = "losses[*]"
Held = Callable[[int], Mapping[str, int]]


class Notes(StandInInvestigator):
    """Notes what is asked of it.

    Attributes:
        held: MiB by holder, a storage each.
        recorded: positions that remained when recorders were asked for.
        stopped: how often these were switched off.
        fails: a census runs out of memory.
    """

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__(seconds)
        self.held: dict[str, int] = {}
        self.entry_bytes = {"train.texts": 65536}
        self.recorded: list[int] = []
        self.stopped = 0
        self.fails = False

    @property
    def texts(self) -> int:
        """Entries of a list of ordinary data."""
        return self.entries.get("train.texts", 0)

    @texts.setter
    def texts(self, count: int) -> None:
        self.entries["train.texts"] = count

    def groups(self) -> list[HolderGroup]:
        return [
            group(name, n * MIB, n, token=1 + at) for at, (name, n) in enumerate(sorted(self.held.items()))
        ]

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        self.recorded.append(remaining)

    def stop(self) -> None:
        self.stopped += 1

    def follow(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            self.pause()
            raise MemoryError
        return super().follow(*args, **kwargs)


class Loop:
    """A program that marks as a session does. A step takes a second."""

    def __init__(self, notes: Notes | None = None) -> None:
        self.notes = notes or Notes()
        self.found = 0
        self.evidence = Evidence()
        self.notes.observed = self.evidence.add
        self.scheduler = CensusScheduler(self.evidence, cast(Investigator, self.notes), LOOK, self._count)
        self.steps = 0
        self.microbatch = 0
        self.usual = 0
        self.now_s = 0.0
        self.readable = {"cpu": True}
        self._stepped = False

    def _count(self) -> None:
        self.found += 1

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(
            step=self.steps, microbatch=self.microbatch, microbatches_per_step=self.usual,
            at_step_end=self._stepped, time_s=self.now_s,
        )  # fmt: skip

    def backward(self, **counters: int) -> None:
        self.microbatch = 1 if self._stepped else self.microbatch + 1
        self._stepped = False
        self.scheduler.at_mark("backward", self.position, counters)

    def step(self, **counters: int) -> None:
        self.steps += 1
        self.now_s += 1
        self.usual, self._stepped = self.microbatch, True
        self.scheduler.at_mark("step", self.position, counters)

    def train(self, steps: int, held: Held, malloc: Callable[[int], float] | None = None) -> Loop:
        """So many steps of one backward.

        Args:
            held: MiB by holder after a step.
            malloc: MiB that malloc's counter shows then; what is held where it is None.
        """
        for step in range(self.steps + 1, self.steps + 1 + steps):
            self.backward(cpu=self._in_use(malloc, step - 1))
            self.notes.held = dict(held(step))
            self.step(cpu=self._in_use(malloc, step))
        return self

    def _in_use(self, malloc: Callable[[int], float] | None, step: int) -> int:
        grown = sum(self.notes.held.values()) if malloc is None else malloc(step)
        return round((100 + grown) * MIB)

    def time(self, seconds: float, *, works: bool = True, **counters: int) -> None:
        self.now_s += seconds
        self.scheduler.at_mark("time", self.position, counters, works=works)

    def judged(self) -> InWords:
        self.evidence.add(Situation(position=self.position, readable=self.readable))
        return judge(self.evidence)

    def leaks(self) -> list[Finding]:
        return self.judged().findings

    def proven(self) -> dict[str, int]:
        """Bytes a step by proven leak."""
        return {
            str(leak.holder): leak.bytes_per_step or leak.bytes_per_microbatch or leak.bytes_per_second or 0
            for leak in self.leaks()
            if leak.certainty == "proven"
        }


def leaking(step: int) -> dict[str, int]:
    return {LOSSES: step}


def nothing(step: int) -> dict[str, int]:
    return {"model": 50}


def taken(loop: Loop) -> list[float]:
    return [line.at(loop.evidence.main.scale) for _, line in loop.notes.took]
