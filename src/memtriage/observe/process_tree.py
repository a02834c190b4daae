"""The processes below this one: how much memory each has, and what the program calls it."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Any, Final, NamedTuple

from memtriage.model.code_origin import code_owner
from memtriage.model.findings import ProcessKind
from memtriage.observe.classes import instance_dict, name_of
from memtriage.observe.frames import frame_locals, stacks
from memtriage.process.copies import living
from memtriage.process.stdlib import os, threading

_FIELDS: Final = re.compile(rb"^(RssAnon|RssShmem|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_SPAWN_FILE: Final = os.path.join("torch", "multiprocessing", "spawn.py")
_FRAMES_SEARCHED: Final = 12
_NAMED_BY_TORCH: Final = re.compile(r"torch_(\d+)_.*")
_HELPERS: Final = ("from multiprocessing.resource_tracker", "from multiprocessing.forkserver")


class ProcessSizes(NamedTuple):
    """Bytes of one process: anonymous memory, resident or swapped out, and its resident shared memory.

    A page that a forked child shares with its parent counts in both, before and after it is written to: so
    copy-on-write is not growth.
    """

    anonymous: int
    shared: int


class Named(NamedTuple):
    """What a process is in the program's words.

    Attributes:
        where: kind of process.
        group: what processes that do the same work have in common.
        role: of this one among them.
    """

    where: ProcessKind
    group: str
    role: str


def descendants(pid: int | None = None) -> list[int]:
    """Return the processes below this one (or `pid`), nearest first; a parent is before its children.

    Copies of this process that work for the watch are none of them.

    Reads a small file per thread: 1 ms for 32 processes. Only if the kernel has no such files, it goes
    through all processes of the machine. A process without children is asked nothing else: each of these
    calls would take the interpreter from its main thread.
    """
    if pid is None and not _has_children():
        return []
    own = living()
    found = [os.getpid() if pid is None else pid]
    if not _kernel_lists_children():
        import psutil

        try:
            below = [child.pid for child in psutil.Process(pid).children(recursive=True)]
            return [process for process in below if process not in own]
        except psutil.Error:
            return []
    for parent in found:
        for thread in _listed(f"/proc/{parent}/task"):
            listed = _bytes_of(f"/proc/{parent}/task/{thread}/children")
            found += map(int, listed.split())
    return [process for process in found[1:] if process not in own]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # leaves the status of all to others
    except ChildProcessError:
        return False
    return True


@functools.cache
def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children")


def sizes_of(pid: int) -> ProcessSizes | None:
    """Return the sizes of a process, in 20 us: no page is walked; None once it has ended."""
    found = {name: int(kib) << 10 for name, kib in _FIELDS.findall(_bytes_of(f"/proc/{pid}/status"))}
    if b"RssAnon" not in found:
        return None
    return ProcessSizes(found[b"RssAnon"] + found.get(b"VmSwap", 0), found.get(b"RssShmem", 0))


def unmapped_segments(pids: Iterable[int], folder: str = "/dev/shm") -> int:
    """Return the bytes of shared memory that processes have open or named, and none of them has mapped.

    Tensors that wait in a queue are such segments. No process's size counts them. Takes about a millisecond
    per process.
    """
    pids = list(pids)
    known = set(map(str, pids))
    device = os.stat(folder).st_dev
    paths = [f"/proc/{pid}/fd/{number}" for pid in pids for number in _listed(f"/proc/{pid}/fd")]
    named = (name for name in _listed(folder) if _NAMED_BY_TORCH.sub(r"\1", name) in known)
    sizes: dict[int, int] = {}
    for path in (*paths, *(f"{folder}/{name}" for name in named)):
        with suppress(OSError):
            found = os.stat(path)
            if found.st_dev == device:
                sizes[found.st_ino] = 512 * found.st_blocks
    place = f"{os.major(device):02x}:{os.minor(device):02x}"
    for pid in pids if sizes else ():
        for line in _bytes_of(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
            _, _, _, mapped_from, inode, *_ = line.split(maxsplit=5)
            if mapped_from == place:
                sizes.pop(int(inode), None)
    return sum(sizes.values())


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def started_at(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks: a number may be given to another process."""
    return _stat(pid, 19)


def parent_of(pid: int) -> int | None:
    """Return the process that started a process; None if it has ended."""
    return _stat(pid, 1)


def _stat(pid: int, number: int) -> int | None:
    """Return a field of a process's state, counted from the one after its name."""
    fields = _bytes_of(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[number]) if len(fields) > number else None


