"""Have the job's other processes read by a process of the watch's own (`outside_helper.py`)."""

from __future__ import annotations

import _socket
import sys
from contextlib import suppress
from typing import Final

import msgspec

from memtriage.model.evidence import CensusSeen
from memtriage.process.descriptors import Descriptor
from memtriage.process.stdlib import os, time


class ReadRequest(msgspec.Struct):
    """Read a process.

    Attributes:
        pid: which.
        root: folder of the program's script.
        counts: follow the steps of its own loop from now on, if it trains.
    """

    pid: int
    root: str | None = None
    counts: bool = False


class ReadReply(msgspec.Struct, omit_defaults=True):
    """What was read, or counted.

    Attributes:
        pid: of which process.
        at: when, in seconds of the monotonic clock.
        took_s: seconds of a processor that the reading took.
        census: what was read; None where steps were counted, or nothing could be read.
        steps: completed passes of its loop; None where it has none.
        anonymous: bytes of its anonymous memory at that time.
        error: why it cannot be read, and will not be.
    """

    pid: int
    at: float
    took_s: float = 0.0
    census: CensusSeen | None = None
    steps: int | None = None
    anonymous: int | None = None
    error: str | None = None


_CODE: Final = "import sys; sys.path[:] = {path!r}; from memtriage.session.outside_helper import main; main()"
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_SEND: Final = _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT
_REPLY: Final = msgspec.json.Decoder(ReadReply)


class OutsideReader:
    """Asks for readings, and takes them when they are there. Never waits for one.

    The process takes two seconds of a processor until it has measured how Python and torch lay out their
    objects, and 250 MB while it runs.
    """

    def __init__(self) -> None:
        self._requests: Descriptor | None = None
        self._replies: Descriptor | None = None
        self._waiting = b""
        self._asked: set[int] = set()
        self._last_words = "it left no message"
        self._ended: str | None = None

    def ask(self, request: ReadRequest) -> str | None:
        """Ask for a reading; return why it will not come.

        The memory is opened here, by an ancestor of the process that is read: where `ptrace_scope` is 1, no
        other process of this user may.

        Raises:
            OSError: the reading process cannot be started, or the other one has ended.
        """
        if self._ended is not None:
            return self._ended
        try:
            opened = os.open(f"/proc/{request.pid}/mem", os.O_RDONLY)
        except PermissionError as error:
            from memtriage.outside.answer import missing_right  # rare, and it would load all of `outside`

            return f"{error.strerror} (errno {error.errno}); {missing_right(request.pid)}"
        try:
            self.start()
            assert self._requests is not None and self._requests.ours
            requests = _socket.socket(fileno=self._requests.number)
            rights = _socket.SOL_SOCKET, _socket.SCM_RIGHTS, opened.to_bytes(4, sys.byteorder)
            self._asked.add(request.pid)
            try:
                with suppress(BrokenPipeError):  # it has ended: `replies` says why
                    requests.sendmsg([msgspec.json.encode(request)], [rights], _SEND)
            finally:
                requests.detach()
        finally:
            os.close(opened)
        return None

    def replies(self) -> list[ReadReply]:
        """Return the readings that have come since the last call."""
        if self._replies is None:
            return []
        with suppress(BlockingIOError):
            while self._replies.ours and self._ended is None:
                if data := os.read(self._replies.number, 1 << 16):
                    self._waiting += data
                else:
                    self._ended = "the process that reads it has ended"
        *lines, self._waiting = self._waiting.split(b"\n")
        found = []
        for line in lines:
            if line.startswith(b"{"):
                found.append(_REPLY.decode(line))
                self._asked.discard(found[-1].pid)
            elif line.strip():
                self._last_words = line.decode(errors="replace")
        if self._ended is not None:
            self._ended = f"{self._ended}: {self._last_words}"
            now = time.monotonic()
            found += [ReadReply(pid, now, took_s=1.0, error=self._ended) for pid in self._asked]
            self.stop()
        return found

    def stop(self) -> None:
        """Let the process end."""
        for end in (self._requests, self._replies):
            if end is not None:
                end.close()
        self._requests = self._replies = None

    def start(self) -> None:
        """Start the process, if it does not run: it needs seconds before it can read.

        Raises:
            OSError: it cannot be started.
        """
        if self._requests is not None or self._ended is not None:
            return
        requests, own_end = (
            end.detach() for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        )
        own_start, replies = os.pipe()
        self._requests, self._replies = Descriptor(own_end), Descriptor(own_start)
        os.set_blocking(self._replies.number, False)
        code = _CODE.format(path=[*_path(), *_PACKAGE])
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-B", "-c", code],
                {**os.environ, **_ENVIRONMENT},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, requests, 0),
                    (os.POSIX_SPAWN_DUP2, replies, 1),
                    (os.POSIX_SPAWN_DUP2, replies, 2),
                ],
                setsigmask=[],
            )
            with suppress(ChildProcessError):  # the program may wait for all children itself
                os.waitpid(pid, 0)  # it has become two at once, of which the first has ended
        finally:
            os.close(requests)
            os.close(replies)


def _path() -> list[str]:
    """Return `sys.path` without the program's folder, whose modules may have the names of libraries."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = set()
    with suppress(OSError):  # the working directory may be gone
        own.add(os.path.realpath(""))
    if isinstance(main, str) and os.path.isabs(main):
        own.add(os.path.dirname(os.path.realpath(main)))
    return [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) not in own]


_PACKAGE: Final = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
"""Where this package is, which the program may have taken out of `sys.path`."""
