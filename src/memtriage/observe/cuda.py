"""The CUDA caching allocator of this process: counters, segments, allocation sites, out-of-memory events.

Reading changes nothing: torch is never imported here, CUDA is never initialized, no context is made on a
device without one, and no stream is synchronized. Every function needs CUDA to be initialized by the script,
and says what it returns until then.

Known limitations: blocks from other allocators of the process (CuPy, NCCL's own buffers, raw `cudaMalloc`)
are not seen. With `cudaMallocAsync` there are no segments and few counters, with a pluggable allocator
neither segments nor counters.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Final, Literal

from memtriage.model.blocks import Block, BlockState, DeviceCounters, Segment
from memtriage.model.code_origin import CodeOwner, code_owner, path_below
from memtriage.model.units import MIB
from memtriage.observe.origin import package_folder
from memtriage.process.messages import complain
from memtriage.process.stdlib import os

Frame = Mapping[str, Any]
"""One frame of an allocation's stack: `filename`, `line`, `name`."""

OomCallback = Callable[[int, int, int, int], None]
"""Called as `(device, requested, limit, free)`, see `attach_oom_observer`."""

SMALL_PAGE: Final = 2 * MIB
"""Page of an expandable segment of the small pool (`kSmallBuffer` in c10/core/AllocatorConfig.h)."""
LARGE_PAGE: Final = 20 * MIB
"""Page of an expandable segment of the large pool, unless `large_segment_size_mb` is set."""


def is_rocm() -> bool:
    """Whether the loaded torch is built for AMD's ROCm, whose devices it calls `cuda:N`."""
    return getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None) is not None


def initialized() -> bool:
    """True if this process has initialized CUDA. Imports and initializes nothing."""
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def backend() -> str | None:
    """The allocator in use: `native`, `cudaMallocAsync` or `pluggable`; None before CUDA is initialized."""
    if not initialized():
        return None
    return str(_torch().cuda.get_allocator_backend())


def has_context(device: int) -> bool:
    """True if this process has a CUDA context on the device. This does not make one."""
    if not initialized():
        return False
    torch = _torch()
    probe = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if probe is None:
        return bool(device == torch.cuda.current_device())
    return bool(probe(device))


def capturing() -> bool:
    """True while the current stream of this thread captures a CUDA graph, when driver calls are unsafe."""
    return initialized() and bool(_torch().cuda.is_current_stream_capturing())


def devices() -> list[int]:
    """CUDA indices whose allocator this process has used. A device with only a context is left out."""
    if not initialized():
        return []
    with_context = [index for index in range(_torch().cuda.device_count()) if has_context(index)]
    return [index for index in with_context if _allocator_used(index)]


def counters(device: int) -> DeviceCounters:
    """The allocator's counters of one device; every figure None before CUDA is initialized.

    Reads the nested dictionary that `torch.cuda.memory_stats` would then flatten and sort.
    """
    if not initialized():
        return DeviceCounters()
    return parse_counters(_memory_stats(device), backend())


def parse_counters(stats: Mapping[str, Any], backend_name: str | None) -> DeviceCounters:
    """Counters from the nested statistics. With `cudaMallocAsync` only allocated and reserved are kept.

    Source: `getDeviceStats` of that allocator gets these two from the driver, repeats the first as active and
    leaves the rest at zero.
    """
    allocated, reserved = _bytes(stats, "allocated_bytes"), _bytes(stats, "reserved_bytes")
    own = stats if backend_name == "native" else {}
    return DeviceCounters(
        allocated=allocated("current"),
        reserved=reserved("current"),
        requested=_bytes(own, "requested_bytes")("current"),
        active=_bytes(own, "active_bytes")("current"),
        peak_allocated=allocated("peak"),
        peak_reserved=reserved("peak"),
        retries=own.get("num_alloc_retries"),
        ooms=own.get("num_ooms"),
        inactive_split=_bytes(own, "inactive_split_bytes")("current"),
    )


