"""Ask a process that does not listen, through `sys.remote_exec` (PEP 768, Python 3.14 and newer).

The interpreter of the process runs a small script between two instructions of its main thread. The script
takes the census and writes the answer into a directory made for it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from memtriage.model.asked import Answer
from memtriage.model.units import duration
from memtriage.session.remote.ask import AskError
from memtriage.session.remote.listen import Deadline

NEEDED: Final = (3, 14)
_ANSWER: Final = "answer.json"
_SCRIPT: Final = "census.py"
_POLL_S: Final = 0.02
_PYTHON: Final = re.compile(r"/(?:lib)?python(\d)\.(\d+)[^/\s]*$", re.MULTILINE)
_PACKAGES: Final = ("memtriage", "msgspec", "numpy", "psutil")
"""What a census needs in addition to torch; if the process lacks them, the caller's are used."""


def python_of(pid: int) -> tuple[int, int] | None:
    """The version of Python that a process runs, by the names of its mapped files; None if unknown."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return None
    match = _PYTHON.search(maps)
    return None if match is None else (int(match[1]), int(match[2]))


def unable(pid: int) -> str | None:
    """Why a process that does not listen cannot be asked, and what to do; None if it may work."""
    theirs, own = python_of(pid), sys.version_info[:2]
    start = f"process {pid} does not listen (it was not started with `memtriage run --listen`)"
    if theirs is None:
        return f"{start}, and no Python was found in it; give the number of a training process"
    if theirs < NEEDED:
        return (
            f"{start}, and its Python {_version(theirs)} cannot be asked from outside, which needs Python "
            f"{_version(NEEDED)} (sys.remote_exec): start the job with `memtriage run --listen`"
        )
    if theirs != own or not hasattr(sys, "remote_exec"):
        return (
            f"{start}; asking its Python {_version(theirs)} from outside needs the same version here, and "
            f"this is Python {_version(own)}: run `python{_version(theirs)} -m memtriage census --pid {pid}`"
        )
    return None


def inject(pid: int, timeout_s: float, remote_exec: Callable[[int, str], Any] | None = None) -> Answer:
    """Have a process take a census of itself.

    Args:
        pid: the process.
        timeout_s: seconds within which it must answer.
        remote_exec: how a script is run in it; `sys.remote_exec` by default.

    Raises:
        AskError: asking is not permitted, or the process ended or reached no safe point in time.
    """
    deadline = Deadline(timeout_s)
    folder = Path(tempfile.mkdtemp(prefix="memtriage-census-"))
    request = _Request(pid, folder, remote_exec or _remote_exec)
    refused: str | None = None
    try:
        _give_to_owner(folder, pid)
        while True:
            answer = request.answer(deadline)
            if not answer.retry:
                return answer
            refused = answer.refused
            time.sleep(_POLL_S)
    except _NoSafePointError as error:
        why = str(error) if refused is None else f"gave no census in time: {refused}"
        raise AskError(f"process {pid} {why}") from None
    finally:
        if request.pending and os.path.exists(f"/proc/{pid}"):
            # The request cannot be withdrawn: when the process gets to it, it finds an empty script.
            request.script.write_text("")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class _NoSafePointError(Exception):
    """The main thread of the process did not get to the script in time."""


class _Request:
    """A script for a process to run, and the answer that it writes.

    Attributes:
        script: the file.
        pending: the process was asked to run it, and has not done so yet.
    """

    def __init__(self, pid: int, folder: Path, remote_exec: Callable[[int, str], Any]) -> None:
        self.script = folder / _SCRIPT
        self.pending = False
        self._pid = pid
        self._answer = folder / _ANSWER
        self._remote_exec = remote_exec

    def answer(self, deadline: Deadline) -> Answer:
        """Have the process run the script, and wait for what it writes.

        Raises:
            AskError: asking is not permitted, or the process ended.
            _NoSafePointError: it reached no safe point in time.
        """
        self._answer.unlink(missing_ok=True)
        self.script.write_text(_source(self._answer))
        self.script.chmod(0o644)  # its directory is closed to others
        self._tell()
        self.pending = True
        while not self._answer.exists():
            if not os.path.exists(f"/proc/{self._pid}"):
                raise AskError(f"process {self._pid} ended before it answered")
            if not deadline.left_s:
                raise _NoSafePointError(
                    f"came to no safe point in {duration(deadline.passed_s)}: it is stopped, or its main "
                    "thread in code outside of Python (a collective that waits)"
                )
            time.sleep(_POLL_S)
        self.pending = False
        return msgspec.json.decode(self._answer.read_bytes(), type=Answer)

    def _tell(self) -> None:
        try:
            self._remote_exec(self._pid, str(self.script))
        except PermissionError as error:
            raise AskError(
                f"process {self._pid} may not be asked ({error}): be its user or root, and let "
                "/proc/sys/kernel/yama/ptrace_scope be 0 or have CAP_SYS_PTRACE"
            ) from None
        except (OSError, RuntimeError) as error:
            raise AskError(_why(self._pid, error)) from None


def _why(pid: int, error: Exception) -> str:
    if not os.path.exists(f"/proc/{pid}"):
        return f"process {pid} ended before it answered"
    if "not enabled" in str(error):
        return (
            f"process {pid} has remote execution switched off (PYTHON_DISABLE_REMOTE_DEBUG, or "
            "-X disable_remote_debug): start the job without it, or with `memtriage run --listen`"
        )
    return f"process {pid} cannot be asked ({error}); start the job with `memtriage run --listen`"


def _remote_exec(pid: int, script: str) -> None:
    run: Callable[[int, str], None] = vars(sys)["remote_exec"]
    run(pid, script)


def _give_to_owner(folder: Path, pid: int) -> None:
    """Let another user's process, asked by root, write its answer there."""
    try:
        owner = os.stat(f"/proc/{pid}")
        if owner.st_uid != os.geteuid():
            os.chown(folder, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise AskError(f"process {pid} may not be asked ({error.strerror})") from None


def _source(answer: Path) -> str:
    """The script. It imports memtriage as the process would, else from the caller's folders."""
    return f"""\
def _ask(answer, folders):
    import sys

    borrowed = None
    try:
        try:
            from memtriage.session.remote.inject_target import answer_into
        except ImportError:
            borrowed = folders[0]
            sys.path.extend(folders)
            from memtriage.session.remote.inject_target import answer_into
        answer_into(answer, borrowed)
    except BaseException as error:
        import json, os

        said = {{"pid": os.getpid(), "refused": f"{{type(error).__name__}}: {{error}}"}}
        with open(answer + ".partial", "w") as file:
            json.dump(said, file)
        os.replace(answer + ".partial", answer)
    finally:
        if borrowed is not None:
            del sys.path[-len(folders) :]


_ask({str(answer)!r}, {_folders()!r})
"""


def _folders() -> list[str]:
    """Return the folders from which this process imported memtriage and its packages, memtriage's first."""
    folders: dict[str, None] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders[os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))] = None
    return list(folders)


def _version(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
