"""The command `memtriage`: hands `run` its arguments unread, and the other sub-commands to their parser."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from memtriage.cli import run
from memtriage.cli.output import Refusal
from memtriage.process.messages import complain

_NAMES: Final = {"darwin": "macOS", "win32": "Windows"}
_LINUX: Final = frozenset({"run", "census", "attach", "install-listener", "compare"})
"""They read Linux's counters of processes and glibc's of malloc."""
_POSIX: Final = frozenset({"predict", "plan", "gate"})
"""They trace a program in a child process that POSIX calls keep away from your files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 on bad usage and input that cannot be read.

    `run` exits as its script does.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Raises:
        KeyboardInterrupt: Ctrl-C, so that the process ends as the shell expects.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = "run" if run.is_run(arguments) else next(iter(arguments), "")
    if not {"-h", "--help"} & set(arguments[1:2]) and (why := refusal(command, sys.platform)) is not None:
        complain(f"memtriage {command}", why)
        return run.USAGE_STATUS
    if argv is None and command == "snapshot" and hasattr(os, "fork"):  # there is none on Windows
        status = _in_child()
        if status is not None:
            return status
    if command == "run":
        # Before any parser sees them: arguments after the script are the script's own.
        return run.main(arguments)
    # Imported late, as are the commands themselves: `run` must start as fast as the script alone.
    from memtriage.cli.commands import dispatch

    try:
        status = dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away (`| head`). The interpreter would complain at exit.
        _discard_output()
        return 0
    except Refusal as error:
        why = str(error)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        why = f"{error.filename}: {error.strerror}"
        if error.filename is None:
            _discard_output()
            why = "the output could not be written: no space left on the device"
    complain(f"memtriage {command}", why)
    return run.USAGE_STATUS


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refusal(command: str, platform: str) -> str | None:
    """Return why a command cannot work on a system, in one line; None where it can.

    Args:
        command: its name, e.g. `run`.
        platform: as `sys.platform`.
    """
    if platform == "linux" or command not in _LINUX | (_POSIX if platform == "win32" else frozenset()):
        return None
    traced = "" if platform == "win32" else "predict, plan, "
    elsewhere = f"{traced}explain, snapshot, report, top, holders, metrics and doctor work here"
    return f"needs Linux, and this is {_NAMES.get(platform, platform)}; {elsewhere}"


def _in_child() -> int | None:
    """Fork; return None in the child, which goes on, and the child's exit status in this process.

    A snapshot made for that purpose overflows the C stack of the process that reads it
    (`snapshots/file.py`). Then this process is left to say so.
    """
    child = os.fork()
    if not child:
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the child's, too
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    name = signal.Signals(-code).name
    given = " ".join(sys.argv[2:])
    why = "expected a memory snapshot: it is damaged, or made to do that"
    complain("memtriage snapshot", f"{given}: reading it ended the process ({name}); {why}")
    return 2