def expandable_segments() -> bool:
    """Whether the allocator is set to make expandable segments now. False before CUDA is initialized."""
    return initialized() and bool(_EXPANDABLE.search(_allocator_conf()))


def splits_any_block() -> bool:
    """Whether blocks of all sizes are split: `max_split_size_mb` is not set. True before CUDA is in use."""
    return not (initialized() and "max_split_size_mb" in _allocator_conf())


def _allocator_conf() -> str:
    """The allocator's settings.

    Older releases of torch do not report them. There the environment is read, which does not show later
    changes by the program.
    """
    read_settings = getattr(_torch()._C, "_accelerator_getAllocatorSettings", None)
    return allocator_conf_of_environment() if read_settings is None else str(read_settings())


def allocator_conf_of_environment() -> str:
    """The allocator's settings in the environment, as torch reads them; empty if there are none."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def capacity(device: int) -> int | None:
    """The device's memory in bytes; None before CUDA is initialized."""
    if not initialized():
        return None
    return int(_torch().cuda.get_device_properties(device).total_memory)


def per_process_limit(device: int) -> int | None:
    """The most that this process's allocator may reserve, in bytes; None if no fraction was set.

    Source: `setMemoryFraction` in CUDACachingAllocator.cpp caps at fraction x total memory; an unset cap
    reads 1.0.
    """
    total = capacity(device)
    if total is None or backend() == "pluggable":
        return None
    fraction = float(_torch().cuda.get_per_process_memory_fraction(device))
    return None if fraction >= 1.0 else int(fraction * total)


def segments(device: int | None = None, script_root: str | None = None) -> list[Segment] | None:
    """The allocator's segments, on one device or on all, without event traces.

    Blocks name their allocation site while `AllocationHistory` (or another recording with contexts) is on.
    Before torch 2.11 the snapshot includes the traces that another tool records, which takes time.

    Args:
        device: CUDA index; None for all.
        script_root: folder of the user's script, for the sites; see `allocation_site`.

    Returns:
        None if the allocator in use has no segments; empty before CUDA is initialized.
    """
    if not initialized():
        return []
    if backend() != "native":
        return None
    memory_snapshot = _torch().cuda.memory_snapshot
    traces_optional = "include_traces" in inspect.signature(memory_snapshot).parameters
    raw = memory_snapshot(include_traces=False) if traces_optional else memory_snapshot()
    return parse_segments(raw, device, script_root)


def parse_segments(
    raw: Iterable[Mapping[str, Any]], device: int | None = None, script_root: str | None = None
) -> list[Segment]:
    """Segments from the dictionaries of a snapshot. Unknown keys are ignored, missing ones tolerated."""
    return [
        _segment(segment, script_root)
        for segment in raw
        if device is None or segment.get("device", 0) == device
    ]


class AllocationHistory:
    """Makes the allocator remember, for every live block, the Python stack that allocated it.

    Recording is process-wide and off by default. `start` switches it on only if it is off, in the mode
    without an event trace (2 us per allocation, according to torch). `stop` only switches off what `start`
    switched on. Blocks from before `start` have no site. After `stop`, stacks of blocks that are still alive
    remain readable.

    Known limitation: a tool that begins its own recording after `start` is recognized at `stop` by its event
    trace. If it has no trace, it cannot be distinguished from this recording, and is switched off.
    """

    def __init__(self) -> None:
        self._ours = False

    @property
    def borrowed(self) -> bool:
        """Whether `start` switched it on."""
        return self._ours

    def start(self) -> bool:
        """Switch recording on if it is off.

        Returns:
            True if allocations are recorded now, by this object or by another tool. False before CUDA is
            initialized (switching on would initialize it) and with allocators that cannot record.
        """
        if backend() != "native":
            return False
        already_on = _history_enabled()
        if already_on is not False:
            return bool(already_on)
        _record_history("state")
        self._ours = bool(_history_enabled())
        return self._ours

    def stop(self) -> None:
        """Switch recording off if `start` switched it on and no tool took it over. May be called twice."""
        ours, self._ours = self._ours, False
        if ours and initialized() and _history_enabled() and not self._taken_over():
            _record_history(None)

    def _taken_over(self) -> bool:
        traces = _torch().cuda.memory._snapshot().get("device_traces", ())
        return any(len(trace) > _TRACE_ENTRIES for trace in traces)


