"""Training loops on paper: counters and holders by position, driven through plan, history, proof and judge.

Everything that decides is the real code. Only the census is a stand-in, which answers from a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from memtriage.account.followed import Contents, changed
from memtriage.allocator.settings import MIN_BLOCK
from memtriage.diagnose.growth.estimate import detection_limit, policy_of
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.verdict import verdict
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.model.evidence import CensusSeen, DataSeen, Situation
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigation import Following, Investigator
from memtriage.session.schedule.scheduler import CensusScheduler
from support.censuses import census, group
from support.judged import judge
from support.paths import named

Series = NDArray[np.float64]


class StandInInvestigator:
    """Stands in for an `Investigator`: its censuses find the groups that the test states.

    Attributes:
        paused_s, spent_s: seconds that censuses have taken.
        entries: of containers of ordinary data, by name.
        entry_bytes: of one of these entries, by name.
        bounds: entries at which a holder's container stops growing, by name of the holder.
        took: censuses, and whether each was within a step.
        between: whether each was taken between two positions.
        looks: what each census was asked to do with its view.
        libraries: whether each was to walk all libraries.
    """

    recording = False

    def __init__(self, seconds: float = 0.1) -> None:
        self.paused_s = self.spent_s = 0.0
        self.observed: Callable[[CensusSeen], None] = lambda line: None
        self.entries: dict[str, int] = {}
        self.entry_bytes: dict[str, int] = {}
        self.bounds: dict[str, int] = {}
        self.took: list[tuple[bool, CensusSeen]] = []
        self.between: list[bool] = []
        self.looks: list[object] = []
        self.libraries: list[bool] = []
        self._each_s = seconds
        self._entries: dict[str, int] = {}
        self._followed: set[str] = set()

    def groups(self) -> list[HolderGroup]:
        """What a census finds now."""
        raise NotImplementedError

    def follow(
        self, following: Following, position: TrainingPosition, also: object = None,
        frames: object = None, *, between: bool = True,
    ) -> Census:  # fmt: skip
        line = CensusSeen(
            position=position, work_s=position.time_s - self.paused_s, within_step=following.within_step,
            between=between and frames is None, interrupted=frames is not None and between,
        )  # fmt: skip
        self.took.append((following.within_step, line))
        self.between.append(between)
        self.looks.append(also)
        self.libraries.append(following.in_libraries)
        self.pause()
        taken = census(*self.groups())
        holders = following.holders.add(taken, Contents({}, {}), between=line.between)
        for holder in taken.groups:
            blocks = MIN_BLOCK * holder.count if holder.device.startswith("cuda:") else 0
            counted = max(holder.nbytes, blocks) + holder.kept
            line.totals[holder.device] = line.totals.get(holder.device, 0) + counted
        for seen in holders:
            bound = self.bounds.get(seen.anchor[0].name)
            seen.detail = None if bound is None else GroupDetail(bound=bound)
        line.holders, line.gone = changed(holders, following.written, forget=line.between)
        line.data = list(self._grown())
        self.observed(line)
        return taken

    def pause(self) -> None:
        """Take as long as a census does."""
        self.paused_s += self._each_s
        self.spent_s = self.paused_s

    def _grown(self) -> Iterator[DataSeen]:
        for number, (name, count) in enumerate(self.entries.items()):
            before = self._entries.get(name)
            if before is not None and count >= before and (count > before or name in self._followed):
                yield DataSeen(
                    id=number, path=named(f"{name}[*]"), kind="list", entries=count,
                    entry_bytes=self.entry_bytes[name],
                    before=None if name in self._followed else before,
                )  # fmt: skip
                self._followed.add(name)
            else:
                self._followed.discard(name)
            self._entries[name] = count

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        """Allocation sites: of no interest here."""

    def stop(self) -> None:
        """Recorders off."""


# --- programs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """Something that a program keeps alive, after each iteration.

    Attributes:
        nbytes: kept.
        count: storages; entries where it is ordinary data.
        named: a census finds it; what it does not find is native.
        data: it is a container of ordinary data, which malloc's counter does not see.
        bound: entries at which its container stops growing; None where it has none that is known.
        oldest: number of its oldest storage: those before it were freed. None: nothing is ever freed.
    """

    nbytes: Series
    count: Series
    named: bool = True
    data: bool = False
    bound: int | None = None
    oldest: Series | None = None


@dataclass(frozen=True)
class Program:
    """A loop.

    Attributes:
        holders: by name.
        noise: further bytes that its counter shows after each iteration.
        at_s: seconds that have passed after each iteration.
        census_s: seconds that a census takes.
        device: `cpu` or `cuda:0`.
        by_time: it has no steps, and is followed over time.
    """

    holders: dict[str, Holder]
    noise: Series
    at_s: Series
    census_s: float
    device: str = "cpu"
    by_time: bool = False


@dataclass
class Outcome:
    """What memtriage reports of a program's growth.

    Attributes:
        verdict: of the run.
        findings: leaks, proven and suspected.
        judged: by device.
        censuses: their positions.
        resident_limit: bytes per position of the smallest leak that the resident set would show; None where
            it grows, or moves too much.
    """

    verdict: Verdict
    findings: list[Finding]
    judged: dict[str, Judged]
    censuses: list[float] = field(default_factory=list)
    resident_limit: float | None = None

    @property
    def proven(self) -> float:
        """Bytes a position of all proven growth."""
        return sum(
            finding.bytes_per_step or finding.bytes_per_microbatch or finding.bytes_per_second or 0
            for finding in self.findings
            if finding.certainty == "proven"
        )


class _AtIteration(StandInInvestigator):
    """Answers for one iteration of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.census_s)
        self.iteration = 0
        self._program = program
        for name, holder in program.holders.items():
            if holder.bound is not None:
                self.bounds[name] = holder.bound
            if holder.data:
                self.entry_bytes[name] = round(holder.nbytes[-1] / max(1.0, holder.count[-1]))

    def groups(self) -> list[HolderGroup]:
        found = []
        for token, (name, holder) in enumerate(self._program.holders.items(), 1):
            count, nbytes = int(holder.count[self.iteration]), int(holder.nbytes[self.iteration])
            if holder.named and not holder.data and count:
                device = self._program.device
                first = 0 if holder.oldest is None else int(holder.oldest[self.iteration])
                found.append(
                    group(
                        f"{name}[*]", nbytes, count, token=token, device=device, entries=count,
                        witnesses=range((token << 32) + first, (token << 32) + first + count),
                    )
                )  # fmt: skip
        return found

    def at(self, iteration: int) -> None:
        self.iteration = iteration
        self.entries = {
            name: int(holder.count[iteration])
            for name, holder in self._program.holders.items()
            if holder.data
        }


