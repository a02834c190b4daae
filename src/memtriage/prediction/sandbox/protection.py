"""Chooses how the writes of a trace are kept from the user's files: the strongest way that the system allows.

| level | writes | are read back | subprocesses | network |
|---|---|---|---|---|
| `overlay` | go to memory | by all | same rule | loopback alone |
| `landlock` | refused by the kernel | by Python, torch, safetensors | refused | TCP refused |
| `python` | refused by hooks | by Python, torch, safetensors | none starts | refused by hooks |
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from memtriage.prediction.sandbox.changes import Changes

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
    """Keep this process from changing files outside `scratch`, for the rest of its life.

    Call it in a process of its own with a single thread, before torch is imported.

    Args:
        scratch: an empty directory.
        wanted: paths that the program is likely to write to.
        network: whether connections are allowed.
        levels: the levels to try, in this order; the last one must be `python`, which works anywhere.
    """
    if not network:
        _tell_clients_that_the_network_is_off()
    for level in levels:
        if level == "overlay" and _works_in_a_fork(lambda: _overlay(scratch, wanted, network)):
            return _overlay(scratch, wanted, network)
        if level == "landlock" and _works_in_a_fork(lambda: _enforce_landlock(scratch, network)):
            return _landlock(scratch, network)
    return _python(scratch, network)


def _overlay(scratch: str, wanted: Iterable[str], network: bool) -> Protection:
    from memtriage.prediction.sandbox import overlay

    was_writable = os.access(".", os.W_OK)
    places = [os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir(), *wanted]
    entered = overlay.enter(scratch, places, network)
    if was_writable and not os.access(".", os.W_OK):
        raise OSError(f"{os.getcwd()}: no overlay can be put on this directory")
    return Protection("overlay", entered.changes)


def _enforce_landlock(scratch: str, network: bool) -> None:
    from memtriage.prediction.sandbox import landlock

    landlock.enforce([scratch], network)


def _landlock(scratch: str, network: bool) -> Protection:
    _enforce_landlock(scratch, network)
    note = "this system allows no overlay: what a trace writes by other code than Python's is refused"
    return Protection("landlock", _redirected(scratch, network), [note])


def _python(scratch: str, network: bool) -> Protection:
    from memtriage.prediction.sandbox import guard

    files = _redirected(scratch, network)
    guard.refuse_files_and_processes(os.path.realpath(scratch))
    note = (
        "this system cannot refuse the writes of a process: hooks keep Python code from changing files, "
        "native code can still write; trace a copy of the program if that matters"
    )
    return Protection("python", files, [note])


def _redirected(scratch: str, network: bool) -> Callable[[], Changes]:
    from memtriage.prediction.sandbox import guard, redirect
    from memtriage.prediction.sandbox.copy_on_write import CopyOnWrite

    copy, temporary = (os.path.join(scratch, name) for name in ("files", "tmp"))
    os.mkdir(copy)
    os.mkdir(temporary)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    files = CopyOnWrite(copy)
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


def _tell_clients_that_the_network_is_off() -> None:
    """Tell libraries that would wait for an answer, by their own settings, unless the user set them."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "offline")):
        os.environ.setdefault(name, value)
