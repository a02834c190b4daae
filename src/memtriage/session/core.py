"""A watch: marks go in, a record and findings come out. One for each process.

The session passes events on: from the training hooks and the program's own calls to the parts that need
them. It never raises into the program it watches: whatever fails in here becomes a note in the record, and
the watch goes on with less. It runs in the program's own threads, at marks; one thread of its own samples
the host, and asks the main thread for time-based marks where no steps can be seen.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import ParamSpec, cast

from memtriage.diagnose.growth.judged import with_circumstances
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.host.findings import host_findings, host_notes
from memtriage.diagnose.verdict import verdict
from memtriage.model.asked import Answer
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.paths import HolderPath
from memtriage.model.position import TrainingPosition
from memtriage.model.run_status import RunStatus
from memtriage.observe.counters import CounterReader
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.hooks import TrainingHooks, inside_optimizer_step
from memtriage.observe.host import host_peak
from memtriage.process.stdlib import os, threading, time
from memtriage.session.death import error_frames, memory_error
from memtriage.session.death_watch import DeathWatch
from memtriage.session.ends import Terminated, allocator_peaks, exception_text, start_record
from memtriage.session.growth_watch import GrowthWatch
from memtriage.session.host_watch import HostWatch
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.live_state import LiveState
from memtriage.session.marks import MarkPoint, StoredMarks
from memtriage.session.microbatch_log import MicrobatchLog
from memtriage.session.progress import TrainingProgress
from memtriage.session.record import SessionRecord
from memtriage.session.remote.answer import Lock, Responder
from memtriage.session.sampler import Sampler
from memtriage.session.signals.own_work import OwnWork
from memtriage.session.time_marks import TimeMarks
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End

P = ParamSpec("P")

_ASK_WITHIN_S = 0.25


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """A failure of the watch must not become one of the program: it is noted, once for each text."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        with OwnWork():
            try:
                method(*args, **kwargs)
            except (Exception, SystemExit) as error:  # anything at all: the watched run goes on
                if is_programs_exception(error):
                    raise
                session = args[0]
                assert isinstance(session, Session)
                session._failed(method.__name__.strip("_").replace("_", " "), error)

    return guarded


