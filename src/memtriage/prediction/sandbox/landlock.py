"""Refuses writes outside given directories, and TCP connections, by Landlock (Linux 5.13; network from 6.7).

Needs no rights and works in most containers. It can refuse a write but not redirect it: `redirect.py` does
that for Python code, so that a script that saves a checkpoint goes on. Subprocesses and native code get
`EACCES` for what they write elsewhere.

Known limits: `/dev/shm` stays writable, because shared memory and semaphores are files there. Before Linux
6.7 native code can open connections, and UDP is never refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from memtriage.prediction.sandbox import syscalls

_WRITE_FILE: Final = 1 << 1
_REMOVE_AND_MAKE: Final = sum(1 << bit for bit in range(4, 13))
"""REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, _DIR, _REG, _SOCK, _FIFO, _BLOCK and _SYM of linux/landlock.h."""
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_REFER_SINCE: Final = 2
_TRUNCATE_SINCE: Final = 3
_NETWORK_SINCE: Final = 4
_CONNECT_TCP: Final = 1 << 1
_DEVICES: Final = "/dev"


def enforce(writable: Iterable[str], network: bool) -> None:
    """Refuse this process, for good, to write outside some directories and to connect unless `network`.

    Args:
        writable: directories; `/dev` is writable besides.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = syscalls.landlock_version()
    files = _WRITE_FILE | _REMOVE_AND_MAKE
    if version >= _REFER_SINCE:
        files |= _REFER
    if version >= _TRUNCATE_SINCE:
        files |= _TRUNCATE
    refused_network = _CONNECT_TCP if version >= _NETWORK_SINCE and not network else 0
    ruleset = syscalls.landlock_ruleset(files, refused_network)
    try:
        for directory in (_DEVICES, *writable):
            descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
            try:
                syscalls.landlock_allow(ruleset, descriptor, files)
            finally:
                os.close(descriptor)
        syscalls.landlock_enforce(ruleset)
    finally:
        os.close(ruleset)
