"""Runs a program with and without a watch, in folders with the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Final

from memtriage.session.remote.ask import AskError, ask

PROGRAMS: Final = Path(__file__).parents[1] / "faults" / "programs"
_WITHIN_S: Final = 300
_ASKED_EACH_S: Final = 0.2


@dataclass
class Outcome:
    """What a program leaves behind: exit status (negative: a signal), stdout, files by name.

    Attributes:
        answers: censuses that it took for those who asked.
    """

    status: int
    stdout: str
    files: dict[str, bytes]
    answers: int = field(default=0, compare=False)


def make_folder(base: Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
    """A folder with all programs and these files in it."""
    work = base / "work"
    shutil.copytree(PROGRAMS, work, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (files or {}).items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return work


def run(
    arguments: Sequence[str],
    cwd: Path,
    record: Path | None = None,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
    **popen: Any,
) -> Outcome:
    """Run a program, under a watch if `record` is given; `flags` are the interpreter's."""
    own = [] if record is None else ["-m", "memtriage", "run", "-o", str(record), *options]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    streams = {"stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, **popen}
    command = [sys.executable, *flags, *own, *arguments]
    ended, pipe = Event(), subprocess.PIPE
    with ThreadPoolExecutor(1) as threads:
        with subprocess.Popen(command, cwd=cwd, env=environ, stdout=pipe, text=True, **streams) as process:
            asked = threads.submit(_ask, process.pid, ended) if "--listen" in options else None
            try:
                stdout, _ = process.communicate(timeout=_WITHIN_S)
            finally:
                ended.set()
                process.kill()
        answers = asked.result() if asked is not None else 0
    files = {str(path.relative_to(cwd)): path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
    return Outcome(process.returncode, stdout, files, answers)


def _ask(pid: int, ended: Event) -> int:
    """Ask a program for censuses until it has ended; return how many it took."""
    answers = 0
    while not ended.wait(_ASKED_EACH_S):
        try:
            answers += ask(pid, _WITHIN_S).refused is None
        except AskError:  # it does not listen yet, or no more
            continue
    return answers


def run_both(
    tmp_path: Path,
    *arguments: str,
    files: Mapping[str, str | bytes] | None = None,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> tuple[Outcome, Outcome]:
    """Run a program without and with a watch and return what each leaves."""
    plain, watched = (make_folder(tmp_path / name, files=files) for name in ("plain", "watched"))
    with ThreadPoolExecutor(2) as threads:
        unwatched_run = threads.submit(run, arguments, plain, flags=flags)
        watched_run = threads.submit(run, arguments, watched, tmp_path / "record", options, flags)
        return unwatched_run.result(), watched_run.result()
