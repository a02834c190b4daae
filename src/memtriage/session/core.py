"""A watch: marks go in, a record and findings come out. One for each process.

The session never raises into the program it watches: whatever fails in here becomes a note in the record,
and the watch goes on with less. It runs in the program's own threads, at marks; one thread of its own samples
the host and makes time-based marks where no steps can be seen.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, cast

from memtriage.account.census import View
from memtriage.account.host_reading import HostReading, read_host
from memtriage.account.job_ledger import take_job_ledger
from memtriage.account.ledgers import take_ledgers
from memtriage.diagnose.after_backward import left_after_backward
from memtriage.diagnose.growth import Series
from memtriage.diagnose.host_findings import host_findings, host_notes
from memtriage.diagnose.judge import Evidence
from memtriage.diagnose.leaks import CensusPoint
from memtriage.diagnose.moment import Phase
from memtriage.diagnose.verdict import verdict
from memtriage.model.asked import Answer
from memtriage.model.findings import Finding, Verdict
from memtriage.model.standing import Standing
from memtriage.observe import cuda
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.hooks import TrainingHooks
from memtriage.observe.host import InUse, has_children, host_peak
from memtriage.session.asked import Lock, answer
from memtriage.session.death import error_frames, memory_error
from memtriage.session.death_watch import DeathWatch
from memtriage.session.ends import Terminated, exception_text, start_record
from memtriage.session.follow import Clock, Follower
from memtriage.session.host_watch import HostWatch
from memtriage.session.investigation import Investigator
from memtriage.session.judgement import find_leaks, limits_and_use
from memtriage.session.microbatch_log import MicrobatchLog
from memtriage.session.passing import Passing
from memtriage.session.phases import PhaseResidue
from memtriage.session.sampler import Sampler
from memtriage.session.standing import Board
from memtriage.session.stored_marks import StoredMarks
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End, Note, RecordedFinding, Start
from memtriage.store.writer import RankWriter

P = ParamSpec("P")

_LEDGER_SHARE = 0.002
_ASK_WITHIN_S = 0.25


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """A failure of the watch must not become one of the program: it is noted, once for each text."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:  # anything at all: the watched run goes on
            session = args[0]
            assert isinstance(session, Session)
            session.failed(method.__name__.strip("_").replace("_", " "), error)

    return guarded


