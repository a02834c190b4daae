"""Refuses writes outside given directories, and TCP connections, by Landlock (Linux 5.13; network from 6.7).

Needs no rights and works in most containers. It can refuse a write but not redirect it: `redirect.py` does
that for Python code, so that a script that saves a checkpoint goes on. Subprocesses and native code get
`EACCES` for what they write elsewhere. `metadata.py` refuses what Landlock does not know.

Known limits: `/dev/shm` stays writable, because shared memory and semaphores are files there. UDP is never
refused, nor are connections to a socket's file, SysV memory and priorities of other processes. `enforce`
returns what this kernel leaves open.
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
_SCOPE_SINCE: Final = 6
_SCOPE_ABSTRACT_SOCKETS: Final = 1
_SCOPE_SIGNALS: Final = 2
_CONNECT_TCP: Final = 1 << 1
_DEVICES: Final = "/dev"


def enforce(writable: Iterable[str], network: bool) -> list[str]:
    """Refuse this process, for good, to write outside some directories and to connect unless `network`.

    It may signal only what it starts. Return what is not protected.

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
    scoped = _SCOPE_SIGNALS | (0 if network else _SCOPE_ABSTRACT_SOCKETS) if version >= _SCOPE_SINCE else 0
    ruleset = syscalls.landlock_ruleset(files, refused_network, scoped)
    try:
        for directory in (_DEVICES, *writable):
            descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
            try:
                syscalls.landlock_allow(ruleset, descriptor, files)
            finally:
                os.close(descriptor)
        syscalls.give_up_capabilities()
        syscalls.landlock_enforce(ruleset)
    finally:
        os.close(ruleset)
    return [
        *("/dev/shm", "SysV memory", "priorities of processes"),
        *([] if version >= _SCOPE_SINCE else ["signals to processes"]),
        *([] if network else ["UDP", "local sockets"]),
        *([] if network or refused_network else ["TCP"]),
    ]
