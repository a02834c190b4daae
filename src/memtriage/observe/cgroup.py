"""Memory limits of the container and of the process: control groups v1 and v2, MemTotal, resource limits.

`psutil.virtual_memory()` and MemTotal do not know a container's limit; what kills a job in a container is the
tightest control group above it. Every size is in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from memtriage.observe.host import InUse, text_of

SELF: Final = Path("/proc/self")


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the control group that limits this process: the tightest one from its own group upwards.

    Without any limit, it is the process's own group. All figures are for that group and everything in it,
    including other processes.

    Attributes:
        version: 1 or 2.
        path: directory the figures were read from.
        limit: the limit; None when there is none.
        usage: bytes charged now, including page cache.
        file: page cache, including `shmem`.
        inactive_file: page cache that is reclaimed first; the rest of the usage counts against the limit.
        shmem: shared memory and tmpfs; without swap it can't be reclaimed.
        oom_kill: processes of the group killed for memory so far.
    """

    version: Literal[1, 2]
    path: str
    limit: int | None = None
    usage: int | None = None
    file: int | None = None
    inactive_file: int | None = None
    shmem: int | None = None
    oom_kill: int | None = None


class HostLimit(NamedTuple):
    """The most bytes that this process can have, and what limits it."""

    bytes: int
    source: str


def cgroup_memory(proc: Path = SELF, root: Path = Path("/")) -> CgroupMemory | None:
    """Memory figures of the control group that limits this process; None without a memory controller.

    Under v2, limits of groups that a container hides from its processes are not seen; under v1 the kernel
    reports them (`hierarchical_memory_limit`).

    Args:
        proc: the process's directory in /proc, for its `cgroup` and `mountinfo`.
        root: where the mount points in `mountinfo` start.
    """
    groups = text_of(proc / "cgroup")
    mounts = text_of(proc / "mountinfo")
    if groups is None or mounts is None:
        return None
    for files in (_V1, _V2):  # in a hybrid set-up the memory controller is v1's, if it has one at all
        chain = list(_chain(files, groups, mounts, root))
        if chain:
            return _read(files, chain)
    return None


def host_limit(proc: Path = SELF, root: Path = Path("/")) -> HostLimit:
    """The least of: control-group limit, physical memory, and RLIMIT_AS and RLIMIT_DATA if set.

    The resource limits apply to address space, not to resident memory: a process reaches them earlier than
    its RSS suggests.
    """
    limits = [physical_memory(root), *_resource_limits()]
    group = cgroup_memory(proc, root)
    if group is not None and group.limit is not None:
        limits.append(HostLimit(group.limit, f"cgroup v{group.version} {group.path}"))
    return min(limits)


def counted(limit: HostLimit, used: InUse) -> int:
    """Bytes in use as a limit counts them: a resource limit counts address space, not resident memory."""
    return {"RLIMIT_AS": used.mapped, "RLIMIT_DATA": used.data}.get(limit.source, used.resident)


class _Files(NamedTuple):
    """Names under which a cgroup version keeps the figures."""

    version: Literal[1, 2]
    file_system: str
    limit: str
    usage: str
    events: str
    file: str
    inactive_file: str
    shmem: str


_V1: Final = _Files(
    version=1,
    file_system="cgroup",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    events="memory.oom_control",
    file="total_cache",
    inactive_file="total_inactive_file",
    shmem="total_shmem",
)
_V2: Final = _Files(
    version=2,
    file_system="cgroup2",
    limit="memory.max",
    usage="memory.current",
    events="memory.events",
    file="file",
    inactive_file="inactive_file",
    shmem="shmem",
)
_UNLIMITED: Final = 1 << 60
"""v1 writes 'no limit' as the largest number of pages (0x7FFFFFFFFFFFF000); no machine has this much."""


def _chain(files: _Files, groups: str, mounts: str, root: Path) -> Iterator[Path]:
    """Directories with memory figures, from the process's group up to the mount point."""
    path = _group_path(files, groups)
    if path is None:
        return
    for mount_root, mount_point in _mounts(files, mounts):
        top = root / mount_point.lstrip("/")
        group = top / _below(path, mount_root)
        if not group.is_dir():  # a path as seen from outside the container; the mount shows our group
            group = top
        for directory in (group, *group.parents):
            if (directory / files.limit).exists() or (directory / "memory.stat").exists():
                yield directory
            if directory == top:
                return


def _group_path(files: _Files, groups: str) -> str | None:
    """The process's path in the hierarchy, from lines `id:controllers:path` (v2: `0::path`)."""
    for line in groups.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if files.version == 2 and hierarchy == "0" and not controllers:
            return path
        if files.version == 1 and "memory" in controllers.split(","):
            return path
    return None


def _mounts(files: _Files, mountinfo: str) -> Iterator[tuple[str, str]]:
    """(path in the hierarchy that is mounted, mount point) of each mount that carries memory figures."""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        columns, kinds = mount.split(), source.split()
        if not kinds or kinds[0] != files.file_system:
            continue
        if files.version == 1 and "memory" not in kinds[-1].split(","):
            continue
        yield _unescaped(columns[3]), _unescaped(columns[4])


def _below(path: str, mount_root: str) -> str:
    """A group's path relative to what is mounted; empty when it is the mount or not beneath it."""
    if mount_root == "/":
        return path.strip("/") if ".." not in path.split("/") else ""
    return path[len(mount_root) :].strip("/") if path.startswith(mount_root + "/") else ""


def _unescaped(column: str) -> str:
    """mountinfo writes space, tab, newline and backslash in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), column)


def _read(files: _Files, chain: list[Path]) -> CgroupMemory:
    limits = {directory: _limit(files, directory) for directory in chain}
    tightest = min((limit for limit in limits.values() if limit is not None), default=None)
    # If groups have the same limit, take the outermost: it is charged at least as much, so it kills first.
    group = chain[0] if tightest is None else [where for where in chain if limits[where] == tightest][-1]
    stat = _keyed(group / "memory.stat")
    return CgroupMemory(
        version=files.version,
        path=str(group),
        limit=tightest,
        usage=_number(group / files.usage),
        file=stat.get(files.file),
        inactive_file=stat.get(files.inactive_file),
        shmem=stat.get(files.shmem),
        oom_kill=_keyed(group / files.events).get("oom_kill"),
    )


def _limit(files: _Files, group: Path) -> int | None:
    limits = [_number(group / files.limit), _keyed(group / "memory.stat").get("hierarchical_memory_limit")]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def physical_memory(root: Path = Path("/")) -> HostLimit:
    """Return the memory of the machine, whatever a container or a limit allows."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", text_of(root / "proc/meminfo") or "", re.MULTILINE)
    if total:
        return HostLimit(int(total[1]) << 10, "MemTotal")
    import psutil

    return HostLimit(int(psutil.virtual_memory().total), "physical memory")


def _resource_limits() -> Iterator[HostLimit]:
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft = resource_limit(name)
        if soft is not None:
            yield HostLimit(soft, name)


def resource_limit(name: str) -> int | None:
    """Return this process's soft limit, such as `RLIMIT_AS`; None if there is none."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    """A file with one number; `max` and an absent file are None."""
    text = (text_of(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _keyed(path: Path) -> dict[str, int]:
    """A file of `key number` lines."""
    pairs = (line.split() for line in (text_of(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
