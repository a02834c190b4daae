"""Chooses how the writes of a trace are kept from the user's files: the strongest way that the system allows.

| level | writes | are read back | subprocesses | network |
|---|---|---|---|---|
| `overlay` | go to memory | by all | same rule | loopback alone |
| `landlock` | refused by the kernel | by Python, torch, safetensors | refused | TCP refused |
| `python` | refused by hooks | by Python, torch, safetensors | none starts | refused by hooks |

At each level another process supervises the program, and ends what it leaves running.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from memtriage.prediction.sandbox.changes import Changes
from memtriage.prediction.sandbox.supervise import supervise

ProtectionLevel = Literal["overlay", "landlock", "python"]
LEVELS: Final[tuple[ProtectionLevel, ...]] = ("overlay", "landlock", "python")
"""From the strongest to the weakest."""


@dataclass(frozen=True, slots=True)
class Protection:
    """How this process is kept from changing files.

    Attributes:
        level: the way that was chosen.
        changes: what the program wrote and deleted up to now.
        notes: what the user should know of the level.
    """

    level: ProtectionLevel
    changes: Callable[[], Changes]
    notes: list[str] = field(default_factory=list)


def protect(
    scratch: str,
    wanted: Iterable[str] = (),
    network: bool = False,
    levels: Iterable[ProtectionLevel] = LEVELS,
) -> Protection:
    """Keep a process from changing files outside `scratch`, for the rest of its life, and return in it.

    On Linux it is a descendant of this process, which ends like it. Call this in a process of its own with a
    single thread, before torch is imported.

    Args:
        scratch: an empty directory.
        wanted: paths that the program is likely to write to.
        levels: the levels to try, in this order; the last one must be `python`, which works anywhere.
    """
    if not network:
        # Libraries would wait for an answer.
        for name, value in (("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "offline")):
            os.environ.setdefault(name, value)
    for level in levels:
        for own in (True, False) if level == "overlay" else ():
            enter = partial(_overlay, scratch, wanted, network, own)
            if _works_in_a_fork(enter):
                return enter()
        if level == "landlock" and _works_in_a_fork(lambda: _enforce_landlock(scratch, network)):
            return _landlock(scratch, network)
    return _python(scratch, network)


def _overlay(scratch: str, wanted: Iterable[str], network: bool, own_processes: bool) -> Protection:
    from memtriage.prediction.sandbox import overlay

    was_writable = os.access(".", os.W_OK)
    places = [os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir(), *wanted]
    changes = overlay.enter(scratch, places, network, own_processes)
    if was_writable and not os.access(".", os.W_OK):
        raise OSError(f"{os.getcwd()}: no overlay can be put on this directory")
    note = (
        "this system allows no /proc for a trace alone. Not protected: signals to and priorities of processes"
    )
    return Protection("overlay", changes, [] if own_processes else [note])


def _enforce_landlock(scratch: str, network: bool) -> list[str]:
    from memtriage.prediction.sandbox import landlock

    return landlock.enforce([scratch], network)


def _landlock(scratch: str, network: bool) -> Protection:
    from memtriage.prediction.sandbox import metadata

    supervisor, program = socket.socketpair()
    supervise(lambda: metadata.serve(supervisor, [scratch, "/dev/shm"]))
    supervisor.close()
    not_protected = _enforce_landlock(scratch, network)
    try:
        metadata.refuse(program)
    except OSError:
        not_protected.append("modes, owners, times and attributes of files")
    note = "this system allows no overlay: what a trace writes by other code than Python's is refused"
    note = f"{note}. Not protected: {', '.join(not_protected)}"
    return Protection("landlock", _redirected(scratch, network), [note])


def _python(scratch: str, network: bool) -> Protection:
    from memtriage.prediction.sandbox import guard

    supervise()
    files = _redirected(scratch, network)
    guard.refuse_files_and_processes(os.path.realpath(scratch))
    note = (
        "this system cannot refuse the writes of a process: hooks keep Python code from changing files, "
        "native code can still write; trace a copy of the program if that matters. Not protected: "
        "signals to and priorities of processes, SysV memory, the host's name"
    )
    return Protection("python", files, [note])


def _redirected(scratch: str, network: bool) -> Callable[[], Changes]:
    from memtriage.prediction.sandbox import guard, redirect
    from memtriage.prediction.sandbox.copy_on_write import CopyOnWrite

    copy, temporary = (os.path.join(scratch, name) for name in ("files", "tmp"))
    os.mkdir(copy)
    os.mkdir(temporary)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    files = CopyOnWrite(copy, temporary)
    redirect.install(files)
    redirect.install_native(files)
    if not network:
        guard.refuse_network()
    return files.changes


def _works_in_a_fork(enter: Callable[[], object]) -> bool:
    """Whether a way can be entered; a failed attempt would leave the process changed, so a fork tries it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            enter()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
