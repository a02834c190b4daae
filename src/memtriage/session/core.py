"""The watch of one process: training events go in, a record and findings come out.

`Session` only passes events on. The hooks report training, and whoever runs the program reports its end. Each
event goes to the parts that need it:

| part | what it does |
|---|---|
| `TrainingProgress` | counts steps and micro-batches |
| `StoredMarks`, `LiveState` | keep the counters: in the record, and for requests while the program runs |
| `GrowthWatch`, `LedgerKeeper` | decide when to take a census, and use what it shows |
| `FragmentationWatch` | follows what GPUs reserve beyond the peak |
| `BatchWatch` | warns of a batch still to come that will not fit |
| `HostWatch`, `Sampler` | follow host memory, in a separate thread |
| `DeathWatch` | waits for memory to run out |
| `Conclusion` | judges all of it at the end |

The watched program comes first: a failure of the watch becomes a note in the record, and its other parts
continue. Events arrive in the program's own threads; one lock makes their marks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import cast

from memtriage.model.census import Census
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.model.run_status import RunStatus
from memtriage.observe.counters import CounterReader
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.hooks import TrainingHooks, inside_optimizer_step
from memtriage.observe.loaders import Epoch
from memtriage.process.stdlib import os, threading, time
from memtriage.session.batch_watch import BatchWatch
from memtriage.session.conclusion import Conclusion
from memtriage.session.death import error_frames, memory_error
from memtriage.session.death_watch import DeathWatch
from memtriage.session.ends import start_record
from memtriage.session.fragmentation_watch import FragmentationWatch
from memtriage.session.growth_watch import GrowthWatch
from memtriage.session.host_watch import HostWatch
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.live_state import LiveState
from memtriage.session.marks import MarkPoint, StoredMarks, is_within_step
from memtriage.session.microbatch_log import MicrobatchLog
from memtriage.session.progress import TrainingProgress
from memtriage.session.record import SessionRecord, never_raises
from memtriage.session.remote.answer import Lock, Responder
from memtriage.session.residue import PhaseResidue
from memtriage.session.sampler import Sampler
from memtriage.session.signals.own_work import a_signal_waits
from memtriage.session.time_marks import TimeMarks
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import failed

_STATUS_WAIT_S = 0.25
"""How long a request for the status waits for a mark that is being made."""


class Session:
    """Watches the process it is made in, from `start` to `finish`.

    Attributes:
        identity: which rank of which run this is.
        path: the rank's record.
        argv: the program and its arguments.
        responder: takes censuses for other processes.
        conclusion: has the result, after `finish`.

    Args:
        directory: where records go; for the rank's file in it see `store.layout`.
        identity, argv: for the record.
        script_root: folder of the program, for allocation sites.
        say: takes one line of text about progress; None for silence.
        per_microbatch: print what every micro-batch leaves in use.
        last_census: at the end of a run, take a census for its ledger, if there is none or it is outdated. A
            program that fails before its work begins gets none: its memory says nothing.
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
        self._last_census = last_census
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held while a mark is made, and taken before a backward
        self._running = False
        self._last_mark: MarkPoint | None = None
        self._started_at = time.time()

        rank, lock = identity.rank, cast(Lock, self._lock)
        self.record = record = SessionRecord(self.path)
        self._progress = progress = TrainingProgress()
        self._hooks = TrainingHooks(self, self._attach, self.gradients_computed)
        # The parts that marks go to.
        self._reader = CounterReader()
        self._stored = StoredMarks(record, self._reader, rank)
        self._live = LiveState(rank, self._started_at)
        self._host = HostWatch()
        self._log = MicrobatchLog(say) if per_microbatch and say is not None else None
        # The parts that take censuses.
        self._residue = PhaseResidue(rank, progress, record)
        self._ledgers = LedgerKeeper(script_root, progress, record, self._live, self._host, self.residue)
        self._fragmentation = FragmentationWatch(rank, record, self._ledgers)
        self._death = death = DeathWatch(
            position=lambda: progress.position,
            running=lambda: self.running,
            failed=record.failed,
            look=self._census_at_death,
        )
        say_or_not = say or (lambda _: None)
        self._batches = BatchWatch(rank, record, say_or_not, self._epoch_begins)
        self._growth = GrowthWatch(
            self._reader,
            progress,
            self._ledgers,
            script_root=script_root,
            say=say_or_not,
            report=self._report_suspects,
            write=record.evidence,
            rank=rank,
            batches_vary=lambda: death.batches_vary,
        )
        self.responder = Responder(
            identity=identity,
            argv=argv,
            progress=progress,
            lock=lock,
            running=lambda: self.running,
            baselines=self._ledgers.baselines,
            script_root=script_root,
        )
        self._at_mark: tuple[Callable[[MarkPoint], None], ...] = (
            self._live.at_mark,
            self._stored.at_mark,
            lambda _: death.observe(),
            self._ledgers.at_mark,
            self._log_microbatch,
            self._fragmentation.at_mark,
            self._growth.at_mark,
            self._read_host,
            self._batches.at_mark,
        )
        # The part with a thread of its own, and the end.
        time_marks = TimeMarks(
            progress,
            since_mark=self._seconds_since_mark,
            mark=lambda: self.mark("time"),
            lock=lock,
            failed=record.failed,
        )
        self._sampler = Sampler(
            self._host,
            now=progress.now,
            marks=time_marks,
            within_step=self._within_step,
            write=lambda sample: record.write("host", sample),
            job=self._growth.job.at_wake,
            whole=self._growth.job.at_sample,
            failed=record.failed,
        )
        self.conclusion = Conclusion(
            rank,
            progress,
            record,
            self._live,
            growth=self._growth,
            fragmentation=self._fragmentation,
            host=self._host,
            batches=self._batches,
            death=death,
            residue=self._residue,
        )

    # --- questions, at any time -----------------------------------------------------------------------------

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
        """Why lines of the record are missing; None if all were written."""
        return self.record.error

    def elapsed(self) -> float:
        """Return seconds since the session was made."""
        return self._progress.elapsed()

    def statuses(self) -> list[RunStatus]:
        """Return what is known of this rank now; empty while it is not watched. Any thread may call it.

        Does not wait for a census that a mark is taking: growth is then as of the last call.
        """
        if not self.running:
            return []
        try:
            if self._lock.acquire(timeout=_STATUS_WAIT_S):
                try:
                    self._live.growth(self._growth.scheduler.growing(), self._growth.transient.most())
                finally:
                    self._lock.release()
            return self._live.statuses()
        except Exception as error:  # the caller can do without
            self.record.failed("metrics", error)
            return []

    # --- events: the start, the hooks and the program's own calls -------------------------------------------

    @never_raises
    def start(self) -> None:
        """Begin the record, install the hooks."""
        self._running = True
        start = start_record(self.identity, self.argv, self._pid, self._started_at)
        self.record.write("start", start)
        self._hooks.install()
        self._growth.install()
        self._sampler.start()
        self.mark("start")

    @never_raises
    def _attach(self, attach: Callable[[], None]) -> None:
        attach()
        self._batches.install()
        self._growth.events.install()

    @never_raises
    def _epoch_begins(self, epoch: Epoch) -> None:
        self._growth.events.epoch_begins()
        self._growth.job.passes(epoch)

    @never_raises
    def backward_begins(self) -> None:
        with self._lock:  # not in the middle of a census for another process
            self._progress.backward_begins()
        self._growth.in_backward(True)
        self._within_step()
        elements = self._death.backward_begins()
        with self._lock:
            self._batches.backward_begins(elements)

    @never_raises
    def backward_ends(self, failed: bool) -> None:
        self._growth.in_backward(False)
        in_closure = inside_optimizer_step()
        if failed:
            self._progress.backward_fails(in_closure)
            return
        completes_microbatch = self._progress.backward_completes(in_closure)
        self._death.backward_ends()
        if completes_microbatch:
            self.mark("backward")
        if self._progress.take_step_inside():
            self._step_completes()

    @never_raises
    def gradients_computed(self) -> None:
        """Take it as a backward if `torch.autograd.grad` is all that a program computes gradients with."""
        if not inside_optimizer_step() and self._progress.gradients_complete():
            self.mark("backward")

    @never_raises
    def optimizer_begins(self, optimizer: object) -> None:
        self._progress.optimizer_begins()

    @never_raises
    def optimizer_ends(self, optimizer: object, inside_backward: bool) -> None:
        if self._progress.optimizer_ends(optimizer, inside_backward):
            self._step_completes()

    @never_raises
    def user_step(self) -> None:
        """Count a call of `memtriage.step()`. After the first one, hooks no longer count steps."""
        if self._progress.user_step():
            self._step_completes()

    def _step_completes(self) -> None:
        self._progress.step_completes()
        self.mark("step")

    @never_raises
    def residue(self, findings: Sequence[Finding]) -> None:
        """Take what stays on the devices at the end of a phase."""
        self._residue.add(findings)

    # --- marks ----------------------------------------------------------------------------------------------

    @never_raises
    def mark(self, name: str) -> None:
        """Read the counters and pass them on. Marks of several threads wait for each other."""
        if not self.running:
            return
        with self._lock:
            position = self._progress.now()
            readings = self._reader.read(is_within_step(name, position))
            mark = self._last_mark = MarkPoint(name, position, readings)
            for at_mark in self._at_mark:
                try:
                    at_mark(mark)
                except (Exception, SystemExit) as error:  # the other parts go on
                    if is_programs_exception(error):
                        raise
                    self.record.failed("mark", error)

    def _log_microbatch(self, mark: MarkPoint) -> None:
        if mark.name == "backward" and self._log is not None:
            self._log.add(mark.position.step, mark.position.microbatch, mark.readings)

    def _read_host(self, mark: MarkPoint) -> None:
        # At the end the program has no longer what it needed.
        if mark.name != "end" and not is_within_step(mark.name, mark.position):
            self._host.at_mark(mark.readings, self._reader.rss(), mark.position.step)

    def _within_step(self) -> None:
        """Note what a step takes from malloc, unless the watch itself takes memory at this moment."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._growth.recording:
                    self._host.while_training()
            finally:
                self._lock.release()

    def _seconds_since_mark(self) -> float:
        last = 0.0 if self._last_mark is None else self._last_mark.position.time_s
        return self.elapsed() - last

    # --- events: from the parts -----------------------------------------------------------------------------

    def _report_suspects(self, leaks: list[Finding]) -> None:
        """Pass on what seems to leak. It goes into the record now, in case the process is killed."""
        self._live.leaks(leaks)
        self.record.findings(leaks, final=False)
        if self._log is not None:
            self._log.suspect(leaks)

    def _census_at_death(self, frames: Sequence[FrameType]) -> Census:
        with self._lock:
            return self._growth.interrupted(frames)

    # --- the end --------------------------------------------------------------------------------------------

    def finish(
        self, exception: BaseException | None = None, exit_code: int | None = None, *, brief: bool = False
    ) -> None:
        """End the watch: last census, judgment, end of the record. Everything installed is removed.

        Args:
            exception: what ended the program, with its traceback still on it.
            exit_code: status that the program ends with.
            brief: no last census (a signal is about to end the process).
        """
        if not self.running:
            return
        try:
            self._stop_observing()
            self.mark("end")
            error = memory_error(exception)
            # Guarded separately: if memory has run out, too little may be left for a census.
            by_itself = failed(exit_code, exception)
            at_once = by_itself and not self._progress.works
            self._last_look(exception, error, brief or a_signal_waits(), at_once)
            self.conclusion.judge(exception, error, by_itself)
            last_readings = [] if self._last_mark is None else self._last_mark.readings
            self.conclusion.write(exit_code, [reading.device for reading in last_readings])
            self.record.close()
        finally:
            self._running = False

    @never_raises
    def _stop_observing(self) -> None:
        self._sampler.stop()
        self._growth.job.stop()
        if self._growth.job.ledger is not None:
            self.record.write("ledger", self._growth.job.ledger)
        self._hooks.remove()
        self._batches.remove()
        self._growth.events.remove()
        self._death.stop()

    @never_raises
    def _last_look(
        self, exception: BaseException | None, error: BaseException | None, brief: bool, at_once: bool
    ) -> None:
        frames = None if exception is None else error_frames(exception)
        try:
            if not brief and (error is None or not self._death.look_at(error)):
                self._growth.end(frames)
        finally:
            self._growth.remove()
        if self._last_census and not brief and (not at_once or error is not None):
            self._growth.take_ledgers(frames)
