"""Calls a function in a child process that can change no file, and returns what it returned.

The caller imports no torch and waits. The child gets no standard input. What it prints is kept aside, and
shown only on request or when the trace fails.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from memtriage.model.units import duration
from memtriage.prediction.sandbox.protection import LEVELS, ProtectionLevel
from memtriage.prediction.sandbox.supervise import BY_SIGNAL

T = TypeVar("T")

_POLL_S: Final = 0.5
"""Seconds between looks at whether the child still runs, while it sends nothing."""
_BEGIN: Final = "before the first step"
_READ_AT_ONCE: Final = 1 << 20

_ROOT: Final = str(Path(__file__).parents[3])
"""The folder of the package memtriage. The child looks there last, so that it hides no module."""
_START: Final = (
    "import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "from memtriage.prediction.sandbox.child import main; main()"
)
_TAIL: Final = 4096
"""Bytes of the child's output that are shown when it fails: some screens of a traceback."""
_CRASH: Final = b"Fatal Python error"
"""What `faulthandler` begins with."""


class ChildCall(msgspec.Struct, kw_only=True):
    """What the child is asked to do.

    Attributes:
        function: `package.module:name`; it takes `arguments` and returns a struct.
        arguments: keyword arguments, as JSON.
        scratch: an empty directory.
        wanted: paths that the program is likely to write to.
        network: connections are allowed.
        levels: ways to keep the program from changing files, see `protection.py`.
    """

    function: str
    arguments: dict[str, Any]
    scratch: str
    wanted: list[str]
    network: bool
    levels: tuple[ProtectionLevel, ...] = LEVELS


class Progress(msgspec.Struct, tag="progress"):
    """A few words about how far the child is."""

    text: str


class Refused(msgspec.Struct, tag="refused"):
    """The function raised a ValueError: one line for the user."""

    text: str


class Returned(msgspec.Struct, tag="returned"):
    """What the function returned, as JSON."""

    value: msgspec.Raw


_DECODER: Final = msgspec.json.Decoder(Progress | Refused | Returned)


class TraceFailed(Exception):
    """The child ended without a result.

    Args:
        text: one line for the user.
        output: the end of what the child printed.
    """

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


class TimedOut(TraceFailed):
    """The child was ended because it took too long."""


def call(
    function: str,
    arguments: dict[str, Any],
    returned: type[T],
    *,
    wanted: list[str],
    network: bool = False,
    levels: tuple[ProtectionLevel, ...] = LEVELS,
    output: int | None = None,
    progress: Callable[[str, float], None] = lambda text, seconds: None,
    timeout_s: float = math.inf,
) -> T:
    """Call a function in a child process that can change no file.

    Args:
        function: `package.module:name` of a function that returns a struct. A note about what the program
            wrote is added to its `notes`.
        arguments: its keyword arguments, of types that JSON has.
        returned: the type of what it returns.
        wanted: paths that the program is likely to write to.
        network: whether the program may open connections.
        levels: ways to keep it from changing files, tried in this order.
        output: descriptor that the program's output goes to; None to keep it aside.
        progress: is given, at least twice per second, how far the trace is, and the seconds since its begin.
        timeout_s: the child is ended after this time.

    Raises:
        ValueError: the function raised one; the text says what to change.
        TraceFailed: the child ended without a result.
        TimedOut: it was ended.
    """
    with (
        tempfile.TemporaryFile() as kept,
        tempfile.TemporaryFile() as asked,  # longer than an argument may be
        tempfile.TemporaryDirectory(prefix="memtriage-") as scratch,
    ):
        shown = kept.fileno() if output is None else output
        request = ChildCall(
            function=function,
            arguments=arguments,
            scratch=scratch,
            wanted=wanted,
            network=network,
            levels=levels,
        )
        asked.write(msgspec.json.encode(request))
        asked.seek(0)
        reading, writing = os.pipe()
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=_ROOT), str(writing), str(asked.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                pass_fds=(writing, asked.fileno()),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            answer = _answer(child, reading, progress, timeout_s)
        finally:
            os.close(reading)
            _end(child)
        if isinstance(answer, Returned):
            return msgspec.json.decode(answer.value, type=returned)
        if isinstance(answer, Refused):
            raise ValueError(answer.text)
        status = child.returncode
        number = -status if status < 0 else status - BY_SIGNAL
        names = {each.value: each.name for each in signal.Signals}
        how = f"by {names[number]}" if number in names else f"with status {status}"
        raise TraceFailed(f"the traced process ended {how} before the trace was done", _end_of(kept))


def _answer(
    child: subprocess.Popen[bytes],
    descriptor: int,
    progress: Callable[[str, float], None],
    timeout_s: float,
) -> Returned | Refused | None:
    """Read messages until one is an answer; None where the child ends before.

    The end of the child counts, not that of the pipe: what it has forked may keep that open.
    """
    received = b""
    begun, reached = time.monotonic(), _BEGIN
    while True:
        ended = child.poll() is not None
        seconds = time.monotonic() - begun
        if seconds > timeout_s and not ended:
            raise TimedOut(f"the trace was stopped after {duration(timeout_s)}, {reached}")
        progress(reached, seconds)
        if not select.select([descriptor], [], [], 0 if ended else _POLL_S)[0]:
            if ended:
                return None
            continue
        part = os.read(descriptor, _READ_AT_ONCE)
        if not part:
            return None
        *lines, received = (received + part).split(b"\n")
        for line in lines:
            message: Progress | Refused | Returned = _DECODER.decode(line)
            if not isinstance(message, Progress):
                return message
            reached = message.text
            progress(reached, seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it has left running."""
    if sys.platform == "linux":  # it ends its descendants
        child.terminate()
    else:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait()


def _end_of(kept: IO[bytes]) -> str:
    """Return the last output, or the beginning of a crash's stack: that has the innermost frame first."""
    size = kept.seek(0, os.SEEK_END)
    if not size:
        return ""
    with mmap.mmap(kept.fileno(), 0, access=mmap.ACCESS_READ) as output:  # a script may print much
        crash = output.rfind(_CRASH)
        begin = max(0, size - _TAIL) if crash < 0 else crash
        return output[begin : begin + _TAIL].decode(errors="replace").rstrip()