def watched(program: Program) -> Outcome:
    """Run a program on paper and return what memtriage reports of it."""
    investigator, evidence = _AtIteration(program), Evidence()
    look: Any = object()
    investigator.observed = evidence.add
    scheduler = CensusScheduler(evidence, cast(Investigator, investigator), look, lambda: None)
    values = counters(program)
    position = TrainingPosition(step=0, microbatch=0, microbatches_per_step=0, time_s=0.0)
    for iteration, time_s in _marks(program):
        investigator.at(iteration)
        read = {name: int(series[iteration]) for name, series in values.items()}
        time_s += investigator.paused_s  # the clock goes on during a census
        if program.by_time:
            position = TrainingPosition(step=0, microbatch=0, microbatches_per_step=0, time_s=time_s)
            scheduler.at_mark("time", position, read)
        else:
            position = TrainingPosition(
                step=iteration + 1, microbatch=1, microbatches_per_step=1, at_step_end=True, time_s=time_s
            )
            scheduler.at_mark("step", position, read)
    scheduler.end(position, None)
    evidence.add(Situation(position=position, readable={program.device: True}))
    judgment = judge(evidence)
    word = verdict(judgment.findings, False, judgment.judged)
    resident = judgment.counters["host"]
    flat = resident.growth.state == "flat"
    limit = detection_limit(resident.points, policy_of("host")) if flat else None
    positions = [line.at(evidence.main.scale) for _, line in investigator.took]
    return Outcome(word, judgment.findings, judgment.judged, positions, limit)


def counters(program: Program) -> dict[str, Series]:
    """Bytes by counter after each iteration: the device's, and the resident set."""
    counted: Series = 1e8 + program.noise
    data: Series = np.zeros_like(counted)
    for holder in program.holders.values():
        if holder.data:
            data = data + holder.nbytes
        else:
            counted = counted + holder.nbytes
    grain = 16 if program.device == "cpu" else 512
    counted_bytes = {program.device: np.floor(counted / grain) * grain}
    # Pages that malloc and Python's allocator have freed stay resident for the most part.
    alive = data + (counted if program.device == "cpu" else 0)
    counted_bytes["host"] = np.floor((5e8 + 0.8 * np.maximum.accumulate(alive) + 0.2 * alive) / 4096) * 4096
    return counted_bytes


def _marks(program: Program) -> Sequence[tuple[int, float]]:
    if not program.by_time:
        return list(enumerate(program.at_s.tolist()))
    times, at = [], 0.1
    while at < program.at_s[-1]:
        times.append(at)
        at += max(0.1, 0.01 * at)
    done = np.searchsorted(program.at_s, times, side="right") - 1
    return [(max(0, int(i)), t) for i, t in zip(done, times, strict=True)]