def allocation_site(frames: Sequence[Frame], script_root: str | None = None) -> str | None:
    """`file.py:line in function` of the frame responsible for an allocation; None without frames.

    The innermost frame that is the user's code; if there is none, the innermost of a library other than
    torch; else the innermost.

    Args:
        frames: innermost first, as in a snapshot.
        script_root: folder of the user's script. Files below it are the user's, even if the folder is an
            installed package, and are named relative to it; others by their base name.
    """
    frame = blamed_frame(frames, script_root)
    return None if frame is None else _site(frame, script_root)


def blamed_frame(frames: Sequence[Frame], script_root: str | None = None) -> Frame | None:
    """The frame that `allocation_site` names. Only the files of frames are read."""
    if not frames:
        return None
    internal_folders = _internal_folders()
    library: Frame | None = None
    for frame in frames:
        owner = _owner(str(frame.get("filename", "")), script_root, internal_folders)
        if owner == "user":
            return frame
        if owner == "library" and library is None:
            library = frame
    return library or frames[0]


def is_of_user(frame: Frame, script_root: str | None = None) -> bool:
    """Return whether a frame is in a file of the user, as `allocation_site` decides it."""
    return _owner(str(frame.get("filename", "")), script_root, _internal_folders()) == "user"


def attach_oom_observer(callback: OomCallback | None) -> bool:
    """Have `callback(device, requested, limit, free)` called inside each allocation that is about to fail.

    `requested` is what the driver was asked for: the request rounded up to a whole segment. `limit` is the
    process's cap if one is set, else the device's memory. `free` is the device's free memory. All in bytes;
    device is a CUDA index. The callback runs in the allocating thread, with the GIL but without the
    allocator's lock, before the exception exists: it must not allocate on the GPU. What it raises is logged
    and swallowed, so that the script sees its own error.

    torch cannot detach an observer. So one dispatcher is attached per process, which calls the latest
    callback and only has a weak reference to it: keep it alive (a lambda would vanish at once). `None`
    removes it.

    Returns:
        False, with nothing attached, before CUDA is initialized (attaching would initialize it), or if torch
        or the allocator has no such observer.
    """
    return _oom_dispatch.attach(callback)


class _OomDispatch:
    """The only function that torch ever gets: passes the event to the current callback."""

    def __init__(self) -> None:
        self._attached = False
        self._current: Callable[[], OomCallback | None] = _nobody

    def attach(self, callback: OomCallback | None) -> bool:
        self._current = _nobody if callback is None else _weak(callback)
        if self._attached or callback is None:
            return True
        if backend() != "native":
            return False
        names = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")
        attach = next(
            (attach_function for name in names if (attach_function := getattr(_torch()._C, name, None))), None
        )
        if attach is None:
            return False
        attach(self)
        self._attached = True
        return True

    def __call__(self, device: int, requested: int, limit: int, free: int) -> None:
        callback = self._current()
        if callback is None:
            return
        try:
            callback(device, requested, limit, free)
        except Exception as error:
            # An exception here would replace the script's out-of-memory error with ours.
            complain("memtriage", f"the out-of-memory observer failed ({type(error).__name__}: {error})")


def _nobody() -> OomCallback | None:
    return None


def _weak(callback: OomCallback) -> Callable[[], OomCallback | None]:
    return weakref.WeakMethod(callback) if isinstance(callback, MethodType) else weakref.ref(callback)


_oom_dispatch = _OomDispatch()


def _torch() -> Any:
    """torch, in a process that has initialized CUDA."""
    return sys.modules["torch"]


