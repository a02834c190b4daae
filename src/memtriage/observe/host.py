"""Memory of this process and its children as the kernel counts it: `/proc`, shared memory, pinned memory.

Every size is in bytes. What the kernel or the platform does not report is None. Nothing here keeps a tensor
alive, touches a page of the program, or initializes CUDA.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from memtriage.observe.process_tree import descendants
from memtriage.observe.smaps import MemoryClasses, parse_smaps, tmpfs_devices
from memtriage.process.copies import living
from memtriage.process.descriptors import Descriptor
from memtriage.process.stdlib import os

if TYPE_CHECKING:
    import psutil

SELF: Final = Path("/proc/self")


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the process's memory.

    Attributes:
        rss: resident set.
        pss: resident set with each shared page divided by the number of processes that map it.
        swap: swapped out.
        peak_rss: highest resident set so far (`VmHWM`).
        uss: pages that no other process maps.
    """

    rss: int | None = None
    pss: int | None = None
    swap: int | None = None
    peak_rss: int | None = None
    uss: int | None = None


class ChildSample(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one child process, e.g. a DataLoader worker.

    Attributes:
        pid: process id.
        name: the kernel's name for it (torch names its loader workers `pt_data_worker`).
        rss: resident set; pages shared with the parent are counted in every process.
        pss: resident set with shared pages divided among their users; this figure may be summed.
        uss: pages that no other process maps: what its end would free.
        shared_anon: anonymous pages that it still shares with its parent or siblings. They become private one
            by one as either side writes to them (copy on write).
        swap: swapped out.
    """

    pid: int
    name: str
    rss: int | None
    pss: int | None = None
    uss: int | None = None
    shared_anon: int | None = None
    swap: int | None = None


class ShmUse(msgspec.Struct, frozen=True):
    """Use of a shared-memory file system.

    Attributes:
        total: its size, which is a separate limit (64 MB in a default Docker container; overflow is SIGBUS).
        used: bytes in use by all processes that see it, including unlinked files.
    """

    total: int
    used: int


class PinnedStats(msgspec.Struct, frozen=True, gc=False):
    """Torch's caching allocator of page-locked memory; sizes are after its rounding to powers of two.

    Attributes:
        owned: everything that it has from the driver, in blocks handed out and in free blocks.
        active: bytes of blocks handed out, or waiting for a stream that used them. None before torch 2.13,
            which did not subtract freed blocks (measured on 2.11; fixed by pytorch #171662).
        cached: `owned - active`; None if `active` is None.
    """

    owned: int
    active: int | None = None
    cached: int | None = None


def rss() -> int | None:
    """Resident set of this process, at the cost of one `pread` on a descriptor that stays open.

    The kernel batches this counter per processor: with many processors it may be off by some MiB.
    `memory_classes` counts the pages themselves. Safe after a fork: a child opens its own file.
    """
    if sys.platform != "linux":
        return _psutil_rss(os.getpid())
    read = _STATM.read()
    return None if read is None else read.resident


class InUse(NamedTuple):
    """Bytes that limits on a process count: mapped address space, resident set, data and stack.

    `shared` is the part of the resident set that is mapped from files or shared memory.
    """

    mapped: int
    resident: int
    data: int
    shared: int


def in_use() -> InUse | None:
    """This process's figures; as cheap as `rss`. None outside Linux."""
    return _STATM.read() if sys.platform == "linux" else None


def mapped_ranges() -> list[range]:
    """Addresses of this process, in order, that `shared` counts: what is shared, or mapped from a file."""
    ranges = []
    for line in (text_of(SELF / "maps") or "").splitlines():
        span, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if permissions.endswith("s") or inode != "0":
            ranges.append(range(*(int(each, 16) for each in span.split("-"))))
    return ranges


def host_sample(proc: Path = SELF) -> HostSample:
    """One reading of `smaps_rollup` and `status`; outside Linux only `rss` is known.

    Too slow for every mark: the kernel walks all resident pages, 0.3 ms at 16 MiB and 10 ms at 4 GiB. While a
    copy of this process works for the watch, its pages are shared and tell nothing: `pss` and `uss` are None.
    """
    status = kib_fields(text_of(proc / "status"))
    rollup = {} if proc == SELF and living() else kib_fields(text_of(proc / "smaps_rollup"))
    if not status and not rollup:
        return HostSample(rss=_psutil_rss(os.getpid()) if proc == SELF else None)
    return HostSample(
        rss=_first(rollup.get("Rss"), status.get("VmRSS")),
        pss=rollup.get("Pss"),
        swap=_first(rollup.get("Swap"), status.get("VmSwap")),
        peak_rss=status.get("VmHWM"),
        uss=_private(rollup),
    )


def host_peak(proc: Path = SELF) -> int | None:
    """Highest resident set since the start, or since the mark was reset (`VmHWM`). Walks no page."""
    return kib_fields(text_of(proc / "status")).get("VmHWM")


def memory_classes(proc: Path = SELF) -> MemoryClasses | None:
    """Every mapping of the process with its class and resident bytes; None if there is no smaps.

    Takes 6 to 9 ms in a process that has imported torch, and 16 ms at 4 GiB resident: the kernel walks all
    resident pages. It returns the file in pieces, so a change meanwhile may be seen or not.
    """
    text = text_of(proc / "smaps")
    if not text:
        return None
    return parse_smaps(text, tmpfs_devices(text_of(proc / "mountinfo") or ""))


def children(pid: int | None = None) -> list[ChildSample]:
    """All living descendants of this process (or of `pid`) with their memory.

    A process that ends meanwhile, or is a zombie, is left out. For a process of another user only `rss` is
    known.
    """
    import psutil

    samples = []
    for below in descendants(pid):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(below)
            if process.status() != psutil.STATUS_ZOMBIE:
                samples.append(_child(process))
    return [sample for sample in samples if sample.rss is not None]


def resident(address: int, nbytes: int) -> int | None:
    """Resident bytes of `[address, address + nbytes)` of this process; None if unknown.

    Like RSS, this only counts present pages: not memory that was never touched, nor what was swapped out.
    Unlike RSS, it also counts pages that were read but never written, which all map to the kernel's page of
    zeros (calloc memory, numpy's `zeros`). Reads `/proc/self/pagemap`, 2 MiB of it per GiB of the range.
    """
    if nbytes <= 0:
        return 0
    if sys.platform != "linux":
        return None
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return None
    try:
        return _present_bytes(pagemap, address, address + nbytes, os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return None
    finally:
        os.close(pagemap)


def dev_shm(path: Path = Path("/dev/shm")) -> ShmUse | None:
    """Size and use of the shared-memory file system that torch uses; None if there is none."""
    try:
        space = os.statvfs(path)
    except (OSError, AttributeError):  # AttributeError: no statvfs on this platform
        return None
    total = space.f_blocks * space.f_frsize
    return ShmUse(total=total, used=total - space.f_bfree * space.f_frsize)


def pinned() -> PinnedStats | None:
    """Statistics of torch's page-locked memory; None while CUDA is not initialized in this process.

    Memory that others locked (`cudaHostRegister`, DeepSpeed's native backend, NCCL) is not in them.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    read = getattr(torch.cuda.memory, "host_memory_stats_as_nested_dict", None)
    return None if read is None else pinned_stats(read(), release_of(torch.__version__) >= (2, 13))


def pinned_stats(stats: Mapping[str, Any], active_is_counted: bool) -> PinnedStats | None:
    """Read the nested dictionary of `torch.cuda.memory.host_memory_stats_as_nested_dict`.

    Args:
        stats: the dictionary. What torch 2.8 calls `reserved_bytes` is `allocated_bytes` in newer ones.
        active_is_counted: whether this torch subtracts freed blocks from `active_bytes` (2.13 and newer).
    """
    owned = stats.get("reserved_bytes", stats.get("allocated_bytes"))
    if owned is None:
        return None
    if not active_is_counted or "active_bytes" not in stats:
        return PinnedStats(owned["current"])
    active = stats["active_bytes"]["current"]
    return PinnedStats(owned["current"], active, max(owned["current"] - active, 0))


class _Statm:
    """`/proc/self/statm`, opened once per process: it describes the process that opened it."""

    def __init__(self) -> None:
        self._opened: tuple[int, Descriptor] | None = None
        self._page = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 0

    def read(self) -> InUse | None:
        pid = os.getpid()
        if self._opened is not None and self._opened[0] == pid and self._opened[1].ours:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return self._in(self._opened[1])
        try:
            self._opened = (pid, Descriptor(os.open("/proc/self/statm", os.O_RDONLY)))
            return self._in(self._opened[1])
        except OSError:
            return None

    def _in(self, opened: Descriptor) -> InUse:
        columns = os.pread(opened.number, 128, 0).split()
        mapped, resident, shared, data = (int(columns[number]) * self._page for number in (0, 1, 2, 5))
        return InUse(mapped, resident, data, shared)


_STATM: Final = _Statm()


def _present_bytes(pagemap: int, start: int, end: int, page: int) -> int:
    """Bytes of `[start, end)` on present pages, read in pieces so that a huge range needs little memory."""
    import numpy as np

    first, last = start // page, -(-end // page)
    total = 0
    for low in range(first, last, _PAGEMAP_PIECE):
        high = min(low + _PAGEMAP_PIECE, last)
        entries = np.frombuffer(os.pread(pagemap, (high - low) * 8, low * 8), dtype=np.uint64)
        present = entries >> np.uint64(63)  # bit 63: the page is in memory (admin-guide/mm/pagemap)
        total += int(present.sum()) * page
        if low == first and len(present):
            total -= int(present[0]) * (start - first * page)
        if high == last and len(present) == high - low:
            total -= int(present[-1]) * (last * page - end)
    return total


_PAGEMAP_PIECE: Final = 1 << 20
"""Pages per read: 8 MiB of pagemap, 4 GiB of memory."""


def _child(process: psutil.Process) -> ChildSample:
    rollup = kib_fields(text_of(Path(f"/proc/{process.pid}/smaps_rollup")))
    own = [rollup[key] for key in ("Anonymous", "Private_Dirty") if key in rollup]
    return ChildSample(
        pid=process.pid,
        name=process.name(),
        rss=rollup["Rss"] if "Rss" in rollup else _psutil_rss(process.pid),
        pss=rollup.get("Pss"),
        uss=_private(rollup),
        shared_anon=max(own[0] - own[1], 0) if len(own) == 2 else None,
        swap=rollup.get("Swap"),
    )


def _private(rollup: Mapping[str, int]) -> int | None:
    private = [rollup[key] for key in ("Private_Clean", "Private_Dirty") if key in rollup]
    return sum(private) if len(private) == 2 else None


def _psutil_rss(pid: int) -> int | None:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def kib_fields(text: str | None) -> dict[str, int]:
    """Return the `Name:   123 kB` lines of a /proc file, in bytes; empty if there is no file."""
    return {match[1]: int(match[2]) << 10 for match in _KIB_FIELD.finditer(text or "")}


_KIB_FIELD: Final = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def text_of(path: Path) -> str | None:
    """The text of a /proc file, None when it is absent, forbidden, or its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """(major, minor) of a version such as `2.13.0+cu130` or `2.15.0a0+git1234`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def recorded_collectives() -> int:
    """Of how many of its last collectives torch keeps a record; 0 without a process group.

    Each takes about 1 KiB of malloc's memory, until there are that many.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    number = next((value for name in names if (value := os.environ.get(name, "")).isdecimal()), "2000")
    return int(number)
