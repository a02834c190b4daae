"""One trial: run in a folder of its own, and how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Final, Literal

import msgspec

from memtriage.diagnose.ranks.killed import fate, killed_note
from memtriage.diagnose.ranks.merge import merge
from memtriage.messages.explain import explain
from memtriage.model.findings import Finding
from memtriage.model.report import RunReport
from memtriage.model.units import duration
from memtriage.prove.command import command, environment, record_directory, torch_version
from memtriage.prove.processes import Ended, run
from memtriage.prove.trials import Trials, Variant
from memtriage.store.locate import RecordError
from memtriage.store.reader import RunRecord, read_run

LOG: Final = "log.txt"
END: Final = "trial.json"
"""Written when a trial has ended, and not before: where it is missing the trial is run again."""

_LOG_TAIL: Final = 256 * 1024
_LONGEST_ERROR: Final = 300
_SURE: Final = 0.6
"""How sure `memtriage explain` must be for its word on a log to go into the table."""

TrialOutcome = Literal["finished", "crashed", "out_of_memory", "killed", "timed_out"]


class TrialEnd(msgspec.Struct, kw_only=True, frozen=True):
    """How a trial ended, as its folder keeps it.

    Attributes:
        schema: version of this form.
        variant, round: which trial.
        settings: what decides how it ran, by name, to notice a change of it.
        outcome: how it ended.
        exit_code: its exit status; -N when signal N killed it.
        error: what went wrong, in a sentence; None when nothing did.
        started: Unix time.
        seconds: how long it took, the start of the interpreter included.
        host: machine.
        devices: `CUDA_VISIBLE_DEVICES` of the trial; None where it was not set.
    """

    schema: int = 1
    variant: str
    round: int
    settings: dict[str, str]
    outcome: TrialOutcome
    exit_code: int
    error: str | None = None
    started: float
    seconds: float
    host: str
    devices: str | None = None


def run_trial(
    trials: Trials, variant: Variant, number: int, settings: dict[str, str], folder: Path
) -> TrialEnd:
    """Run one trial and return how it ended; its folder then has record, log and `END`.

    Args:
        number: of the round.
        settings: see `TrialEnd`.
        folder: emptied first.

    Raises:
        OSError: the folder cannot be written.
        BaseException: what interrupted it; no `END` is written then, and no process is left.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    env = environment(variant, os.environ, folder, torch_version(trials.python))
    started = time.time()
    log = folder / LOG
    try:
        ended = run(
            command(trials, variant, folder),
            env=env,
            directory=trials.directory,
            log=log,
            timeout_s=trials.timeout_s,
        )
    except OSError as error:
        log.write_text(f"{error}\n", "utf-8")
        ended = Ended(exit_code=127, seconds=0.0, timed_out=False)
    record = _record(folder)
    report = None if record is None else merge(record)
    outcome = _outcome(ended, report)
    end = TrialEnd(
        variant=variant.name,
        round=number,
        settings=settings,
        outcome=outcome,
        exit_code=ended.exit_code,
        error=_error(outcome, ended, log, trials.timeout_s, _recorded(record, report)),
        started=started,
        seconds=ended.seconds,
        host=socket.gethostname(),
        devices=env.get("CUDA_VISIBLE_DEVICES"),
    )
    write_end(end, folder)
    return end


def write_end(end: TrialEnd, folder: Path) -> None:
    """Say in a trial's folder that it has ended; whole or not at all."""
    partial = folder / f".{END}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(end), indent=2) + b"\n")
    partial.replace(folder / END)


def read_end(folder: Path) -> TrialEnd | None:
    """Return how the trial of a folder ended; None when it did not, or what it left cannot be read."""
    try:
        return msgspec.json.decode((folder / END).read_bytes(), type=TrialEnd)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def log_tail(log: Path) -> str:
    """Return the last lines of a log; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _record(folder: Path) -> RunRecord | None:
    try:
        return read_run([record_directory(folder)])
    except RecordError:
        return None


def _of_memory(report: RunReport) -> list[Finding]:
    """Return what says that memory ran out; a warning of a later step does not."""
    kinds = ("out_of_memory", "host_limit")
    return [finding for finding in report.findings if finding.kind in kinds and not finding.ahead]


def _outcome(ended: Ended, report: RunReport | None) -> TrialOutcome:
    if ended.timed_out:
        return "timed_out"
    if ended.exit_code == 0:
        return "finished"
    if report is not None and _of_memory(report):
        return "out_of_memory"
    if ended.exit_code < 0 or (report is not None and report.verdict == "killed"):
        return "killed"
    return "crashed"


def _recorded(record: RunRecord | None, report: RunReport | None) -> str | None:
    """Return what the record says of the end: an exception, memory that ran out, ranks that were killed."""
    if record is None or report is None:
        return None
    if report.exception is not None:
        return report.exception
    if of_memory := _of_memory(report):
        return of_memory[0].mechanism
    killed = [rank for rank in record.ranks if fate(rank) == "killed"]
    return killed_note(killed[0], record.ranks) if killed else None


def _error(
    outcome: TrialOutcome, ended: Ended, log: Path, timeout_s: float | None, recorded: str | None
) -> str | None:
    match outcome:
        case "finished":
            return None
        case "timed_out":
            return f"stopped after {duration(timeout_s)}"
        case "killed" if ended.exit_code < 0:
            said = f"killed by {_signal_name(-ended.exit_code)}{_explained(log)}"
        case _:
            said = recorded or _last_words(log)
    return _cut(said or f"exit status {ended.exit_code}")


def _explained(log: Path) -> str:
    """Return what the log proves of the cause, where it proves anything of memory."""
    explained = explain(log_tail(log))
    unproven = explained.diagnosis in ("unknown", "killed_unproven", "not_memory", "informational")
    if unproven or explained.confidence < _SURE or not explained.evidence:
        return ""
    return f": {explained.evidence[0]}"


def _last_words(log: Path) -> str:
    """Return the last line that has words in it and is not memtriage's own."""
    lines = [line.strip() for line in log_tail(log).splitlines()]
    spoken = (line for line in reversed(lines) if any(map(str.isalnum, line)))
    return next((line for line in spoken if not line.startswith("memtriage:")), "")


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 1]}…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
