"""Refuses changes of modes, owners, times and attributes outside given directories: Landlock allows them all.

A filter of system calls (seccomp, Linux 5.5) asks the process that supervises the program. It reads the path
from the program's memory, and lets the call continue or fail with `EPERM`.

Known limits: a program that changes the path between the question and the call is not caught. Programs of
another architecture (32 bits) do not run, and io_uring is refused, because it would avoid the filter.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from memtriage.prediction.sandbox import syscalls


@dataclass(frozen=True, slots=True)
class _Form:
    """Which arguments of a system call say what it changes, by position.

    Attributes:
        directory: of the descriptor; of the file itself where there is no path.
        path: where the path is.
        flags: where `AT_SYMLINK_NOFOLLOW` is.
        link: it changes the link at the end of the path.
    """

    directory: int | None = None
    path: int | None = None
    flags: int | None = None
    link: bool = False


_PATH: Final = _Form(path=0)
_LINK: Final = _Form(path=0, link=True)
_DESCRIPTOR: Final = _Form(directory=0)
_CALLS: Final[dict[str, dict[int, _Form]]] = {
    "x86_64": {
        **dict.fromkeys((90, 92, 132, 235, 188, 197), _PATH),  # chmod chown utime utimes setxattr removexattr
        **dict.fromkeys((94, 189, 198), _LINK),  # lchown lsetxattr lremovexattr
        **dict.fromkeys((91, 93, 190, 199), _DESCRIPTOR),  # fchmod fchown fsetxattr fremovexattr
        **dict.fromkeys((261, 268), _Form(0, 1)),  # futimesat fchmodat
        260: _Form(0, 1, 4),  # fchownat
        280: _Form(0, 1, 3),  # utimensat
    },
    "aarch64": {
        **dict.fromkeys((5, 14), _PATH),  # setxattr removexattr
        **dict.fromkeys((6, 15), _LINK),  # lsetxattr lremovexattr
        **dict.fromkeys((7, 16, 52, 55), _DESCRIPTOR),  # fsetxattr fremovexattr fchmod fchown
        53: _Form(0, 1),  # fchmodat
        54: _Form(0, 1, 4),  # fchownat
        88: _Form(0, 1, 3),  # utimensat
    },
}
_NEWER: Final = {
    452: _Form(0, 1, 3),  # fchmodat2
    463: _Form(0, 1, 2),  # setxattrat
    466: _Form(0, 1, 2),  # removexattrat
    469: _Form(0, 1, 4),  # file_setattr
}
"""The same numbers on both."""
_IO_URING_SETUP: Final = 425
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OTHER_ABI: Final = 1 << 30
"""Bit of the numbers of x32, an ABI of x86-64."""
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ASK, _FAIL = 0x7FFF0000, 0x7FC00000, 0x00050000
"""SECCOMP_RET_* of linux/seccomp.h; the low bits of the last are an error's number."""
_NOTIFICATION: Final = struct.Struct("=QIIiIQ6Q")
_ANSWER: Final = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE: Final = 1
_LONGEST_PATH: Final = 4096
_NO_FILES: Final = ("pipe:", "socket:", "anon_inode:", "/memfd:")
"""What descriptors lead to that are no files of a user's."""


def refuse(channel: socket.socket) -> None:
    """Put this process and all that it starts under the filter, for good; `serve` answers at the other end.

    Raises:
        OSError: the system has no such filter, or has one already.
    """
    machine = platform.machine()
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    listener = syscalls.seccomp_listener(
        _filter(_AUDIT_ARCH[machine], _CALLS[machine].keys() | _NEWER.keys())
    )
    socket.send_fds(channel, [b"."], [listener])
    os.close(listener)
    channel.close()


def _filter(machine: int, asked: Iterable[int]) -> bytes:
    """The program of the filter: `struct sock_filter` after `struct sock_filter`."""
    numbers = sorted(asked)
    steps = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        (_AT_LEAST, len(numbers) + 2, 0, _OTHER_ABI),
        (_EQUAL, len(numbers) + 1, 0, _IO_URING_SETUP),
        *((_EQUAL, len(numbers) - position + 1, 0, number) for position, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_RETURN, 0, 0, _ASK),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def serve(channel: socket.socket, writable: Iterable[str]) -> None:
    """Answer the filter's questions until the program has ended."""
    _, (listener, *_), _, _ = socket.recv_fds(channel, 1, 1)
    free = (*_NO_FILES, *(os.path.realpath(directory) + "/" for directory in writable))
    calls = {**_CALLS[platform.machine()], **_NEWER}
    while True:
        asked = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, asked)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT):  # the caller was killed
                continue
            return
        number, pid, _, call, _, _, *arguments = _NOTIFICATION.unpack(asked)
        try:
            allowed = (_changed(pid, calls[call], arguments) + "/").startswith(free)
        except OSError:
            allowed = False
        answer = (number, 0, 0, _CONTINUE) if allowed else (number, 0, -errno.EPERM, 0)
        try:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(*answer))
        except OSError:  # the caller was killed
            pass


def _changed(pid: int, form: _Form, arguments: list[int]) -> str:
    """What a call changes: a path without symbolic links, or the kernel's name of what is no file."""
    where = f"/proc/{pid}/cwd"
    if form.directory is not None:
        descriptor = struct.unpack("=i", struct.pack("=I", arguments[form.directory] & 0xFFFFFFFF))[0]
        if descriptor != _AT_FDCWD:
            where = f"/proc/{pid}/fd/{descriptor}"
    address = 0 if form.path is None else arguments[form.path]
    path = _text(pid, address) if address else ""
    if not path:
        return os.readlink(where)
    own = "/proc/self/"
    path = os.path.join(where, f"/proc/{pid}/{path[len(own) :]}" if path.startswith(own) else path)
    if form.link or (form.flags is not None and arguments[form.flags] & _AT_SYMLINK_NOFOLLOW):
        folder, name = os.path.split(path)
        return os.path.join(os.path.realpath(folder), name)
    return os.path.realpath(path)


def _text(pid: int, address: int) -> str:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        return os.fsdecode(os.pread(memory, _LONGEST_PATH, address).partition(b"\0")[0])
    finally:
        os.close(memory)