def is_helper(pid: int) -> bool:
    """Whether it is a process of Python's own that only serves others: of shared memory, or of forks."""
    return any(part in command_of(pid) for part in _HELPERS)


def is_worker(pid: int) -> bool:
    """Whether it is a worker of a `DataLoader`, by the name that torch gives it."""
    return _bytes_of(f"/proc/{pid}/comm").strip() == b"pt_data_worker"


def command_of(pid: int) -> str:
    """Return the command line of a process; empty where it cannot be read."""
    parts = _bytes_of(f"/proc/{pid}/cmdline").split(b"\0")
    return " ".join(os.fsdecode(part) for part in parts if part)


def _bytes_of(path: str) -> bytes:
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        data = b""
        while part := os.read(opened, 1 << 16):
            data += part
        return data
    except OSError:
        return b""
    finally:
        os.close(opened)


# --- what the program calls them ----------------------------------------------------------------------------


def children_of_program() -> Iterator[tuple[int, Named]]:
    """Yield the children that the program's own objects name. Runs no code of the program, holds nothing."""
    yield from _of_executors()
    yield from _of_spawn()
    yield from _of_multiprocessing()


def _of_executors() -> Iterator[tuple[int, Named]]:
    """Yield the processes of `concurrent.futures.ProcessPoolExecutor`, by the threads that manage them."""
    module = sys.modules.get("concurrent.futures.process")
    for number, thread in enumerate(_copied(getattr(module, "_threads_wakeups", None))):
        name = "ProcessPoolExecutor" if number == 0 else f"ProcessPoolExecutor {number + 1}"
        processes = (instance_dict(thread) or {}).get("processes")
        for place, pid in enumerate(sorted(_copied(processes))):
            yield pid, Named("child", f"processes of {name}", f"process {place} of {name}")


def _of_spawn() -> Iterator[tuple[int, Named]]:
    """Yield the ranks that `torch.multiprocessing.spawn` started and waits for."""
    if "torch.multiprocessing.spawn" not in sys.modules:
        return
    for frame in chain.from_iterable(stacks().values()):
        if frame.f_code.co_filename.endswith(_SPAWN_FILE):
            for _, value in frame_locals(frame, {"self", "context", "processes"}.__contains__):
                started = (instance_dict(value) or {}).get("processes", value)
                for rank, process in enumerate(started if type(started) is list else ()):
                    if (pid := _pid_of(process)) is not None:
                        yield pid, Named("child", "spawned ranks", f"rank {rank}")


def _of_multiprocessing() -> Iterator[tuple[int, Named]]:
    """Yield the children of `multiprocessing`; those with a number in their name are of one kind."""
    module = sys.modules.get("multiprocessing.process")
    for process in _copied(getattr(module, "_children", None)):
        pid, name = _pid_of(process), (instance_dict(process) or {}).get("_name")
        if pid is not None and type(name) is str:
            kind = re.sub(r"[-_ ]?\d+$", "", name)
            yield pid, Named("child", f"{kind} processes" if kind != name else name, "")


def _copied(container: Any) -> list[Any]:
    """Return what a container of the standard library has now; another thread may change it meanwhile."""
    try:
        return [] if container is None else list(container)
    except RuntimeError:
        return []


def _pid_of(process: Any) -> int | None:
    """Return the number of a process of `multiprocessing`."""
    pid = (instance_dict((instance_dict(process) or {}).get("_popen")) or {}).get("pid")
    return pid if type(pid) is int else None


# --- workers of loaders -------------------------------------------------------------------------------------


def workers_of(batches: Any) -> list[int]:
    """Return the workers of a `DataLoader`'s iterator, in their order."""
    workers = (instance_dict(batches) or {}).get("_workers")
    pids = [_pid_of(worker) for worker in (workers if type(workers) is list else ())]
    return [pid for pid in pids if pid is not None]


def name_of_loader(loader: Any, frame: FrameType | None) -> str:
    """Return what the program calls a loader: a variable or an attribute; else by the class of its data.

    Args:
        loader: the `DataLoader`.
        frame: of the function that begins a pass over it.
    """
    for _ in range(_FRAMES_SEARCHED):
        if frame is None:
            break
        if code_owner(frame.f_code.co_filename) == "user":
            variables = frame_locals(frame) or list(frame.f_globals.items())
            own = next((value for name, value in variables if name == "self"), None)
            variables += [(str(name), value) for name, value in (instance_dict(own) or {}).items()]
            for name, value in variables:
                if value is loader:
                    return name
        frame = frame.f_back
    dataset = (instance_dict(loader) or {}).get("dataset")
    return f"the loader of {name_of(type(dataset))}"
