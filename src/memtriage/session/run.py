"""Run a program under a watch and report on it: what `memtriage run` and `memtriage.watch` do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO, cast

from memtriage.model.report import RankCount, RunReport
from memtriage.process import active
from memtriage.process.limits import lifted_memory_limit, own_processor_time, surviving_writes
from memtriage.process.messages import Messages
from memtriage.process.stdlib import os, time
from memtriage.session.core import Session
from memtriage.session.depth import enough_depth
from memtriage.session.ends import Terminated
from memtriage.session.remote.listen import Listener
from memtriage.session.runner import ProgramEnd, ScriptTarget, absolute, execute, finish, program_folder
from memtriage.session.signals.own_work import a_signal_waits, begin_program, do_own_work
from memtriage.session.signals.termination import TerminationGuard
from memtriage.store.layout import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, RECORD_GLOB, RankIdentity, identify
from memtriage.store.locate import RecordError, open_record

if TYPE_CHECKING:
    from memtriage.diagnose.ranks.merge import RunContext
    from memtriage.model.findings import Verdict
    from memtriage.report.monitoring.prometheus import Address, MetricsServer

_RANKS_WAIT_S = 20.0
_RANKS_WAIT_DYING_S = 3.0
_ABSENT_S = 2.0
FAILED_STATUS: Final = 3
"""Exit status of a script that succeeded, if its verdict is in `fail_on`."""


def run_watched(
    target: ScriptTarget,
    directory: Path,
    json_path: Path | None,
    *,
    per_microbatch: bool = False,
    metrics: Address | None = None,
    listen: bool = False,
    fail_on: Collection[Verdict] = (),
    before_program: Callable[[Path, Callable[[str], None]], None] | None = None,
) -> int:
    """Run a program under a watch; print the report and write the JSON at its end.

    Args:
        target: what to run.
        directory: where records go.
        json_path: where the result goes; None for no file.
        per_microbatch: print what every micro-batch leaves in use (on the first rank).
        metrics: where to serve Prometheus metrics meanwhile; None for nowhere.
        listen: answer requests for a census (`memtriage census --pid`).
        fail_on: verdicts after which the exit status of a program that succeeded is `FAILED_STATUS`. The
            first rank decides, by the merged report; a report that could not be made counts as `error`.
        before_program: called before the program with the folder of the record and a function that prints a
            line.

    Returns:
        The status to exit with: the program's own, or `FAILED_STATUS`.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; this process then dies as it would unwatched.
    """
    messages = Messages()
    argv = [target.name, *target.args]
    try:
        identity = identify(os.environ, pid=os.getpid(), time_s=time.time())
        leads = not identity.rank
        say = messages.say if leads else None
        session = Session(directory, identity, argv, _root(target), say, per_microbatch=per_microbatch)
    except Exception as error:  # the program must run, whatever the environment is like
        messages.say(f"cannot watch ({type(error).__name__}: {error}); the program runs without a watch")
        return finish(execute(target))
    active.session = session
    server = None if metrics is None else _serve_metrics(session, metrics, messages)
    listener = Listener(session.responder.answer, say) if listen else None

    def conclude(wait_s: float) -> Verdict | None:
        """Report, and return the verdict; None on the ranks that make no report."""
        if not leads:
            return None
        report = report_run(session, json_path, wait_s, messages)
        return "error" if report is None else report.verdict

    outcome = ProgramEnd()

    def terminated(signum: int) -> None:
        if session.running:  # otherwise the program has ended, and its end is reported
            end(outcome.exception or Terminated.by(signum), 128 + signum, brief=True)

    def begin() -> None:
        session.start()
        if listener is not None:
            listener.start()
        if before_program is not None:
            before_program(session.path.parent, say or (lambda text: None))

    def end(exception: BaseException | None, exit_code: int, brief: bool = False) -> Verdict | None:
        with enough_depth(), own_processor_time():
            if listener is not None:
                listener.stop()
            try:
                session.finish(exception, exit_code, brief=brief)
            except Exception as error:  # the rank's end is then judged from its record
                messages.say(f"the watch could not be ended ({type(error).__name__}: {error})")
            return conclude(_RANKS_WAIT_S if exception is None else _RANKS_WAIT_DYING_S)

    with TerminationGuard(terminated):
        do_own_work(begin)
        begin_program(program_folder(target))
        execute(target, outcome)
        if outcome.in_forked_child:
            return finish(outcome)
        verdict = do_own_work(lambda: end(outcome.exception, outcome.exit_code), last=True)
    outcome.release()
    if server is not None:
        server.close()
    status = finish(outcome)
    return FAILED_STATUS if status == 0 and verdict in fail_on else status


def _serve_metrics(session: Session, address: Address, messages: Messages) -> MetricsServer | None:
    """Return the endpoint of this rank. The first rank prints where it is; with port 0 every rank does."""
    from memtriage.report.monitoring.prometheus import rank_address, serve

    identity = session.identity
    server = serve(session.statuses, rank_address(address.host, address.port, identity), messages.say)
    if server is not None and (not identity.rank or not address.port):
        more = identity.world_size > 1 and address.port
        messages.say(f"metrics at {server.url}" + ("; of other ranks at the ports above" if more else ""))
    return server


def report_run(
    session: Session, json_path: Path | None, wait_s: float, messages: Messages | None = None
) -> RunReport | None:
    """Join the ranks' records, print the report to stderr and write the JSON. Never raises.

    Args:
        session: the finished session of this rank.
        json_path: where the result goes.
        wait_s: how long to wait until the other ranks have ended.
        messages: where the report is printed; None to print nothing.
    """
    try:
        from memtriage.report.run.json_file import write

        with lifted_memory_limit():  # reading and judging take memory, as does the stack of a thread
            report, known = _joined(session, wait_s)
            if messages is not None:
                from memtriage.report.run.terminal import console_for, render

                console = console_for(cast(TextIO, messages))
                render(report, console, known, record=session.path.parent, at_its_end=True)
            if json_path is not None:
                with surviving_writes():
                    write(report, json_path)
        return report
    except Exception as error:  # a report must not change how the program ended
        if messages is not None:
            messages.say(
                f"the report could not be made ({type(error).__name__}: {error}); the record is "
                f"in {session.path.parent}: try `memtriage report {session.path.parent}`"
            )
        return None


def _joined(session: Session, wait_s: float) -> tuple[RunReport, RunContext]:
    """The report over all ranks. If this rank's record could not be written: what the process still knows."""
    from memtriage.diagnose.ranks.merge import context, merge
    from memtriage.store.reader import read_run

    if session.record_error is not None and session.identity.world_size == 1:
        return _remembered(session)
    own_end = session.record_error is None
    wait_for_ranks(session.path.parent, session.identity.world_size - (not own_end), wait_s)
    try:
        run = read_run([session.path.parent])
    except RecordError:
        return _remembered(session)
    report = merge(run, live=True)
    return report, context(run, report, live=True)


