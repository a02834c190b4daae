"""The Linux system calls of the sandbox that Python has no function for. Each raises OSError on failure.

The numbers of `mount_setattr` and of Landlock's calls are the same on x86-64 and aarch64 (and on all
architectures that share the generic table: include/uapi/asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any, Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_NEW_LISTENER: Final = 8
_CAPABILITIES: Final = struct.pack("=Ii", 0x20080522, 0)
"""`struct __user_cap_header_struct`: version 3, of this thread."""
_KEPT: Final = sum(1 << capability for capability in (*range(9), 10, 14, 23, 24))
"""Of files, signals, users and groups (0 to 8), NET_BIND_SERVICE, IPC_LOCK, SYS_NICE and SYS_RESOURCE."""
_MOUNT_SETATTR: Final = 442
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 1
_MS_PRIVATE: Final = 1 << 18


def unshare(flags: int) -> None:
    """Give this process namespaces of its own. `CLONE_NEWUSER` needs a process with a single thread."""
    _check(_libc().unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Mount `source` at the directory `target`."""
    encoded = (None if kind is None else kind.encode(), None if data is None else os.fsencode(data))
    _check(
        _libc().mount(os.fsencode(source), os.fsencode(target), encoded[0], ctypes.c_ulong(flags), encoded[1])
    )


def make_mounts_read_only() -> None:
    """Make every mount of this namespace read-only and private (Linux 5.12)."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, _MS_PRIVATE, 0)
    _call(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def landlock_version() -> int:
    """Return the version of Landlock's interface that the kernel has."""
    return _call(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)


def landlock_ruleset(files: int, network: int, scoped: int = 0) -> int:
    """Return the descriptor of a set of rules that refuses these accesses where no rule allows them.

    Args:
        files: bits of `LANDLOCK_ACCESS_FS_*`.
        network: bits of `LANDLOCK_ACCESS_NET_*`; 0 before version 4 of the interface.
        scoped: bits of `LANDLOCK_SCOPE_*`; 0 before version 6.
    """
    fields = (files, network, scoped)
    known = 3 if scoped else 2 if network else 1
    attributes = struct.pack(f"={known}Q", *fields[:known])
    return _call(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)


def landlock_allow(ruleset: int, directory: int, files: int) -> None:
    """Allow these accesses below a directory, given as a descriptor."""
    attributes = struct.pack("=Qi", files, directory)
    _call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, attributes, 0)


def landlock_enforce(ruleset: int) -> None:
    """Put this process and all that it starts under the rules, for good."""
    _refuse_new_rights()
    _call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)


def seccomp_listener(steps: bytes) -> int:
    """Put this process and all that it starts under a filter, for good; return where it asks (Linux 5.0).

    Args:
        steps: `struct sock_filter` after `struct sock_filter`.
    """
    _refuse_new_rights()
    kept = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("HP", len(steps) // 8, ctypes.addressof(kept))
    number = _SECCOMP.get(platform.machine(), -1)
    return _call(number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_NEW_LISTENER, program)


def give_up_capabilities() -> None:
    """Give up, for good, the capabilities that reach beyond this process's own files and processes.

    Mounts, the host's name, the clock and devices are some of what needs them.
    """
    _refuse_new_rights()
    data = ctypes.create_string_buffer(24)
    _check(_libc().capget(_CAPABILITIES, data))
    words = zip(struct.unpack("=6I", data.raw), (*[_KEPT] * 2, *[0] * 4), strict=True)
    _check(_libc().capset(_CAPABILITIES, struct.pack("=6I", *(has & keeps for has, keeps in words))))


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends."""
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def die_with_parent(signum: int) -> None:
    """Send this process a signal when the thread that started it ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0))


def _refuse_new_rights() -> None:
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> int:
    return _check(_libc().syscall(ctypes.c_long(number), *arguments))


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
