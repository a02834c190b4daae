"""One execution of a cell under the magic: what is read before and after it."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from memtriage.account.census import Look
from memtriage.account.host_reading import read_host
from memtriage.account.ledgers import take_ledgers
from memtriage.diagnose import cells
from memtriage.integrations.notebook.outputs import behind_variables
from memtriage.integrations.notebook.tracebacks import free_tracebacks
from memtriage.integrations.notebook.words import census_in_words, finding_in_words, main_left_out
from memtriage.model.cell import CellReport, DeviceUse, Freed
from memtriage.model.census import Census
from memtriage.model.paths import SegmentKind, has
from memtriage.model.report import RunReport
from memtriage.observe import cuda
from memtriage.observe.host_peak import PeakMeter
from memtriage.process import active
from memtriage.session.death import memory_error
from memtriage.session.run import Watch, WatchedProgram
from memtriage.store.layout import identify
from memtriage.store.locate import RecordError

_HOLDERS_AFTER_OOM: Final = 8
_LEAST_KEPT: Final = 64 << 10
"""A shown loss or metric is not worth a sentence."""
_ALREADY: Final = (
    "this process is watched already, from outside of the cell: steps and growth within the cell are in that "
    "watch's report"
)


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What the cell's first line asks for; see `options.cell_parser`."""

    top: int = 12
    keep_traceback: bool = False
    directory: str | None = None


def tidy(shell: Any) -> None:
    """Free what only garbage keeps."""
    behind_variables(shell.user_ns)
    gc.collect()


def look() -> Census:
    """Return a census of this instant, under a notebook's names."""
    with Look() as view:
        return census_in_words(view.census())


class WatchedCell:
    """A cell from `begin` to `end`.

    Args:
        shell: IPython's.
        options: what the first line asks for.
    """

    def __init__(self, shell: Any, options: CellOptions) -> None:
        self._shell = shell
        self._options = options
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._watch: Watch | None = None
        self._peaks: dict[int, int] = {}
        self._meter = PeakMeter()

    def begin(self) -> None:
        """Look, and begin the watch."""
        tidy(self._shell)
        self._before = look()
        for device in cuda.devices() if cuda.initialized() else ():
            self._peaks[device] = cuda.counters(device).peak_allocated or 0
        if active.session is None or not active.session.running:
            directory = self._options.directory
            if directory is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="memtriage-")
                directory = self._temporary.name
            identity = identify(os.environ, pid=os.getpid(), time_s=time.time())
            program = WatchedProgram(identity, ["notebook cell"], os.getcwd())
            watch = Watch(directory, quiet=True, last_census=False, program=program)
            watch.__enter__()
            self._watch = watch
        self._meter.start()
        self._started = time.perf_counter()

    def end(self, error: BaseException | None, label: str) -> CellReport:
        """End the watch, look again, free what an out-of-memory error keeps; tell what was found.

        Args:
            error: what ended the cell.
            label: the cell's name, as `In[5]`.
        """
        seconds = time.perf_counter() - self._started
        resident = self._meter.stop()
        run_report, runs_out, notes = self._end_watch(error)
        tidy(self._shell)
        on_host = read_host()  # before the census, which takes memory itself
        after = look()
        if run_report is None:
            notes.append(_ALREADY)
        else:
            ledgers = take_ledgers(after.storages, on_host=on_host, parameters=after.parameters)
            run_report.ledger = {ledger.device: ledger.rows for ledger in ledgers}
        freed = None
        out_of_memory = memory_error(error) is not None
        if out_of_memory and not self._options.keep_traceback:
            freed, after = freed_since(after, free_tracebacks(self._shell))
        came, went = cells.changes(self._before, after)
        report = CellReport(
            label=label,
            seconds=seconds,
            devices=self._devices(after, resident),
            came=came[: self._options.top],
            went=went[: self._options.top],
            outputs=kept_by(after, SegmentKind.OUTPUT),
            traceback={} if error is None else kept_by(after, SegmentKind.LAST_TRACEBACK),
            freed=freed,
            notes=notes,
            run_report=run_report,
            runs_out_in=runs_out,
        )
        if out_of_memory:
            report.holders = cells.holders(after)[:_HOLDERS_AFTER_OOM]
        return report

    # --- the watch ------------------------------------------------------------------------------------------

    def _end_watch(self, error: BaseException | None) -> tuple[RunReport | None, list[int | None], list[str]]:
        watch = self._watch
        if watch is None:
            return None, [], []
        watch.__exit__(None if error is None else type(error), error, None)
        report = watch.report
        runs_out: list[int | None] = []
        notes: list[str] = []
        if report is not None:
            report = msgspec.structs.replace(
                report, findings=[finding_in_words(finding, self._cell_of) for finding in report.findings]
            )
            runs_out, notes = _context(watch, report)
            notes = [main_left_out(note) for note in notes]
        if self._temporary is not None:
            self._temporary.cleanup()
        else:
            notes.append(f"the record is kept: memtriage report {watch.folder}")
        return report, runs_out, notes

    def _cell_of(self, file: str) -> str | None:
        """The cell that a file's name stands for: a kernel gives every cell's code a file of its own."""
        for path, number in getattr(self._shell.compile, "_filename_map", {}).items():
            if path == file or Path(path).name == file:
                return f"In[{number}]"
        return None

    # --- what was found -------------------------------------------------------------------------------------

    def _devices(self, after: Census, resident: int) -> list[DeviceUse]:
        old, new = cells.by_device(self._before), cells.by_device(after)
        uses = []
        indexes = cuda.devices() if cuda.initialized() else []
        for name in sorted({*old, *new, "cpu", *(f"cuda:{index}" for index in indexes)}, reverse=True):
            use = DeviceUse(device=name, before=old.get(name, 0), after=new.get(name, 0))
            if name == "cpu":
                use.peak = resident or None
            elif name.startswith("cuda:"):
                counters = cuda.counters(int(name[5:]))
                use.reserved = counters.reserved
                highest = counters.peak_allocated or 0
                use.peak = highest if highest > self._peaks.get(int(name[5:]), 0) else None
            uses.append(use)
        return uses


def _context(watch: Watch, report: RunReport) -> tuple[list[int | None], list[str]]:
    """Return what the record tells beside the report: steps until memory is used up, and notes."""
    from memtriage.diagnose.ranks.merge import context
    from memtriage.store.reader import read_run

    with suppress(RecordError, OSError):
        run_context = context(read_run([watch.folder]), report, live=True)
        return run_context.runs_out_in, run_context.notes
    return [None] * len(report.findings), []


def kept_by(census: Census, kind: SegmentKind) -> dict[str, int]:
    """Bytes that `Out` or the last traceback alone keeps, by device, where they are worth a sentence."""
    groups = [group for group in census.groups if has(group.anchor, kind)]
    total = cells.by_device(msgspec.structs.replace(census, groups=groups))
    return {device: nbytes for device, nbytes in total.items() if nbytes >= _LEAST_KEPT}


def freed_since(before: Census, frames: int) -> tuple[Freed, Census]:
    """Return what has gone since a census, and what is there now."""
    after = look()
    _, went = cells.changes(before, after)
    old, new = cells.by_device(before), cells.by_device(after)
    gone = {device: old[device] - new.get(device, 0) for device in old if old[device] > new.get(device, 0)}
    return Freed(bytes=gone, frames=frames, holders=went), after
