"""A process and all that it started: run to its end, within its time, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from memtriage.prove.command import TRIAL_VARIABLE

_GRACE_S: Final = 20.0
"""What processes get to end themselves: `memtriage run` writes its record meanwhile, torchrun stops its
workers."""
_GRACE_INTERRUPTED_S: Final = 5.0
_GONE_S: Final = 10.0
"""How long killed processes may take to disappear; a driver that frees much memory takes seconds."""
_LOOK_EVERY_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_code: its status; -N when signal N killed it.
        seconds: how long it ran.
        timed_out: it was stopped because its time was over.
    """

    exit_code: int
    seconds: float
    timed_out: bool


def run(
    command: Sequence[str], *, env: Mapping[str, str], directory: Path, log: Path, timeout_s: float | None
) -> Ended:
    """Run a command to its end; its output goes into `log`. Whatever it started is gone when this returns.

    Args:
        env: its environment, with `TRIAL_VARIABLE` in it.
        timeout_s: after so many seconds it is stopped; None for never.

    Raises:
        OSError: it cannot be started.
        BaseException: what interrupted the wait (`KeyboardInterrupt`), after all processes were stopped.
    """
    begun = time.monotonic()
    marker = env[TRIAL_VARIABLE]
    timed_out = False
    process = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=directory,
                start_new_session=True,  # Ctrl-C on the terminal is this process's to handle
            )
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        assert process is not None
        timed_out = True
        _stop(process, marker, _GRACE_S)
    except BaseException:
        if process is not None:
            _stop(process, marker, _GRACE_INTERRUPTED_S)
        _clear(marker, None)  # the interruption may have come before Popen could return
        raise
    _clear(marker, process.pid)
    return Ended(process.returncode, time.monotonic() - begun, timed_out)


def kill_leftovers(directory: Path) -> int:
    """Kill processes of trials whose folder is below `directory`, and return how many there were.

    For trials whose runner was killed itself: they would take the device's memory and time from the next.
    """
    inside = f"{directory}{os.sep}"
    leftovers = [process for process in _own() if _marker(process).startswith(inside)]
    _kill(leftovers)
    return len(leftovers)


def _stop(process: subprocess.Popen[bytes], marker: str, grace_s: float) -> None:
    """Ask the whole tree to end, then kill what is left of it; killed at once when interrupted again."""
    tree = _of_trial(marker, process.pid)
    try:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        _kill({*tree, *_of_trial(marker, process.pid)})
        process.kill()
        process.wait()


def _clear(marker: str, leader: int | None) -> None:
    """Kill what is left of a trial. Twice: while exec replaces a process, its environment reads as empty."""
    for _ in range(2):
        _kill(_of_trial(marker, leader))


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and wait until they are gone, and with them the memory that the next trial needs."""
    killed = list(processes)
    for process in killed:
        with suppress(psutil.Error):  # psutil knows a reused process id from the process it meant
            process.kill()
    deadline = time.monotonic() + _GONE_S
    while any(map(_alive, killed)) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def _alive(process: psutil.Process) -> bool:
    """Whether a process still holds anything: a zombie, which waits for a slow parent, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _of_trial(marker: str, leader: int | None) -> set[psutil.Process]:
    """Return a trial's processes but the leader: by environment, session and descent; each can fail alone.

    Programs that rename themselves overwrite their environment, torchrun's workers have sessions of their
    own, and orphans no longer descend from anybody.
    """
    own = _own()
    members = {process for process in own if _marker(process) == marker}
    if leader is not None:
        members |= {process for process in own if _session(process) == leader}
        with suppress(psutil.Error):
            members |= set(psutil.Process(leader).children(recursive=True))
    return {process for process in members if process.pid != leader}


def _own() -> list[psutil.Process]:
    user = os.getuid()
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.uids().real == user:
                processes.append(process)
    return processes


def _marker(process: psutil.Process) -> str:
    try:
        return process.environ().get(TRIAL_VARIABLE, "")
    except (psutil.Error, OSError):
        return ""


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None
