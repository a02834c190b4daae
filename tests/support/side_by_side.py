"""Runs a program as it is and under a watch, in folders of the same content, and compares what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROGRAMS: Final = Path(__file__).parents[1] / "faults" / "programs"
_WITHIN_S: Final = 300


@dataclass(frozen=True)
class Left:
    """What a program leaves: its exit status (negative: a signal), its stdout, its files by name."""

    status: int
    stdout: str
    files: dict[str, bytes]


def folder(base: Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
    """A folder with all programs and these files in it."""
    made = base / "work"
    shutil.copytree(PROGRAMS, made, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (files or {}).items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return made


def run(
    arguments: Sequence[str], cwd: Path, record: Path | None = None, options: Sequence[str] = (), **popen: Any
) -> Left:
    """Run a program, under a watch if there is a place for its record."""
    own = [] if record is None else ["-m", "memtriage", "run", "-o", str(record), *options]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *own, *arguments],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_WITHIN_S,
        **{"stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, **popen},
    )
    files = {str(path.relative_to(cwd)): path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
    return Left(found.returncode, found.stdout, files)


def both(
    tmp_path: Path,
    *arguments: str,
    files: Mapping[str, str | bytes] | None = None,
    options: Sequence[str] = (),
) -> tuple[Left, Left]:
    """What a program leaves by itself and under a watch."""
    plain, watched = (folder(tmp_path / name, files=files) for name in ("plain", "watched"))
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(run, arguments, plain)
        other = threads.submit(run, arguments, watched, tmp_path / "record", options)
        return one.result(), other.result()
