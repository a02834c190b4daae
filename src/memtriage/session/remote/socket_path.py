"""Where a process listens: `memtriage-PID.sock`, in a directory that only its user can enter."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from memtriage.process.stdlib import os

LONGEST_PATH: Final = 107
"""Most bytes of a Unix socket's path: `sun_path` has 108, including the terminating zero."""
_HIGHEST_PID: Final = 2**22  # the kernel's PID_MAX_LIMIT
_PROBE_WITHIN_S: Final = 1.0
TEMPORARY: Final = Path("/tmp")
"""Not `$TMPDIR`: job schedulers set it, and the requesting process may not have it."""


class PlaceError(Exception):
    """There is no directory for the socket. The text is one line for the user."""


def name_of(pid: int) -> str:
    """Return the name of a process's socket."""
    return f"memtriage-{pid}.sock"


def place(environ: Mapping[str, str] | None = None, temporary: Path = TEMPORARY) -> Path:
    """Return a directory for sockets, made if missing: in `$XDG_RUNTIME_DIR`, else `/tmp/memtriage-UID`.

    Args:
        environ: the environment; that of this process by default.
        temporary: replaces `/tmp`.

    Raises:
        PlaceError: there is none that belongs to this user alone.
    """
    refused = []
    for directory in places(os.environ if environ is None else environ, temporary):
        try:
            directory.mkdir(mode=0o700, parents=False, exist_ok=True)
            _check(directory)
        except OSError as error:
            refused.append(f"{directory}: {error.strerror or error}")
            continue
        return directory
    raise PlaceError("; ".join(refused))


def places(environ: Mapping[str, str], temporary: Path = TEMPORARY) -> Iterator[Path]:
    """Directories where sockets may be, the best first."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    longest = LONGEST_PATH - len(f"/{name_of(_HIGHEST_PID)}")
    if runtime.startswith("/") and len(os.fsencode(f"{runtime}/memtriage")) <= longest:
        yield Path(runtime) / "memtriage"
    yield temporary / f"memtriage-{os.geteuid()}"


def remove_stale(directory: Path) -> None:
    """Remove sockets at which no process listens any more: of processes that were killed."""
    for path in directory.glob("memtriage-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_WITHIN_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # slow, gone, or not ours
                continue


def leave(path: Path) -> None:
    """Remove a process's socket, and the directory if it was the last one there."""
    path.unlink(missing_ok=True)
    with suppress(OSError):  # others listen there
        path.parent.rmdir()


def socket_of(pid: int) -> Path | None:
    """Return the socket at which a process listens; None if it does not.

    It is in the kernel's list of sockets in the process's network namespace, wherever the process's
    environment has put it. In another container it is reached through the process's own root.
    """
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        *_, path = line.split(maxsplit=7)
        if path.endswith(f"/{name_of(pid)}"):
            return Path(path) if os.path.exists(path) else Path(f"/proc/{pid}/root{path}")
    return None


def _check(directory: Path) -> None:
    """Refuse a directory in which another user could put a socket, or reach ours."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(None, "is not a directory")
    if status.st_uid != os.geteuid():
        raise PermissionError(None, "belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)