def _remembered(session: Session) -> tuple[RunReport, RunContext]:
    """Verdict and findings of this rank alone; marks and ledgers were only in the record."""
    from memtriage.diagnose.ranks.merge import RunContext

    report = RunReport(
        verdict=session.conclusion.verdict,
        steps=session.position.step,
        findings=session.conclusion.findings,
        marks=[],
        ledger={},
        exception=session.conclusion.exception_text,
        judged=session.conclusion.judged,
        ranks=RankCount(seen=1, of=session.identity.world_size),
    )
    note = f"{session.path} could not be written ({session.record_error}): no marks, no ledger"
    unknown: list[int | None] = [None for _ in report.findings]
    known = RunContext(session.argv, duration_s=session.elapsed(), runs_out_in=unknown, notes=[note])
    return report, known


def wait_for_ranks(folder: Path, world_size: int, wait_s: float) -> None:
    """Wait until every rank's record in a folder is complete, or the time is over.

    A rank without a record is waited for only `_ABSENT_S`, because each rank writes its first line when it
    begins. Such a rank writes to another node's disk, or does not exist: `RANK` and `WORLD_SIZE` may be left
    over in the environment.

    A complete record is not read again: with a thousand ranks on a shared file system every look takes long.
    """
    began = time.monotonic()
    deadline = began + wait_s
    ended: set[Path] = set()
    while time.monotonic() < deadline:
        if a_signal_waits():
            deadline = min(deadline, began + _RANKS_WAIT_DYING_S)
        paths = list(folder.glob(RECORD_GLOB))
        for path in paths:
            if path not in ended and _has_end(path):
                ended.add(path)
            if time.monotonic() >= deadline:
                return
        absent = len(paths) < world_size and time.monotonic() - began < _ABSENT_S
        if len(ended) >= world_size or (len(ended) >= len(paths) and not absent):
            return
        time.sleep(0.05)


