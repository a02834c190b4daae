"""The answer for a process that is read from outside, in the form of listening processes' answers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from memtriage.model.asked import Answer, HeldHere
from memtriage.model.units import count, duration
from memtriage.outside.census import OutsideCensus, take_census
from memtriage.outside.memory import ForbiddenError, OutsideError

_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_LISTEN = "let later jobs listen: `memtriage install-listener`"


def read_answer(pid: int, timeout_s: float, *, pause_s: float = 0.0) -> Answer:
    """Read a process's census from outside. See `memtriage.outside.census.take_census`.

    Args:
        timeout_s: seconds for each reading.
        pause_s: seconds for which it may be stopped.

    Raises:
        OtherBuildError: it has another build of Python or torch.
        OutsideError: it cannot be read. The text is one line for the user.
    """
    began = time.time()
    try:
        census = take_census(pid, pause=pause_s > 0, pause_s=pause_s, within_s=timeout_s)
    except ForbiddenError as error:
        raise OutsideError(why_refused(error, pid)) from None
    return Answer(
        pid=pid,
        host=socket.gethostname(),
        argv=arguments(pid),
        time=began,
        paused_s=round(census.stopped_s, 6),
        holders=_rows(census),
        objects=census.objects,
        nodes=census.nodes,
        incomplete=census.missing,
        notes=[_way(census), *census.notes],
    )


def _rows(census: OutsideCensus) -> list[HeldHere]:
    return [
        HeldHere(
            device=group.device,
            holder_path=group.path,
            count=group.count,
            bytes=group.nbytes,
            owners=group.owners,
        )
        for group in census.groups
    ]


def _way(census: OutsideCensus) -> str:
    text = f"read from outside in {duration(census.seconds)}, without ledgers"
    if census.moved is None:
        return f"{text}; the process was stopped for {duration(census.stopped_s)}"
    if not census.moved:
        return text
    return f"{text} and without {count(census.moved, 'storage')} that came and went meanwhile"


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; nothing where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0")[:-1]]


def why_refused(error: OutsideError, pid: int, command: str = "census --pid") -> str:
    """Return an error in one line for the user, with the right that is missing if one is."""
    return f"{error}: {missing_right(pid, command)}" if isinstance(error, ForbiddenError) else str(error)


def missing_right(pid: int, command: str = "census --pid") -> str:
    """Return why the kernel refuses to read a process, and the command that grants it."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "it ended"
    if os.geteuid() not in (owner, 0):
        return f"it belongs to user {owner}; run `sudo -u '#{owner}' memtriage {command} {pid}`"
    try:
        scope = _SCOPE.read_text().strip()
    except OSError:
        scope = "0"
    if os.geteuid() == 0:  # with all rights of root, no ptrace_scope but 3 would forbid it
        scope = "3" if scope == "3" else "0"
    if scope in ("1", "2"):
        return (
            f"ptrace_scope is {scope}; run memtriage with sudo, or allow it once with "
            "`echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope`"
        )
    if scope == "3":
        return f"ptrace_scope is 3, which only a reboot changes; {_LISTEN}"
    return (
        "a container or a security module forbids it; start the container with "
        f"`--cap-add=SYS_PTRACE`, run memtriage on its host, or {_LISTEN}"
    )
