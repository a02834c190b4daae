"""Have the job's other processes read by a process of the watch's own (`outside_helper.py`)."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final

import msgspec

from memtriage.process.descriptors import Descriptor
from memtriage.process.stdlib import os
from memtriage.session.outside_helper import ReadReply, ReadRequest

_CODE: Final = "import sys; sys.path[:] = {path!r}; from memtriage.session.outside_helper import main; main()"
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_REPLY: Final = msgspec.json.Decoder(ReadReply)


class OutsideReader:
    """Asks for readings, and takes them when they are there. Never waits for one.

    The first request starts the process: it takes two seconds of a processor until it has measured how
    Python and torch lay out their objects, and 250 MB while it runs.
    """

    def __init__(self) -> None:
        self._requests: Descriptor | None = None
        self._replies: Descriptor | None = None
        self._waiting = b""

    def ask(self, request: ReadRequest) -> None:
        """Ask for a reading.

        Raises:
            OSError: the process cannot be started, or has ended.
        """
        if self._requests is None:
            self._start()
        assert self._requests is not None
        data = memoryview(msgspec.json.encode(request) + b"\n")
        while data:
            data = data[self._requests.write(data) :]

    def replies(self) -> list[ReadReply]:
        """Return the readings that have come since the last call."""
        if self._replies is None:
            return []
        with suppress(BlockingIOError):
            while self._replies.ours and (data := os.read(self._replies.number, 1 << 16)):
                self._waiting += data
        *lines, self._waiting = self._waiting.split(b"\n")
        return [_REPLY.decode(line) for line in lines]

    def stop(self) -> None:
        """Let the process end."""
        for end in (self._requests, self._replies):
            if end is not None:
                end.close()
        self._requests = self._replies = None

    def _start(self) -> None:
        requests, own_end = os.pipe()
        own_start, replies = os.pipe()
        self._requests, self._replies = Descriptor(own_end), Descriptor(own_start)
        os.set_blocking(self._replies.number, False)
        code = _CODE.format(path=[*sys.path, *_PACKAGE])
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-c", code],
                {**os.environ, **_ENVIRONMENT},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, requests, 0),
                    (os.POSIX_SPAWN_DUP2, replies, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=[],
            )
            with suppress(ChildProcessError):  # the program may wait for all children itself
                os.waitpid(pid, 0)  # it has become two at once, of which the first has ended
        finally:
            os.close(requests)
            os.close(replies)


_PACKAGE: Final = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
"""Where this package is, which the program may have taken out of `sys.path`."""