def _memory_stats(device: int) -> Mapping[str, Any]:
    torch = _torch()
    read = getattr(torch._C, "_cuda_memoryStats", None) or torch.cuda.memory_stats_as_nested_dict
    try:
        stats: Mapping[str, Any] = read(device)
    except RuntimeError:  # A pluggable allocator keeps no statistics and says so this way.
        return {}
    return stats


def _bytes(stats: Mapping[str, Any], name: str) -> Callable[[str], int | None]:
    figures: Mapping[str, int] = stats.get(name, {}).get("all", {})
    return figures.get


def _allocator_used(device: int) -> bool:
    if backend() != "native":
        return True  # Its counters do not show use; the context does.
    reserved = _bytes(_memory_stats(device), "reserved_bytes")
    # The script can reset peaks and totals, but not the current value: any of them is proof of use.
    return any(reserved(figure) for figure in ("current", "peak", "allocated"))


def _history_enabled() -> bool | None:
    """Whether recording is on; None if torch does not say: then another tool may record, so do not switch."""
    enabled = getattr(_torch()._C, "_cuda_isHistoryEnabled", None)
    return None if enabled is None else bool(enabled())


_TRACE_ENTRIES: Final = 1
"""Bound of the event trace: in this mode torch keeps one entry, whatever the bound (memory_snapshot.cpp)."""


def _record_history(enabled: Literal["state"] | None) -> None:
    # context "state" only keeps the stack on the live block; "alloc" would add it to the trace.
    _torch().cuda.memory._record_memory_history(
        enabled=enabled, context="state", stacks="python", max_entries=_TRACE_ENTRIES
    )


# The middle state has two spellings: `active_pending_free` in torch/csrc, `active_awaiting_free` in its docs.
_STATES: Final[Mapping[str, BlockState]] = {
    "active_allocated": "active",
    "active_awaiting_free": "awaiting",
    "active_pending_free": "awaiting",
}


def _segment(raw: Mapping[str, Any], script_root: str | None) -> Segment:
    address = int(raw["address"])
    expandable = bool(raw.get("is_expandable", False))
    blocks: list[Block] = []
    position = address
    for raw_block in raw.get("blocks", ()):
        block = _block(raw_block, position, script_root)
        blocks.append(block)
        position = block.end
    first, second = raw.get("segment_pool_id", (0, 0))
    page = SMALL_PAGE if raw.get("segment_type") == "small" else LARGE_PAGE
    return Segment(
        device=int(raw.get("device", 0)),
        address=address,
        size=int(raw.get("total_size", position - address)),
        stream=int(raw.get("stream", 0)),
        pool=(int(first), int(second)),
        expandable=expandable,
        blocks=tuple(blocks),
        page=page if expandable else None,
    )


def _block(raw: Mapping[str, Any], position: int, script_root: str | None) -> Block:
    size = int(raw["size"])
    state = _STATES.get(raw.get("state", ""), "free")
    # A free block keeps the figure of its last use.
    requested = 0 if state == "free" else min(int(raw.get("requested_size", size)), size)
    return Block(
        address=int(raw.get("address", position)),
        size=size,
        requested=requested,
        state=state,
        site=allocation_site(raw.get("frames") or (), script_root),
    )


_EXPANDABLE: Final = re.compile(r"\bexpandable_segments\s*:\s*[Tt]rue\b")
_OWN_FOLDER: Final = package_folder()


@functools.lru_cache(maxsize=4096)
def _owner(filename: str, script_root: str | None, internal_folders: tuple[str, ...]) -> CodeOwner:
    return code_owner(filename, script_root, internal_folders)


def _internal_folders() -> tuple[str, ...]:
    """Folders of memtriage and of the loaded torch, which may be a clone of its repository."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    return (_OWN_FOLDER, torch_file.removesuffix("__init__.py")) if torch_file else (_OWN_FOLDER,)


def _site(frame: Frame, script_root: str | None) -> str:
    filename = str(frame.get("filename", "?"))
    name = path_below(filename, script_root) or filename.rpartition("/")[2]
    return f"{name}:{frame.get('line', 0)} in {frame.get('name', '?')}"
