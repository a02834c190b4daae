"""What the cases' `measure.py` share: a script under `memtriage run`, in processes of its own, within a time.

A row of results is what a process wrote; what could not be measured is a row that says why.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

TOLD: Final = (
    "kind", "device", "bytes", "bytes_per_step", "bytes_per_microbatch", "holder", "allocated_at",
    "mechanism", "fix", "playbook", "evidence",
)  # fmt: skip
"""Of a finding, what a case keeps."""
LAST_WORDS: Final = 600
"""Characters of an output that tell why a process failed."""
TRACEBACK: Final = 40
"""Lines of a traceback that are kept, its last ones."""
ERROR_LINES: Final = 3
"""Of these, lines of the error's text."""
_FLUSH: Final = re.compile(r"(\[\w+\]: ?)?[^\s\[]")
"""A line that is not indented, behind the rank that torch puts before it."""
WORTH_STARTING_S: Final = 5


def about(*packages: str) -> dict[str, Any]:
    """Date, device and versions; of these packages too, where installed."""
    import torch

    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if gpus else f"CPU, {platform.machine()}"
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": time.strftime("%Y-%m-%d"), "device": name, "gpus": gpus, "cpus": os.cpu_count(),
        "versions": versions,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A script to be watched.

    Attributes:
        name: of the row.
        script: its path.
        arguments: what follows it.
        ranks: above 1 it runs under torchrun.
        environment: variables in addition to the inherited ones.
        watched: under `memtriage run`; else as it is.
        per_microbatch: with `--per-microbatch`.
    """

    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    environment: Mapping[str, str] | None = None
    watched: bool = True
    per_microbatch: bool = False

    def command(self, folder: Path) -> list[str]:
        launch = [sys.executable]
        if self.ranks > 1:
            launch += ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", "--standalone"]
        if self.watched:
            launch += [
                "-m",
                "memtriage",
                "run",
                "-o",
                str(folder / "run"),
                "--json",
                str(folder / "report.json"),
            ]
            launch += ["--per-microbatch"] if self.per_microbatch else []
        return [*launch, str(self.script), *self.arguments, "--out", str(folder / "figures.json")]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        figures: what the script wrote to `--out`; None when it did not come so far.
        report: memtriage's, as `run --json` writes it; None when not watched.
        said: what went to stderr.
        seconds: the process took.
    """

    figures: dict[str, Any] | None
    report: dict[str, Any] | None
    said: str
    seconds: float


def run(job: Job, limit_s: float) -> Outcome:
    """Runs a job.

    Raises:
        TimeoutError: it took longer than `limit_s`; all its processes were ended.
        RuntimeError: it wrote neither figures nor a report; the text ends as its stderr does.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        process = subprocess.Popen(
            job.command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(job.environment or {})}, start_new_session=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {limit_s:.0f} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        figures, report = (_read(folder / name) for name in ("figures.json", "report.json"))
        if figures is None and report is None:
            raise RuntimeError(f"exit status {process.returncode}: {said.strip()[-LAST_WORDS:]}")
        return Outcome(figures, report, said, round(time.perf_counter() - began, 1))


def run_all(
    jobs: Sequence[Job], *, at_a_time: int, limit_s: float, within_s: float
) -> Iterator[tuple[Job, Outcome | str]]:
    """Runs the jobs and gives each with its outcome, or with why there is none, as they end.

    Args:
        jobs: the first ones begin first.
        at_a_time: how many run side by side: more than one only where nothing is timed.
        limit_s: seconds for each.
        within_s: seconds for all: what has not begun by then is left out.
    """
    deadline = time.monotonic() + within_s

    def outcome(job: Job) -> Outcome | str:
        left = deadline - time.monotonic()
        if left < WORTH_STARTING_S:
            return f"not begun within {within_s:.0f} s"
        try:
            return run(job, min(limit_s, left))
        except (TimeoutError, RuntimeError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(at_a_time) as pool:
        running = {pool.submit(outcome, job): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


def why(outcome: Outcome) -> str:
    """Why a script did not come to its end: its last traceback, else what memtriage or the launcher say."""
    lines = outcome.said.splitlines()
    starts = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    blocks = [_traceback(lines[at:end]) for at, end in pairwise([*starts, len(lines)])]
    of_script = [block for block in blocks if "torch/distributed/run" not in "".join(block)]
    if of_script:
        return "\n".join(of_script[-1])
    told = None if outcome.report is None else outcome.report["exception"]
    return str(told or outcome.said.strip()[-LAST_WORDS:])


def _traceback(lines: list[str]) -> list[str]:
    """From a traceback's first line to a little behind its error."""
    error = next((at for at, line in enumerate(lines[1:], 1) if _FLUSH.match(line)), len(lines))
    return lines[: error + ERROR_LINES][-TRACEBACK:]


def findings(report: Mapping[str, Any] | None, kinds: Iterable[str]) -> list[dict[str, Any]]:
    """The findings of these kinds, with what a case keeps of each."""
    found = [] if report is None else report["findings"]
    return [{name: finding.get(name) for name in TOLD} for finding in found if finding["kind"] in set(kinds)]


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report