def _has_end(path: Path) -> bool:
    try:
        with open_record(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return False
    return last.startswith(b'{"t":"end"')


def _root(target: ScriptTarget) -> str | None:
    if target.kind == "module":
        return program_folder(target)
    path = os.path.normpath(absolute(target.name))
    return path if os.path.isdir(path) else os.path.dirname(path)


@dataclass(frozen=True, slots=True)
class WatchedProgram:
    """What is being watched, if it is not the script that this process was started with.

    Attributes:
        identity: which rank of which run this is.
        argv: the program and its arguments, for the record.
        root: folder of the program, for allocation sites; None where unknown.
    """

    identity: RankIdentity
    argv: list[str]
    root: str | None = None


def _this_program() -> WatchedProgram:
    identity = identify(os.environ, pid=os.getpid(), time_s=time.time())
    root = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()
    return WatchedProgram(identity, list(sys.argv), root)


class Watch:
    """A watch over a block of code: `with memtriage.watch() as watch: train()`.

    Attributes:
        report: the result, after the block; None inside it, and on every rank but the first.

    Args:
        directory, quiet, listen: as `memtriage.watch` has them.
        last_census: as for `Session`.
        program: what is watched; by default what this process was started with.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        quiet: bool = False,
        listen: bool = False,
        last_census: bool = True,
        program: WatchedProgram | None = None,
    ) -> None:
        self._program = program
        self._directory = Path(directory or os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
        self._quiet = quiet
        self._listen = listen
        self._last_census = last_census
        self.report: RunReport | None = None

    @property
    def folder(self) -> Path:
        """The folder of this run's record, for `memtriage report`. Known once the block is entered."""
        return self._session.path.parent

    def __enter__(self) -> Watch:
        if active.session is not None and active.session.running:
            raise RuntimeError(
                "memtriage.watch() was entered while this process is watched already (by `memtriage run` or "
                "an outer watch()); one watch at a time: remove the inner one"
            )
        program = self._program or _this_program()
        self._messages = Messages()
        say = None if self._quiet or program.identity.rank else self._messages.say
        self._session = Session(
            self._directory,
            program.identity,
            program.argv,
            program.root,
            say,
            last_census=self._last_census,
        )
        active.session = self._session
        self._session.start()
        self._listener = Listener(self._session.responder.answer, say) if self._listen else None
        if self._listener is not None:
            self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active.session = None
        session = self._session
        if self._listener is not None:
            self._listener.stop()
        if not session.running:
            return  # a child that the block forked, or ended by a signal: no report from here
        session.finish(None if kind is not None and issubclass(kind, SystemExit) else error)
        if not session.identity.rank:
            wait_s = _RANKS_WAIT_S if error is None else _RANKS_WAIT_DYING_S
            self.report = report_run(session, None, wait_s, None if self._quiet else self._messages)
