"""Answer requests for a census of a running job: `memtriage run --listen`.

A thread sleeps in `accept` and costs nothing until a process connects. Only the user who runs the job, and
root, get an answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from memtriage.model.asked import Answer, Question
from memtriage.process import active
from memtriage.process.descriptors import Descriptor, close_socket, own_socket
from memtriage.process.json_text import encode
from memtriage.process.stdlib import os, time
from memtriage.process.threads import OwnThread
from memtriage.session.remote.socket_path import PlaceError, leave, name_of, place, remove_stale

CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred` of `SO_PEERCRED`: process, user, group."""
LONGEST_QUESTION: Final = 4096
_READ_WITHIN_S: Final = 2.0
_WRITE_WITHIN_S: Final = 30.0
_STOP_WITHIN_S: Final = 2.0
_TRY_AGAIN_S: Final = 0.1
_BACKLOG: Final = 8


class Listener:
    """Listens at this process's socket, from `start` to `stop`. Nothing here raises into the program.

    Args:
        answer: takes the census; called in the listener's thread with the seconds that it may wait, and
            whether the census will be compared with later ones.
        say: prints what the user should know.
    """

    def __init__(
        self, answer: Callable[[float, bool], Answer], say: Callable[[str], None] | None = None
    ) -> None:
        self.path: Path | None = None
        self._answer = answer
        self._say = say
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._descriptor: Descriptor | None = None
        self._stopping = False
        self._thread = OwnThread(self._serve)

    def start(self) -> None:
        """Begin to listen; if that is impossible, say so, and the run continues."""
        if active.listener is not None:
            active.listener.stop()
        try:
            try:
                self._listen_at(place())
            except FileNotFoundError:  # the last process listening there has just removed it
                self._listen_at(place())
            self._thread.start()
            active.listener = self
        except (OSError, PlaceError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.stop()
            self._tell(f"cannot listen ({error}); the run continues, but cannot be asked for a census")
            return
        self._tell(f"listening: `memtriage census --pid {self._pid}` asks for a census while this runs")

    def _listen_at(self, directory: Path) -> None:
        remove_stale(directory)
        path = directory / name_of(self._pid)
        self._socket, self._descriptor = own_socket(_bound(path))
        self.path = path

    def stop(self) -> None:
        """End the thread and remove the socket. May be called twice; does nothing in a forked child."""
        if self._socket is None or self._descriptor is None or self._stopping or os.getpid() != self._pid:
            return
        self._stopping = True
        if active.listener is self:
            active.listener = None
        if self.path is not None:
            leave(self.path)
        if self._descriptor.ours:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing would not
        self._thread.join(timeout=_STOP_WITHIN_S)
        close_socket(self._socket, self._descriptor)

    def _tell(self, text: str) -> None:
        if self._say is not None:
            self._say(text)

    def _serve(self) -> None:
        assert self._socket is not None and self._descriptor is not None
        while self._descriptor.ours:  # else the program has closed it, and nobody can ask any more
            try:
                connection, descriptor = own_socket(self._socket.accept()[0])
            except OSError:
                if self._stopping:
                    return
                # For example, no free file descriptor. That passes, and later requests are answered.
                time.sleep(_TRY_AGAIN_S)
                continue
            try:
                self._serve_one(connection, descriptor)
            except (OSError, ValueError):  # the other end is gone, or its request is invalid
                continue
            finally:
                close_socket(connection, descriptor)

    def _serve_one(self, connection: socket.socket, descriptor: Descriptor) -> None:
        if peer(connection)[1] not in (os.geteuid(), 0):
            return
        connection.settimeout(_READ_WITHIN_S)
        question = msgspec.json.decode(read_line(connection, LONGEST_QUESTION), type=Question)
        try:
            text = encode(self._answer(question.within_s, question.follow))
        except Exception as error:  # the run and this thread continue, whatever makes a census fail
            refused = f"the census failed ({type(error).__name__}: {error})"
            text = encode(Answer(pid=self._pid, refused=refused))
        if descriptor.ours:  # else it is another file by now
            connection.settimeout(_WRITE_WITHIN_S)
            connection.sendall(text + b"\n")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel noted them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, group = CREDENTIALS.unpack(data)
    return pid, user, group


def read_line(connection: socket.socket, longest: int) -> bytes:
    """Read up to the end of a line.

    Raises:
        ValueError: the line is longer than `longest` bytes, or incomplete.
        OSError: the connection failed or timed out.
    """
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        data = connection.recv(65536)
        size += len(data)
        if not data or size > longest:
            raise ValueError(f"expected a line of at most {longest:,} bytes; got {size:,} and no end")
        parts.append(data)
    return b"".join(parts)


def _bound(path: Path) -> socket.socket:
    """Return a listening socket that only this user can connect to."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Its directory keeps others out from the beginning; the mode does so again.
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


class Deadline:
    """An instant `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._at = self._began + max(0.0, seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; never below 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began
