"""Read a process with its own interpreter, if that is another build than this one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Final

_HANDED_OVER: Final = "MEMTRIAGE_HANDED_OVER"
"""Set in the command that was handed over: it hands nothing over again."""
_NEEDED: Final = "memtriage.outside"
_IMPORT_WITHIN_S: Final = 60


def run_there(python: str, pid: int, arguments: Sequence[str]) -> int | None:
    """Run a command of memtriage in a process's interpreter; return its exit status.

    Returns None where that interpreter is not run: it has no memtriage, it is not the program of the process,
    or the process belongs to another user, whose files this user does not run.

    Args:
        python: path of the interpreter.
        arguments: of `memtriage`.
    """
    try:
        own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        is_program = os.path.samefile(python, f"/proc/{pid}/exe")
    except OSError:
        return None
    if not own or not is_program or _HANDED_OVER in os.environ:
        return None
    try:
        found = subprocess.run(
            [python, "-c", f"import {_NEEDED}"],
            capture_output=True, check=False, timeout=_IMPORT_WITHIN_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode != 0:
        return None
    command = [python, "-m", "memtriage", *arguments]
    return subprocess.run(command, check=False, env=os.environ | {_HANDED_OVER: "1"}).returncode