class Session:
    """Watches the process it is made in, from `start` to `finish`.

    Attributes:
        identity: which rank of which run this is.
        path: of the rank's record.
        argv: the program and its arguments.
        findings: what was found, once it is finished.
        judged: by device, what that rests on, once it is finished.
        died_of_memory: it ended because memory ran out.
        exception_text: what ended it; None when it came to its end.

    Args:
        directory: where records go; the rank's file lies below, see `store.layout`.
        identity, argv: for the record.
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
        self.argv = argv
        self.findings: list[Finding] = []
        self.died_of_memory = False
        self.exception_text: str | None = None
        self._last_census = last_census
        self.judged: dict[str, Judged] = {}
        self._failed_to_judge = True
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held while a mark is made, and taken before a backward
        self._running = False
        self._last_mark: MarkPoint | None = None

        self._record = SessionRecord(self.path)
        self._started_at = time.time()
        self._progress = TrainingProgress()
        self._hooks = TrainingHooks(self, self._attach)
        # what marks go to
        self._reader = CounterReader()
        self._stored = StoredMarks(self._record, self._reader, identity.rank)
        self._live = LiveState(identity.rank, self._started_at)
        self._host = HostWatch()
        self._log = MicrobatchLog(say) if per_microbatch and say is not None else None
        # what takes censuses
        self._residue = PhaseResidue()
        self._ledgers = LedgerKeeper(
            script_root, self._progress, self._record, self._live, self._host, self.residue
        )
        self._growth = GrowthWatch(
            self._reader,
            self._progress,
            self._ledgers,
            script_root=script_root,
            say=say or (lambda _: None),
            found=self._suspected,
            rank=identity.rank,
            batches_vary=lambda: self._death.batches_vary,
        )
        self._death = DeathWatch(
            position=lambda: self.position,
            running=lambda: self.running,
            failed=self._record.failed,
            look=self._census_at_death,
        )
        self._responder = Responder(
            identity=identity,
            argv=argv,
            progress=self._progress,
            lock=cast(Lock, self._lock),
            running=lambda: self.running,
            baselines=self._ledgers.baselines,
            script_root=script_root,
        )
        self._sampler = Sampler(
            self._host,
            now=self._progress.now,
            marks=TimeMarks(
                self._progress,
                since_mark=self._seconds_since_mark,
                mark=lambda: self.mark("time"),
                lock=cast(Lock, self._lock),
                failed=self._record.failed,
            ),
            write=lambda sample: self._record.write("host", sample),
            failed=self._record.failed,
        )

    def _failed(self, where: str, error: BaseException) -> None:
        with suppress(Exception):  # where not even a note can be made, the program still goes on
            self._record.failed(where, error)

    # --- what others may know -------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """False before `start`, after `finish`, and in forked children."""
        return self._running and os.getpid() == self._pid

    @property
    def position(self) -> TrainingPosition:
        """Where training stands; without the time."""
        return self._progress.position

    @property
    def record_error(self) -> str | None:
        """Why lines of the record are missing; None while all could be written."""
        return self._record.error

    @property
    def verdict(self) -> Verdict:
        """This rank's verdict, once it is finished; `error` where the watch itself failed to judge."""
        word = verdict(self.findings, self.died_of_memory, self.judged)
        return "error" if word == "not_judged" and self._failed_to_judge else word

    def elapsed(self) -> float:
        """Seconds since the session was made."""
        return self._progress.elapsed()

    def statuses(self) -> list[RunStatus]:
        """What is known of this rank now, asked from any thread; empty while it is not watched.

        Never waits for a census that a mark is taking: growth is then what it was when last asked.
        """
        if not self.running:
            return []
        try:
            if self._lock.acquire(timeout=_ASK_WITHIN_S):
                try:
                    self._live.growth(self._growth.scheduler.growing(), self._growth.transient.most())
                finally:
                    self._lock.release()
            return self._live.statuses()
        except Exception as error:  # whoever asks can do without
            self._record.failed("metrics", error)
            return []

    def answer(self, within_s: float) -> Answer:
        """Take a census for whoever asks from outside, or say why there is none; for a thread of its own.

        Args:
            within_s: how long it may wait for an instant at which the program can be looked at.
        """
        return self._responder.answer(within_s)

    # --- events: from the start, the hooks and the program's own calls --------------------------------------

    @_never_raises
    def start(self) -> None:
        """Begin the record, install the hooks."""
        self._running = True
        start = start_record(self.identity, self.argv, self._pid, self._started_at)
        self._record.write("start", start)
        self._hooks.install()
        self._growth.install()
        self._sampler.start()
        self.mark("start")

    @_never_raises
    def _attach(self, attach: Callable[[], None]) -> None:
        attach()

    @_never_raises
    def backward_begins(self) -> None:
        with self._lock:  # not in the middle of a census that somebody asked for
            self._progress.backward_begins()
        self._growth.in_backward(True)
        self._host.while_training()
        self._death.backward_begins()

    @_never_raises
    def backward_ends(self, failed: bool) -> None:
        self._growth.in_backward(False)
        in_closure = inside_optimizer_step()
        if failed:
            self._progress.backward_fails(in_closure)
            return
        completes = self._progress.backward_completes(in_closure)
        self._death.backward_ends()
        if completes:
            self.mark("backward")
        if self._progress.take_step_inside():
            self._step_completes()

    @_never_raises
    def optimizer_begins(self, optimizer: object) -> None:
        self._progress.optimizer_begins()

    @_never_raises
    def optimizer_ends(self, optimizer: object, inside_backward: bool) -> None:
        if self._progress.optimizer_ends(optimizer, inside_backward):
            self._step_completes()

    @_never_raises
    def user_step(self) -> None:
        """`memtriage.step()`: from the first call on, steps are the program's word alone."""
        if self._progress.user_step():
            self._step_completes()

    def _step_completes(self) -> None:
        self._progress.step_completes()
        self.mark("step")

    @_never_raises
    def residue(self, findings: Sequence[Finding]) -> None:
        """What stays on the devices at the end of a phase; of each holder the last word counts."""
        known = self._residue.add(findings)
        for finding in known:
            finding.rank, finding.step = self.identity.rank, self.position.step
        self._record.findings(known, final=False)

    # --- marks ----------------------------------------------------------------------------------------------

    @_never_raises
    def mark(self, name: str) -> None:
        """Read the counters and pass them on. Other threads' marks wait for one another."""
        if not self.running:
            return
        with self._lock:
            position = self._progress.now()
            within_step = name == "backward" and position.step > 0
            readings = self._reader.read(within_step)
            mark = self._last_mark = MarkPoint(name, position, readings)
            self._live.at_mark(mark)
            self._stored.at_mark(mark)
            self._death.observe()
            self._ledgers.at_mark(readings)
            if name == "backward" and self._log is not None:
                self._log.add(position.step, position.microbatch, readings)
            self._growth.at_mark(mark)
            if name != "end" and not within_step:  # while the program still has what it needs
                self._host.at_mark(readings, self._reader.rss(), position.step)

    def _seconds_since_mark(self) -> float:
        last = 0.0 if self._last_mark is None else self._last_mark.position.time_s
        return self.elapsed() - last

    # --- what the parts find --------------------------------------------------------------------------------

    def _suspected(self, leaks: list[Finding]) -> None:
        """Write what is known so far, for the reader of a record whose process did not live to its end."""
        self._live.leaks(leaks)
        self._record.findings(leaks, final=False)
        if self._log is not None:
            self._log.suspect(leaks)

    def _census_at_death(self, frames: Sequence[FrameType]) -> CensusPoint:
        with self._lock:
            return self._growth.interrupted(frames)

    # --- the end --------------------------------------------------------------------------------------------

    def terminated(self, signum: int) -> None:
        """A termination signal is about to end the process."""
        name = signal.Signals(signum).name
        self.finish(Terminated(f"terminated by {name}"), 128 + signum, brief=True)

    def finish(
        self, exception: BaseException | None = None, exit_code: int | None = None, *, brief: bool = False
    ) -> None:
        """End the watch: last look, judgment, end of the record. Everything installed is removed.

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
        self._judge_growth(isinstance(exception, Exception) and not isinstance(exception, Terminated))
        self.findings += self._residue.findings()
        self._judge_host()
        if error is not None:
            self._judge_death(error)
        self._record.findings(self.findings, final=True)
        self._write_end(exit_code)
        self._record.close()
        self._running = False

    @_never_raises
    def _stop_observing(self) -> None:
        self._sampler.stop()
        self._hooks.remove()
        self._death.stop()

    @_never_raises
    def _last_look(self, exception: BaseException | None, error: BaseException | None, brief: bool) -> None:
        try:
            if not brief and (error is None or not self._death.look_at(error)):
                self._growth.end(None if exception is None else error_frames(exception))
        finally:
            self._growth.remove()
        if self._last_census and not brief:
            self._growth.take_ledgers()

    @_never_raises
    def _judge_growth(self, failed: bool) -> None:
        self.findings = self._growth.leaks()
        self._live.leaks(self.findings)
        self.judged = with_circumstances(
            self._growth.judged(),
            failed=failed,
            steps=self.position.step,
            torch="torch" in sys.modules,
        )
        self._failed_to_judge = False

    @_never_raises
    def _judge_host(self) -> None:
        evidence = self._host.conclude()
        for finding in host_findings(evidence):
            finding.rank = self.identity.rank
            finding.step = self.position.step if finding.step is None else finding.step
            self.findings.append(finding)
        for note in host_notes(evidence):
            self._record.note(note)

    @_never_raises
    def _judge_death(self, error: BaseException) -> None:
        died = self._death.finding(error, self.findings)
        died.rank = self.identity.rank
        self.findings.insert(0, died)

    def _write_end(self, exit_code: int | None) -> None:
        end = End(
            verdict=self.verdict,
            steps=self.position.step,
            exception=self.exception_text,
            exit_code=exit_code,
            time_s=round(self.elapsed(), 3),
            device_limits=self._growth.limits,
            passing=self._growth.transient.most(),
            peak_rss=host_peak(),
            judged=self.judged,
        )
        try:
            devices = (
                [] if self._last_mark is None else [reading.device for reading in self._last_mark.readings]
            )
            end.peak_allocated, end.peak_reserved = allocator_peaks(devices)
        except Exception as error:
            self._record.failed("read peaks", error)
        self._record.write("end", end)


class PhaseResidue:
    """The residue found so far: one finding for each device and holder.

    What one phase leaves behind is there at the ends of later ones too: the finding names the first, and has
    the latest figures.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, HolderPath | str | None], Finding] = {}

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """What a phase left at its end; returns it under the phase that left it first."""
        told = []
        for finding in findings:
            key = (finding.device, finding.held_at)
            if key in self._found:
                finding.phase = self._found[key].phase
            self._found[key] = finding
            told.append(finding)
        return told

    def findings(self) -> list[Finding]:
        """All of them, largest first."""
        return sorted(self._found.values(), key=lambda finding: -(finding.bytes or 0))
