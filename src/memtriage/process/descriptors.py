"""Descriptors that the watch owns in a process whose program may close any number and use it again."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Final

from memtriage.process.limits import surviving_writes
from memtriage.process.stdlib import os

with suppress(ImportError):  # Windows has neither; `explain` and others use the rest of this module there
    import fcntl
    import resource

_HIGHEST: Final = 1024
_RESERVED: Final = 64
"""Own descriptors get the highest of the usual 1,024 numbers, so that the program's own begin at 3 as without
a watch, and a program that closes all of them rarely gets one of these numbers again."""


class Descriptor:
    """A descriptor that is used and closed only while it is still the file that it was opened for.

    Any code may call `os.closerange`, after which the number can be a file of the program's. A close between
    the comparison and the use is not seen.

    Args:
        number: an open descriptor, which is moved to a high number and is not inherited.

    Attributes:
        number: the descriptor.
    """

    __slots__ = ("_file", "number")

    def __init__(self, number: int) -> None:
        self.number = _moved_up(number)
        self._file = identity_of(self.number)

    @property
    def ours(self) -> bool:
        """Whether the number still is the file that was opened."""
        return self._file is not None and identity_of(self.number) == self._file

    def is_same_file(self, other: Descriptor) -> bool:
        """Whether both were opened for the same file."""
        return self._file is not None and self._file == other._file

    def write(self, data: bytes | memoryview) -> int:
        """Write as `os.write` does.

        Raises:
            OSError: as `os.write`; with `EBADF` when the number is no longer ours.
        """
        if not self.ours:
            raise OSError(errno.EBADF, "the program has closed memtriage's descriptor")
        with surviving_writes():
            return os.write(self.number, data)

    def close(self) -> None:
        """Close it if it is still ours. May be called twice."""
        if self.ours:
            with suppress(OSError):  # e.g. a network file system that reports late
                os.close(self.number)
        self._file = None


def identity_of(number: int) -> tuple[int, int] | None:
    """Return device and inode of an open descriptor; None when it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def own_socket(made: socket.socket) -> tuple[socket.socket, Descriptor]:
    """Return a socket at a descriptor of the watch's own, and that descriptor. `made` is detached."""
    descriptor = Descriptor(made.detach())
    return socket.socket(fileno=descriptor.number), descriptor


def close_socket(made: socket.socket, descriptor: Descriptor) -> None:
    """Close a socket of `own_socket`, or forget its number where that is another file by now."""
    made.detach()
    descriptor.close()


def _moved_up(number: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST)
    try:
        moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(limit - _RESERVED, limit // 2))
    except OSError:  # none is free up there
        return number
    os.close(number)
    return moved
