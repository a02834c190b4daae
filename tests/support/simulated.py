"""Training loops on paper: counters and holders by position, driven through plan, history, proof and judge.

Everything that decides is the real code. Only the census is a stand-in, which answers from a script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.settings import MIN_BLOCK
from memtriage.diagnose.growth.holders import AwaitingCollector, GrowingData
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.trend import detection_limit
from memtriage.diagnose.judge import ScaleEvidence
from memtriage.diagnose.verdict import verdict
from memtriage.model.census import GroupDetail, HolderGroup
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule import scale
from memtriage.session.schedule.investigation import Investigation, Investigator
from memtriage.session.schedule.judgment import find_leaks, judge_devices
from memtriage.session.schedule.scheduler import CensusScheduler
from support.censuses import group, point
from support.paths import named

Series = NDArray[np.float64]


class StandInInvestigator:
    """Stands in for an `Investigator`: its censuses find the groups that the test states.

    Attributes:
        seconds: that censuses have taken.
        entries: of containers of ordinary data, by name.
        entry_bytes: of one of these entries, by name.
        bounds: entries at which a holder's container stops growing, by name of the holder.
        took: positions of censuses, `(scale, position)`.
        between: whether each was taken between two positions.
        looks: what each census was asked to do with its view.
        libraries: whether each was to walk all libraries.
    """

    recording = False

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = 0.0
        self.entries: dict[str, int] = {}
        self.entry_bytes: dict[str, int] = {}
        self.bounds: dict[str, int] = {}
        self.took: list[tuple[str, float]] = []
        self.between: list[bool] = []
        self.looks: list[object] = []
        self.libraries: list[bool] = []
        self._each_s = seconds
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def groups(self) -> list[HolderGroup]:
        """What a census finds now."""
        raise NotImplementedError

    def census(self, position: float, also: object = None, frames: object = None) -> CensusPoint:
        self.took.append(("none", position))
        return self.point(position, frames)

    def follow(
        self, investigation: Investigation, position: float, also: object = None, frames: object = None,
        *, between: bool = True, libraries: bool = False, training: TrainingPosition | None = None,
    ) -> CensusPoint:  # fmt: skip
        self.took.append((investigation.scale, position))
        self.between.append(between)
        self.looks.append(also)
        self.libraries.append(libraries)
        census_point = self.point(position, frames)
        investigation.history.add(census_point, between=between and frames is None)
        investigation.taken.append(position)
        investigation.waiting.append(AwaitingCollector(position, {}))
        totals: dict[str, int] = {}
        for holder in census_point.census.groups:
            blocks = MIN_BLOCK * holder.count if holder.device.startswith("cuda:") else 0
            taken = max(holder.nbytes, blocks) + holder.kept
            totals[holder.device] = totals.get(holder.device, 0) + taken
        investigation.totals.append((position, totals))
        investigation.collector_off = False
        for growth in investigation.growing():
            bound = self.bounds.get(growth.group.anchor[0].name)
            investigation.details[growth.key] = GroupDetail(bound=bound)
        investigation.data.containers = dict(self._grown(position))
        return census_point

    def _grown(self, position: float) -> Iterator[tuple[int, GrowingData]]:
        for number, (name, count) in enumerate(self.entries.items()):
            seen = self._seen.setdefault(name, [])
            if seen and count < seen[-1][1]:
                seen.clear()
            if len(seen) == 1 and count == seen[0][1]:
                seen.clear()
            if not seen or count > seen[-1][1]:
                seen.append((position, count))
            if len(seen) < 2:
                continue
            growing = GrowingData(named(f"{name}[*]"), "list", None, self.entry_bytes[name], tuple(seen))
            if growing.pauses(position):
                yield number, growing
            else:
                seen[:] = [(position, count)]

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        """Allocation sites: of no interest here."""

    def stop(self) -> None:
        """Recorders off."""

    def point(self, position: float, frames: object) -> CensusPoint:
        self.seconds += self._each_s
        return point(position, *self.groups(), interrupted=frames is not None)


def clock(investigator: StandInInvestigator) -> Any:
    """A stand-in for `time`: its clocks are at the seconds that censuses took."""

    def seconds() -> float:
        return investigator.seconds

    return SimpleNamespace(perf_counter=seconds, thread_time=seconds)


@contextmanager
def clock_of(investigator: StandInInvestigator) -> Iterator[None]:
    """Make censuses take as long as the stand-in states."""
    real, scale.time = scale.time, clock(investigator)
    try:
        yield
    finally:
        scale.time = real


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
    investigator = _AtIteration(program)
    look: Any = object()
    scheduler = CensusScheduler(cast(Investigator, investigator), look, lambda: None)
    values = counters(program)
    with clock_of(investigator):
        position = TrainingPosition(step=0, microbatch=0, microbatches_per_step=0, time_s=0.0)
        for iteration, time_s in _marks(program):
            investigator.at(iteration)
            read = {name: int(series[iteration]) for name, series in values.items()}
            time_s += investigator.seconds  # the clock goes on during a census
            if program.by_time:
                position = TrainingPosition(step=0, microbatch=0, microbatches_per_step=0, time_s=time_s)
                scheduler.at_mark("time", position, read)
            else:
                position = TrainingPosition(
                    step=iteration + 1, microbatch=1, microbatches_per_step=1, at_step_end=True, time_s=time_s
                )
                scheduler.at_mark("step", position, read)
        scheduler.main.end(position, None)
    main = scheduler.main
    estimates = {name: counter.estimate() for name, counter in main.counters.items()}
    findings = find_leaks(scheduler, ScaleEvidence(main.scale, position, estimates))
    judged = judge_devices(scheduler.judged_on, {program.device: True})
    word = verdict(findings, False, judged)
    resident = main.counters["host"]
    flat = resident.estimate().state == "flat"
    limit = detection_limit(resident.track.points(), resident.policy) if flat else None
    return Outcome(word, findings, judged, [at for _, at in investigator.took], limit)


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
