"""Python processes that a test reads from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def job_of(program: str, *arguments: str, says: str = "ready") -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block, which begins when it has printed a line.

    Args:
        program: its source.
        arguments: those of its command line.
        says: the line; with an empty text it is left to the block.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as job:  # fmt: skip
        try:
            assert not says or next_line(job) == says
            yield job
        finally:
            job.kill()


def next_line(job: subprocess.Popen[str]) -> str:
    """Return the next line that a job prints."""
    assert job.stdout is not None
    return job.stdout.readline().rstrip("\n")


def told(job: subprocess.Popen[str], line: str = "") -> str:
    """Send a job a line, and return the next one that it prints."""
    assert job.stdin is not None
    job.stdin.write(f"{line}\n")
    job.stdin.flush()
    return next_line(job)
