"""Refuses by audit hooks what would change a file or open a connection, where the kernel cannot refuse it.

Known limits: only what goes through Python is seen, and of that not `os.mkfifo` and `os.mknod`. A subprocess
would be under no rule, so none is started.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from memtriage.prediction.sandbox.redirect import opening

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TWO_PATHS: Final = frozenset({"os.rename", "os.link"})
_ONE_PATH: Final = frozenset(
    f"os.{name}"
    for name in (
        *("chmod", "chown", "mkdir", "remove", "removexattr", "rmdir", "setxattr", "symlink"),
        *("truncate", "utime"),
    )
) | {"sqlite3.connect"}
_PROCESSES: Final = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
)
_CONNECTIONS: Final = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
_LOOK_UPS: Final = frozenset({"socket.getaddrinfo", "socket.gethostbyname"})
_LOOPBACK: Final = ("127.", "::1", "localhost")


def refuse_files_and_processes(root: str) -> None:
    """Refuse, for the rest of the process, to change a file outside `root` and to start another program."""

    def is_outside(path: Any) -> bool:
        if isinstance(path, int):
            return False
        text = os.path.join(os.getcwd(), os.fsdecode(path))
        return not (text + "/").startswith((root + "/", "/dev/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            redirected = mode is not None and getattr(opening, "redirected", False)
            if flags & _WRITES and not redirected and is_outside(path):
                raise PermissionError(f"a trace writes no file: {path!r} was to be opened for writing")
        elif event in _ONE_PATH or event in _TWO_PATHS:
            # `os.symlink(src, dst)` makes its second argument.
            paths = arguments[:2] if event in _TWO_PATHS else arguments[event == "os.symlink" :][:1]
            if any(map(is_outside, paths)):
                raise PermissionError(f"a trace changes no file: {event}{paths!r}")
        elif event in _PROCESSES:
            raise PermissionError(f"a trace starts no other program on this system: {arguments[:2]!r}")

    sys.addaudithook(hook)


def refuse_network() -> None:
    """Refuse, for the rest of the process, what Python code sends to another machine."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CONNECTIONS:
            address = arguments[1]
            if isinstance(address, tuple) and not str(address[0]).startswith(_LOOPBACK):
                raise OSError(f"the network is off in a trace: {address!r}; see --allow-network")
        elif event in _LOOK_UPS:
            host = arguments[0]
            if host and not str(host).startswith((*_LOOPBACK, os.uname().nodename)):
                raise OSError(f"the network is off in a trace: {host!r}; see --allow-network")

    sys.addaudithook(hook)
