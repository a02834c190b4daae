"""Pass the counters of marks to the census scheduler, and judge what grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from memtriage.diagnose.growth.evidence import CODE, HEAP, Evidence
from memtriage.diagnose.growth.judgment import Judgment, judge
from memtriage.model.census import Census
from memtriage.model.evidence import CensusSeen, EvidenceLine, Situation
from memtriage.model.findings import Finding
from memtriage.observe import cuda
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.events import EventCounts
from memtriage.observe.generated_code import generated_code
from memtriage.observe.host import InUse, recorded_collectives
from memtriage.observe.malloc import python_in_use
from memtriage.process.stdlib import time
from memtriage.report.growth_words import findings_of
from memtriage.session.job_watch import JobWatch
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.marks import MarkPoint, is_within_step
from memtriage.session.progress import TrainingProgress
from memtriage.session.schedule.investigation import Investigator
from memtriage.session.schedule.limits import limits_and_use
from memtriage.session.schedule.scheduler import CensusScheduler
from memtriage.session.transient_peak import TransientPeak


@dataclass(frozen=True, slots=True)
class ReadingPolicy:
    """How often the size of generated code is read, and after which marks memory of the watch may remain.

    Attributes:
        first: readings that may be close together once the program works. Each takes 1 ms, and a run of 0.1 s
            needs eight.
        first_share: part of the time that these may take.
        later_share: part of the time that all later readings may take.
        apart: part of the time since the first mark, without censuses, after which Python's memory is read
            again: 35 readings of 0.5 ms while that doubles.
        work_s: a mark that takes longer than this has done more than read counters.
        written_s: seconds between two lines of readings in the record.
    """

    first: int = 64
    first_share: float = 0.1
    later_share: float = 0.005
    apart: float = 0.02
    work_s: float = 0.5e-3
    written_s: float = 5.0


READING: Final = ReadingPolicy()


class GrowthWatch:
    """Gathers evidence of growth, and judges at any time what grows.

    Attributes:
        evidence: all that was observed, from which growth is judged.
        job: follows the other processes of the job.
        events: counts what the program does besides steps.
        scheduler: decides when to take a census.
        transient: memory that comes and goes between marks.

    Args:
        reader: of the counters.
        progress: where training stands.
        ledgers: takes the ledgers while a census is open.
        script_root: folder of the user's script, for allocation sites.
        say: takes one line of text about what takes time.
        report: takes what grows so far, whenever that may have changed.
        write: takes the evidence of growth, for the record.
        rank: whose findings they are.
        batches_vary: returns whether the program has trained on batches of several sizes; None if no variable
            with a usual name has its batches.
    """

    def __init__(
        self,
        reader: CounterReader,
        progress: TrainingProgress,
        ledgers: LedgerKeeper,
        *,
        script_root: str | None,
        say: Callable[[str], None],
        report: Callable[[list[Finding]], None],
        write: Callable[[EvidenceLine], None],
        rank: int | None,
        batches_vary: Callable[[], bool | None],
    ) -> None:
        self.evidence = Evidence()
        self.job = JobWatch(self.evidence, progress.now, script_root, write)
        self.events = EventCounts(
            lambda: progress.position.backwards + progress.position.step, reader.in_malloc
        )
        self.transient = TransientPeak()
        self._reader = reader
        self._progress = progress
        self._ledgers = ledgers
        self._batches_vary = batches_vary
        self._write = write
        self._investigator = Investigator(script_root, say, self._before_census, self._add_census)
        self.scheduler = CensusScheduler(
            self.evidence,
            self._investigator,
            ledgers.take,
            lambda: report(findings_of(self.judged(limits=False).leaks, rank)),
        )
        self._written_s = 0.0
        self._own_bytes: dict[str, int] = {}
        self._code_readings = 0
        self._code_due_s = self._heap_due_s = self._first_s = 0.0
        self._python_before: int | None = None
        self._collectives = 0
        self._readable: dict[str, bool] = {}
        self._in_use: InUse | None = None
        self._readings: Sequence[Reading] = ()

    # --- while the program runs -----------------------------------------------------------------------------

    def install(self) -> None:
        """Make ready to record, before the program runs."""
        self._investigator.sites.install()

    def in_backward(self, inside: bool) -> None:
        """Turn the recorders of allocation sites off inside a backward, and on after it."""
        if self.recording:
            self._investigator.sites.in_backward(inside)

    def at_mark(self, mark: MarkPoint) -> None:
        """Follow the counters of a mark, and take a census if one is due."""
        if mark.name != "end":  # by then the program's functions have returned, and their memory is gone
            self._in_use, self._readings = self._reader.in_use(), mark.readings
            self.transient.at_mark(mark.readings)
        for reading in mark.readings:
            readable_before = self._readable.get(reading.device, False)
            self._readable[reading.device] = reading.allocated is not None or readable_before
        self.job.at_mark(mark.position)
        if mark.name in ("step", "backward", "time"):
            before, tables = self._without_own(mark), self._investigator.sites.tables()
            values, started = self._values(mark, before), time.perf_counter()
            self.scheduler.at_mark(mark.name, mark.position, values, works=self._progress.works)
            if self._ledgers.is_due():
                self.scheduler.census(mark.position)
            if started - self._written_s > READING.written_s:
                self.write_readings()
            if time.perf_counter() - started > READING.work_s:
                tables = self._investigator.sites.tables() - tables
                self._subtract_own(before, self._investigator.sites.in_malloc(tables))

    @property
    def recording(self) -> bool:
        """Whether recorders of allocation sites run, whose tables are in malloc."""
        return self._investigator.sites.recording

    @property
    def limits(self) -> dict[str, int]:
        """Bytes at which memory runs out, by device, as of the last judgment."""
        return self.evidence.situation.limits

    def judged(self, *, limits: bool = True) -> Judgment:
        """Judge what was observed so far; arguments as `judge` has them."""
        self.evidence.add(self._situation())
        with self.job.lock:
            return judge(self.evidence, limits=limits)

    def _without_own(self, mark: MarkPoint) -> dict[str, int]:
        """Return bytes by readable counter, without what is known to be the watch's own."""
        readings = {
            reading.device: reading.allocated for reading in mark.readings if reading.allocated is not None
        }
        own = self._own_bytes
        return {
            name: value - own.get(name, 0)
            for name, value in (readings | self._resident(self._in_use)).items()
        }

    def _values(self, mark: MarkPoint, readings: Mapping[str, int]) -> dict[str, int]:
        """Return the undisturbed readings, and the size of generated code."""
        values = dict(readings)
        if self.recording:
            values.pop("cpu", None)  # malloc's counter includes the recorders of allocation sites
        if is_within_step(mark.name, mark.position):
            return values
        if "cpu" in values and (python := self._of_python()) is not None:
            values[HEAP] = values["cpu"] + python - self._own_bytes.get(HEAP, 0)
        return values | self._generated_code() | self.events.now()

    def _of_python(self) -> int | None:
        """Read now and then what Python's allocator has handed out."""
        paused_s = self._investigator.paused_s
        started = time.perf_counter() - paused_s
        self._first_s = self._first_s or started
        if started < self._heap_due_s:
            return None
        python = python_in_use()
        now = time.perf_counter() - paused_s
        apart_s = max((now - started) / READING.first_share, READING.apart * (now - self._first_s))
        self._heap_due_s = now + apart_s
        return python

    def _before_census(self) -> None:
        self._python_before = python_in_use()
        self._ledgers.before_census()

    def _subtract_own(self, before: Mapping[str, int], recorders: int) -> None:
        """Subtract from later readings what remains of the memory that a census, or the first estimate, took.

        Args:
            before: what the program alone had before that, by counter.
            recorders: bytes of malloc's that recorders took meanwhile and will free; negative if they freed
                more.
        """
        malloc = self._reader.in_malloc()
        now = self._resident(self._reader.in_use()) | ({} if malloc is None else {"cpu": malloc - recorders})
        for name, value in now.items():
            if name in before:
                # A negative difference is memory of the program: garbage that was collected after a census.
                self._own_bytes[name] = max(0, value - before[name])
        before_python, self._python_before = self._python_before, None
        if before_python is not None and (python := python_in_use()) is not None:
            # What it freed were tables of recorders, which have run since the mark before.
            self._own_bytes[HEAP] = self._own_bytes.get(HEAP, 0) + max(0, python - before_python)

    def _generated_code(self) -> dict[str, int]:
        """Return the size of generated code now and then, if new shapes may cause more of it."""
        now = time.perf_counter()
        if now < self._code_due_s or cuda.initialized() or self._shapes_vary() is False:
            return {}
        started = time.thread_time()
        code = generated_code()
        took = time.thread_time() - started
        early = self._progress.works and self._code_readings < READING.first
        self._code_due_s = now + took / (READING.first_share if early else READING.later_share)
        self._code_readings += early
        return {} if code is None else {CODE: code}

    def _shapes_vary(self) -> bool | None:
        """Return whether input shapes may vary, as they always may without backwards.

        None if only new code would show it.
        """
        return True if self.evidence.main.scale == "second" else self._batches_vary()

    def _resident(self, in_use: InUse | None) -> dict[str, int]:
        if in_use is None:  # no Linux
            rss = self._reader.rss()
            return {} if rss is None else {"host": rss}
        return {"shared": in_use.shared, "host": in_use.resident}

    # --- the record -----------------------------------------------------------------------------------------

    def write_readings(self, *, last: bool = False) -> None:
        """Write the readings since the last call.

        Args:
            last: none will follow: write those that are incomplete, too, and the situation.
        """
        self._written_s = time.perf_counter()
        for comparison in (*self.evidence.run.values(), *self.evidence.steps.values()):
            for line in comparison.new_readings(last=last):
                self._write(line)
        with self.job.lock:
            for job_line in self.job.lines(last=last):
                self._write(job_line)
        if last:
            self._write(self._situation())

    def _add_census(self, census: CensusSeen) -> None:
        self.write_readings()
        self._write(self._situation())
        census.other_memory = self._ledgers.other_memory
        self.evidence.add(census)
        self._write(census)

    def _situation(self) -> Situation:
        limits, used = limits_and_use(self._in_use, self._readings, self.transient.most())
        self._collectives = max(self._collectives, recorded_collectives())  # the group may be gone by the end
        return Situation(
            position=self._progress.now(),
            limits=limits,
            used=used,
            readable=self._readable,
            works_s=round(self.evidence.run["second"].begins, 3),
            shapes_vary=self._shapes_vary(),
            collectives=self._collectives,
            came_with=dict(self.events.came_with),
        )

    # --- when memory runs out, and at the end ---------------------------------------------------------------

    def interrupted(self, frames: Sequence[FrameType]) -> Census:
        """Take a census when memory has run out; `frames` as for `CensusScheduler.census`."""
        return self.scheduler.census(self._progress.now(), frames)

    def end(self, frames: Sequence[FrameType] | None) -> None:
        """Take a last census of what is suspected; `frames` as for `CensusScheduler.end`."""
        self.scheduler.end(self._progress.now(), frames)

    def remove(self) -> None:
        """Remove the recorders of allocation sites."""
        self._investigator.stop()
        self._investigator.sites.remove()

    def take_ledgers(self, frames: Sequence[FrameType] | None) -> None:
        """Take a census for the ledgers alone, in a run that has none of its end; `frames` as for `end`.

        Growth is not judged by it: what the program's functions kept may be gone.
        """
        if not self._ledgers.taken or self._ledgers.outdated:
            self._investigator.look(self._ledgers.take, frames, lambda _: ())
