"""A view of the file system in which every write goes to a scratch copy in memory.

The process gets mounts of its own, all of them read-only, and an overlay on each directory that a program may
write to: reads come from below, writes go to a tmpfs that vanishes with the process. What was written is read
back, by native code and by subprocesses too. Root needs no more than `CAP_SYS_ADMIN`; others get a user
namespace, where the system allows one (Linux 5.12; many containers and some distributions refuse it).

Known limits: files directly in `/` stay read-only. In a user namespace directories of other users stay
read-only, and so do the files directly in a directory with mounts of its own. `/dev` is not covered: device
nodes work as before.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import psutil

from memtriage.prediction.sandbox import syscalls
from memtriage.prediction.sandbox.changes import Changes
from memtriage.prediction.sandbox.supervise import supervise

_NOT_FILES: Final = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs"),
        *("efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs"),
        *("selinuxfs", "sysfs", "tracefs"),
    }
)
"""Kinds of mounts that hold no files of a user's."""
_DEVICES: Final = "/dev"
_SHARED_MEMORY: Final = "/dev/shm"
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_DESCRIPTORS_FROM: Final = 512
"""Descriptors of the sandbox get numbers from here on: programs that close all they inherit stop before."""


def high_descriptor(descriptor: int) -> int:
    """Move a descriptor to where programs that close all descriptors hardly reach, and return its number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTORS_FROM)
    os.close(descriptor)
    return moved


def enter(
    mount_point: str, wanted: Iterable[str], network: bool, own_processes: bool = True
) -> Callable[[], Changes]:
    """Give a child of this process its own view of the file system, and return in it; see `supervise`.

    The process must have a single thread. What is returned says what was written and deleted up to now.

    Args:
        mount_point: an empty directory, for the tmpfs.
        wanted: paths that the program is likely to write to.
        own_processes: it sees no other processes. A container may not allow the /proc that this needs.

    Raises:
        OSError: the system does not allow it; the process may then have changed, so try it in a fork.
    """
    here = os.getcwd()
    namespaces = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC
    namespaces |= 0 if network else syscalls.CLONE_NEWNET
    user_namespace = _unshare(namespaces | (syscalls.CLONE_NEWPID if own_processes else 0))
    if not network:
        _raise_loopback()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint != "/"]
    syscalls.make_mounts_read_only()
    syscalls.mount("tmpfs", mount_point, "tmpfs", 0, "mode=700")
    scratch = high_descriptor(os.open(mount_point, os.O_PATH))
    cover = _Cover(f"/proc/self/fd/{scratch}", user_namespace, [mount.mountpoint for mount in mounts])
    for directory in _roots(mounts, wanted):
        cover.add(directory)
    os.chdir(here)
    supervise()
    if own_processes:  # this is the first of them, on which most signals have no effect
        flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", "/proc", "proc", flags)
        supervise()
    syscalls.give_up_capabilities()
    return partial(changes_of, cover.uppers)


def _unshare(namespaces: int) -> bool:
    """Leave the parent's namespaces; return whether that took a user namespace."""
    user, group = os.getuid(), os.getgid()
    try:
        syscalls.unshare(namespaces)
        return False
    except PermissionError:
        syscalls.unshare(namespaces | syscalls.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _raise_loopback() -> None:
    """Bring up the loopback device of a new network namespace: some libraries talk to themselves over it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(device, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _roots(mounts: Sequence[Any], wanted: Iterable[str]) -> list[str]:
    """The directories to cover, the deepest first: a covered one is put back on top of the one it is in."""
    writable = [mount for mount in mounts if "rw" in mount.opts.split(",")]
    roots = {entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)}
    roots |= {mount.mountpoint for mount in writable if os.path.isdir(mount.mountpoint)}
    roots -= {mount.mountpoint for mount in mounts if mount.fstype in _NOT_FILES or mount not in writable}
    roots |= {_highest_owned(directory) for directory in wanted}
    roots = {
        root
        for root in roots
        if root != "/" and not (root + "/").startswith((_DEVICES + "/", "/proc/", "/sys/"))
    }
    if os.path.isdir(_SHARED_MEMORY):
        roots.add(_SHARED_MEMORY)
    return sorted(roots, key=lambda path: (-path.count("/"), path))


def _highest_owned(path: str) -> str:
    """The highest directory over `path` from which all directories down to it are this user's.

    An overlay of a user namespace cannot copy a directory of another user, on the way to a file of this one.
    """
    path = os.path.realpath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    while os.path.dirname(path) != "/" and path != "/" and os.stat(path).st_uid == os.getuid():
        path = os.path.dirname(path)
    return path


class _Cover:
    """Puts overlays on directories."""

    def __init__(self, scratch: str, user_namespace: bool, points: list[str]) -> None:
        self.uppers: dict[str, str] = {}
        self._scratch = scratch
        # Without trusted.* attributes, which only root of the whole system may set.
        self._options = ",userxattr" if user_namespace else ""
        self._points = list(dict.fromkeys(points))

    def add(self, directory: str) -> None:
        """Cover a directory, or what it contains where it has mounts that cannot be moved."""
        if directory in self.uppers:
            return
        inside = self._mounted_inside(directory)
        kept = [(point, _opened(point)) for point in inside]
        try:
            covered = self._overlay(directory)
        finally:
            for point, descriptor in kept:
                if descriptor is not None:
                    if directory in self.uppers:
                        _bind(descriptor, point)
                    os.close(descriptor)
        if not covered and inside:
            for path in _subdirectories(directory):
                if path not in self._points:
                    self.add(path)

    def _mounted_inside(self, directory: str) -> list[str]:
        """Mount points below a directory, without those below another of them."""
        inside = sorted(point for point in self._points if point.startswith(directory + "/"))
        return [point for point in inside if not any(point.startswith(other + "/") for other in inside)]

    def _overlay(self, directory: str) -> bool:
        """Cover one directory; return False where the system does not allow it, and it stays read-only."""
        number = len(self.uppers)
        base = f"{self._scratch}/{number}"
        upper, work = f"{base}/upper", f"{base}/work"
        descriptor = _opened(directory)
        if descriptor is None:
            return False
        try:
            for path in (base, upper, work):
                os.makedirs(path, exist_ok=True)
            _like(directory, upper)
            # By descriptor: a path may have commas and colons in it.
            lower = f"/proc/self/fd/{descriptor}"
            options = f"lowerdir={lower},upperdir={upper},workdir={work}{self._options}"
            syscalls.mount("overlay", directory, "overlay", 0, options)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self.uppers[directory] = upper
        if directory not in self._points:
            self._points.append(directory)
        return True


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None


def _bind(descriptor: int, point: str) -> None:
    """Mount again, on top of an overlay, what was mounted below it; what cannot stays hidden."""
    try:
        syscalls.mount(f"/proc/self/fd/{descriptor}", point, None, syscalls.MS_BIND | syscalls.MS_REC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
            raise


def _like(directory: str, upper: str) -> None:
    """Give the top of an overlay the owner and the mode of what it covers."""
    status = os.stat(directory)
    try:
        os.chown(upper, status.st_uid, status.st_gid)
    except OSError:  # of a user that the namespace does not know
        pass
    os.chmod(upper, stat.S_IMODE(status.st_mode))


def _subdirectories(directory: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def changes_of(uppers: Mapping[str, str]) -> Changes:
    """What was written and deleted, by the directory that holds what was written below a covered one."""
    changes = Changes()
    for covered, upper in uppers.items():
        if covered != _SHARED_MEMORY:
            _collect(upper, covered, changes)
    return changes


def _collect(upper: str, covered: str, changes: Changes) -> None:
    """Note what an overlay's upper directory holds: files, and character devices 0:0 for what was deleted."""
    for folder, _, names in os.walk(upper):
        place = covered + folder[len(upper) :]
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                changes.deleted.append(os.path.join(place, name))
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                changes.written.append(os.path.join(place, name))