class Session:
    """Watches the process it is made in, from `start` to `finish`.

    Args:
        directory: where records go; the rank's file lies below, see `store.layout`.
        identity: which rank of which run this is.
        argv: the program and its arguments, for the record.
        script_root: folder of the program, for allocation sites.
        say: where progress goes (one line of text); None for silence.
        per_microbatch: say what every micro-batch left in use.
        last_census: take one at the end of a run that had none, for its ledger.
    """

    def __init__(
        self,
        directory: Path,
        identity: RankIdentity,
        argv: list[str],
        script_root: str | None,
        say: Callable[[str], None] | None = None,
        *,
        per_microbatch: bool = False,
        last_census: bool = True,
    ) -> None:
        self.identity = identity
        self.path = record_path(directory, identity)
        self.step_count = 0
        self.microbatch = 0
        self.backwards = 0
        self.findings: list[Finding] = []
        self.died_of_memory = False
        self.exception_text: str | None = None
        self._judged = False
        self._last_census = last_census
        self._limits: dict[str, int] = {}
        self._peak_allocated: dict[str, int] = {}
        self._peak_reserved: dict[str, int] = {}
        self.argv = argv
        self._say = say
        self._log = MicrobatchLog(say) if per_microbatch and say is not None else None
        self._writer = RankWriter(self.path)
        self._reader = CounterReader()
        self._stored = StoredMarks(self._writer, self._reader, identity.rank)
        self._hooks = TrainingHooks(self)
        self._host = HostWatch()
        self._sampler = Sampler(self, self._host)
        self._script_root = script_root
        self._pid = os.getpid()
        self._started = time.perf_counter()
        self._started_at = time.time()
        self._lock = threading.RLock()
        self._running = False
        self._complaints: set[str] = set()
        # marks
        self._last_mark_s = 0.0
        self._last: dict[str, Reading] = {}
        self._at_work: tuple[InUse | None, list[Reading]] = (None, [])
        self._passing = Passing()
        self._board = Board(identity.rank, self._started_at)
        self._growing: dict[str, Series] = {}
        self._passed: dict[str, int] = {}
        self._manual_steps = False
        self._stepped = False
        self._stepped_inside = False
        self._microbatches_of_step = 0
        # growth
        self._investigator = Investigator(script_root, self._tell, self._read_host)
        self._on_host: HostReading | None = None
        self._follower = Follower(self._investigator, self._with_ledger, self._provisional)
        self._ledger_due_s: float | None = None
        self._residue = PhaseResidue()
        self._context_baseline: dict[int, int] = {}
        # what the program is doing, and what it was doing when memory ran out
        self.phase: Phase = "setup"
        self.training_thread: int | None = None
        self._death = DeathWatch(self, self._look_at_death)

    # --- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins the record, installs the hooks."""
        self._running = True
        self._writer.write("start", self._start_record())
        self._hooks.install()
        self._sampler.start()
        self.mark("start")

    @property
    def running(self) -> bool:
        """False before `start`, after `finish`, and in forked children."""
        return self._running and os.getpid() == self._pid

    @property
    def since_step(self) -> int:
        """Completed backwards since the last step; 0 right behind it."""
        return 0 if self._stepped else self.microbatch

    @property
    def record_error(self) -> str | None:
        """Why lines of the record are missing; None while all could be written."""
        return self._writer.error

    def finish(
        self, exception: BaseException | None = None, exit_code: int | None = None, *, brief: bool = False
    ) -> None:
        """Ends the watch: last look, judgement, end of the record. Everything installed is removed.

        Args:
            exception: what ended the program, with its traceback still on it.
            exit_code: status the program ends with.
            brief: no last census (a signal is about to end the process).
        """
        if not self.running:
            return
        self._stop_observing()
        self.mark("end")
        self.exception_text = None if exception is None else exception_text(exception)
        error = memory_error(exception)
        self.died_of_memory = error is not None
        # Each for itself: where memory has run out, a census may find too little for its own work.
        self._last_look(exception, error, brief)
        self._judge_growth()
        self.findings += self._residue.findings()
        self._judge_host()
        if error is not None:
            self._judge_death(error)
        for finding in self.findings:
            self._write_finding(finding, final=True)
        self._read_peaks()
        self._writer.write("end", self._end_record(exit_code))
        self._writer.close()
        self._running = False

    @_never_raises
    def _stop_observing(self) -> None:
        self._sampler.stop()
        self._hooks.remove()
        self._death.stop()

    @property
    def verdict(self) -> Verdict:
        """This rank's verdict, once it is finished; `error` when growth could not be judged."""
        word = verdict(self.findings, self.died_of_memory)
        return "error" if word == "clean" and not self._judged else word

    def terminated(self, signum: int) -> None:
        """A termination signal is about to end the process."""
        name = signal.Signals(signum).name
        self.finish(Terminated(f"terminated by {name}"), 128 + signum, brief=True)

    def failed(self, where: str, error: Exception) -> None:
        """Notes that a part of the watch failed, once for each text."""
        text = f"memtriage could not do all of its work ({where}): {type(error).__name__}: {error}"
        if text not in self._complaints:
            self._complaints.add(text)
            self._writer.write("note", Note(text=text))

    # --- events from the hooks ------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        with self._lock:  # not in the middle of a census that somebody asked for
            self.phase = "backward"
            self.training_thread = threading.get_ident()
        self._investigator.in_backward(True)
        self._host.while_training()
        self._death.backward_begins()

    @_never_raises
    def backward_ends(self, failed: bool) -> None:
        self._investigator.in_backward(False)
        self.phase = "forward"
        if failed:
            return
        self.backwards += 1
        self._death.backward_ends()
        if self._stepped:
            self._follower.new_step()
            self.microbatch = 0
            self._stepped = False
        self.microbatch += 1
        self.mark("backward")
        if self._stepped_inside:
            self._stepped_inside = False
            self._step_done()

    def optimizer_begins(self) -> None:
        self.phase = "optimizer"

    @_never_raises
    def optimizer_ends(self, inside_backward: bool) -> None:
        self.phase = "backward" if inside_backward else "forward"
        if self._manual_steps:
            return
        if inside_backward:
            self._stepped_inside = True
        elif not self._stepped:
            self._step_done()

    @_never_raises
    def user_step(self) -> None:
        """`memtriage.step()`: from the first call on, steps are the program's word alone."""
        counted_by_hook = self._stepped and not self._manual_steps
        self._manual_steps = True
        if not counted_by_hook:
            self._step_done()

    @_never_raises
    def residue(self, findings: Sequence[Finding]) -> None:
        """What stays on the devices at the end of a phase; of each holder the last word counts."""
        for finding in self._residue.add(findings):
            finding.rank, finding.step = self.identity.rank, self.step_count
            self._write_finding(finding, final=False)

    def _step_done(self) -> None:
        self._stepped = True
        self.step_count += 1
        self._microbatches_of_step = self.microbatch
        self.mark("step")

    # --- marks ----------------------------------------------------------------------------------------------

    @_never_raises
    def mark(self, name: str) -> None:
        """Reads the counters and follows what they tell. Other threads' marks wait for one another."""
        if not self.running:
            return
        with self._lock:
            now = time.perf_counter() - self._started
            self._last_mark_s = now
            readings = self._reader.read()
            self._last = {reading.device: reading for reading in readings}
            if name != "end":  # by then the program's functions have returned, and let go of what they had
                self._at_work = self._reader.in_use(), readings
                self._passing.at_mark(readings)
            self._board.mark(name, now, self.step_count, self.microbatch, readings)
            self._stored.add(name, now, readings, self.step_count, self.microbatch)
            self._death.observe()
            for reading in readings:
                if reading.outside is not None and reading.device.startswith("cuda:"):
                    self._context_baseline.setdefault(int(reading.device[5:]), reading.outside)
            if name == "backward" and self._log is not None:
                self._log.add(self.step_count, self.microbatch, readings)
            if name in ("step", "backward", "time"):
                self._follow(name, readings)
            if name not in ("backward", "end"):  # between steps, while the program still has what it needs
                self._host.at_mark(readings, self._reader.rss(), self.step_count)

    def seconds_since_mark(self) -> float:
        """How long ago the last mark was made."""
        return time.perf_counter() - self._started - self._last_mark_s

    def write_host(self, sample: Any) -> None:
        """A slow sample of the host, from the sampler's thread."""
        if self.running:
            self._writer.write("host", sample)

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    # --- for whoever asks meanwhile -------------------------------------------------------------------------

    def standings(self) -> list[Standing]:
        """What is known of this rank now, asked from any thread; empty while it is not watched.

        Never waits for a census that a mark is taking: growth is then what it was when last asked.
        """
        if not self.running:
            return []
        try:
            if self._lock.acquire(timeout=_ASK_WITHIN_S):
                try:
                    self._growing, self._passed = self._follower.growing(), self._passing.most()
                finally:
                    self._lock.release()
            return self._board.standings(self._growing, self._passed)
        except Exception as error:  # whoever asks can do without
            self.failed("metrics", error)
            return []

    def answer(self, within_s: float) -> Answer:
        """A census for whoever asks from outside, or why there is none; for a thread of its own.

        Args:
            within_s: how long it may wait for an instant at which the program can be looked at.
        """
        return answer(self, cast(Lock, self._lock), self._context_baseline, self._script_root, within_s)

    # --- growth ---------------------------------------------------------------------------------------------

    def _follow(self, name: str, readings: list[Reading]) -> None:
        values = {}
        for reading in readings:
            # What the recorders of an investigation take themselves is in malloc's counter.
            disturbed = reading.device == "cpu" and self._investigator.recording
            if reading.allocated is not None and not disturbed:
                values[reading.device] = reading.allocated
        shared = self._reader.shared()
        if shared is not None:
            values["shared"] = shared
        self._follower.follow(name, self._clock(), values)
        if self._ledger_due_s is not None and self.elapsed() >= self._ledger_due_s:
            self._investigator.census(self.step_count, self._with_ledger)

    def _clock(self) -> Clock:
        return Clock(self.step_count, self.microbatch, self._microbatches_of_step, self.elapsed())

    @_never_raises
    def _read_host(self) -> None:
        self._on_host = None  # an old reading must not stand in for one that fails
        self._on_host = read_host()

    def _with_ledger(self, view: View) -> None:
        started = time.perf_counter()
        census = view.census()
        ledgers = take_ledgers(
            census.storages, self._context_baseline, self._script_root, self._on_host, census.parameters
        )
        self._board.ledgers(ledgers, self.elapsed())
        for ledger in ledgers:
            self._writer.write("ledger", ledger)
        if has_children():
            self._writer.write("ledger", take_job_ledger())
        self._host.at_census(view, self._on_host)
        self.residue(left_after_backward(census.storages, self.step_count))
        cost = view.census().seconds + time.perf_counter() - started
        self._ledger_due_s = self.elapsed() + cost / _LEDGER_SHARE

    # --- judgement ------------------------------------------------------------------------------------------

    @_never_raises
    def _last_look(self, exception: BaseException | None, error: BaseException | None, brief: bool) -> None:
        try:
            if brief:
                self._follower.abandon()
            elif error is None or not self._death.look_at(error):
                self._follower.end(self._clock(), None if exception is None else error_frames(exception))
        finally:
            self._investigator.stop()
        if self._ledger_due_s is None and self._last_census and not brief:
            self._investigator.census(self.step_count, self._with_ledger)

    def _look_at_death(self, frames: Sequence[FrameType]) -> CensusPoint:
        with self._lock:
            return self._follower.interrupted(self._clock(), frames)

    @_never_raises
    def _judge_growth(self) -> None:
        self.findings = self._leaks()
        self._judged = True

    @_never_raises
    def _judge_host(self) -> None:
        evidence = self._host.conclude()
        for finding in host_findings(evidence):
            finding.rank = self.identity.rank
            finding.step = self.step_count if finding.step is None else finding.step
            self.findings.append(finding)
        for note in host_notes(evidence):
            self._writer.write("note", Note(text=note))

    @_never_raises
    def _judge_death(self, error: BaseException) -> None:
        died = self._death.finding(error, self.findings)
        died.rank = self.identity.rank
        self.findings.insert(0, died)

    def _provisional(self) -> None:
        """What is known so far, for the reader of a record whose process did not live to its end."""
        leaks = self._leaks()
        for finding in leaks:
            self._write_finding(finding, final=False)
        if self._log is not None:
            self._log.suspect(leaks)

    def _leaks(self) -> list[Finding]:
        limits, used = limits_and_use(*self._at_work, self._passing.most())
        self._limits = limits
        done = [each.points[-1].position for each in self._follower.done if each.scale == "step"]
        evidence = Evidence(
            self._follower.series,
            limits,
            used,
            self.step_count,
            self._microbatches_of_step,
            max(done, default=None),
            self.since_step,
        )
        found = find_leaks(self._follower.done, evidence)
        for finding in found:
            finding.rank = self.identity.rank
        self._board.leaks(found)
        return found

    # --- records --------------------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        if self._say is not None:
            self._say(text)

    def _write_finding(self, finding: Finding, *, final: bool) -> None:
        fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
        self._writer.write("finding", RecordedFinding(**fields, final=final))

    def _start_record(self) -> Start:
        return start_record(self.identity, self.argv, self._pid, self._started_at)

    def _end_record(self, exit_code: int | None) -> End:
        return End(
            verdict=self.verdict,
            steps=self.step_count,
            exception=self.exception_text,
            exit_code=exit_code,
            time_s=round(self.elapsed(), 3),
            device_limits=self._limits,
            passing=self._passing.most(),
            peak_allocated=self._peak_allocated,
            peak_reserved=self._peak_reserved,
            peak_rss=host_peak(),
        )

    @_never_raises
    def _read_peaks(self) -> None:
        for name in self._last:
            if name.startswith("cuda:"):
                found = cuda.counters(int(name[5:]))
                if found.peak_allocated is not None and found.peak_reserved is not None:
                    self._peak_allocated[name] = found.peak_allocated
                    self._peak_reserved[name] = found.peak_reserved
