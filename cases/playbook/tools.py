"""Runs jobs and memtriage's commands as users do, each in a process of its own, and returns their JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JOBS = HERE / "jobs"
DEADLINE_S = 300
SHOWN_ERROR = 1500
PLAIN_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""On a CPU the address space is limited. Each further arena of malloc reserves 64 MiB of it, and tensors
below 32 MiB leave holes in its heap unless they are mapped one by one."""


@dataclass(slots=True)
class Watched:
    """A job under `memtriage run`.

    Attributes:
        report: memtriage's JSON.
        said: what the job itself printed as JSON, last line; empty where it died before.
        stderr: of the job and of memtriage.
        status: the exit status.
    """

    report: dict[str, Any]
    said: dict[str, Any]
    stderr: str
    status: int
    findings: list[dict[str, Any]] = field(default_factory=list)

    def finding(self, kind: str) -> dict[str, Any]:
        """The first finding of a kind.

        Raises:
            LookupError: there is none.
        """
        for finding in self.findings:
            if finding["kind"] == kind:
                return finding
        raise LookupError(
            f"memtriage made no finding of kind {kind!r}: verdict {self.report['verdict']}, findings "
            f"{[(finding['kind'], finding['playbook']) for finding in self.findings]}"
        )


def python(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A Python process with these arguments, started in this folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=surroundings(environment), cwd=HERE, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


def lines_of(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """What a Python process prints, line by line as it comes; its stderr is this process's."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=surroundings(environment),
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield from process.stdout


def surroundings(environment: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a process: this one's without settings of the allocator, on one thread."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTORCH_CUDA_ALLOC_CONF"}
    where = os.environ.get("PYTHONPATH")
    if where:  # it may be relative, and these processes start elsewhere
        inherited["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, where.split(os.pathsep)))
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**inherited, **settings, **(environment or {})}


def job(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a job prints as its last line, run without memtriage's watch."""
    done = python(str(JOBS / name), *arguments, environment=environment)
    return last_json(done)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON in the last line of what a process printed.

    Raises:
        RuntimeError: there is none; the text is the end of its stderr.
    """
    lines = done.stdout.strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-SHOWN_ERROR:]}") from error
    return report


def watched(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Watched:
    """A job under `memtriage run`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        done = python(
            "-m", "memtriage", "run", "-o", folder, "--json", str(report), str(JOBS / name), *arguments,
            environment=environment,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"no report, exit status {done.returncode}: {done.stderr[-SHOWN_ERROR:]}")
        read = json.loads(report.read_text())
    lines = done.stdout.strip().splitlines()
    said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return Watched(read, said, done.stderr, done.returncode, read["findings"])


def memtriage(command: str, *arguments: str) -> dict[str, Any]:
    """The JSON of one of memtriage's commands.

    Raises:
        RuntimeError: it failed; the text is what it wrote on stderr.
    """
    done = python("-m", "memtriage", command, *arguments, "--json")
    if done.returncode:
        raise RuntimeError(f"memtriage {command}: {done.stderr[-SHOWN_ERROR:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def explain(text: str) -> dict[str, Any]:
    """`memtriage explain` of an error text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "error.txt")
        file.write_text(text)
        return memtriage("explain", str(file))


def error_line(stderr: str, words: Sequence[str] = ("out of memory", "can't allocate")) -> str:
    """The line of a traceback that says what failed."""
    for line in stderr.splitlines():
        if any(word in line for word in words) and "Error" in line:
            return line.strip()
    raise LookupError(f"no error about memory in: {stderr[-SHOWN_ERROR:]}")
