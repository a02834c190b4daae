"""What the driver says about a device: all memory in use (CUDA), and that of each process (NVML).

A ledger closes against CUDA's figure, `total - free` of `cudaMemGetInfo`. NVML adds who uses it, if it can:
inside a container its process ids may be the host's, and if the driver does not count (some virtual GPUs),
the sizes are missing. Nothing here initializes CUDA, makes a context or raises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, Final

from memtriage.model.blocks import DriverUse
from memtriage.observe import cuda
from memtriage.process.stdlib import os

ProcessUse = Mapping[int, int | None]
"""Bytes by process id; None if the driver does not say."""

# A process can be in several lists (compute and graphics), and MIG or vGPU devices refuse some of them.
_PROCESS_LISTS: Final = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


def used(device: int) -> int | None:
    """All bytes in use on the device, from `cudaMemGetInfo` alone.

    None if CUDA is not initialized, this process has no context on the device (the call would make one), or
    the current stream captures a CUDA graph.
    """
    figures = _memory_info(device)
    return None if isinstance(figures, str) else figures[1] - figures[0]


def driver_use(device: int) -> DriverUse | None:
    """The driver's figures for a CUDA index; None if they cannot be read. Never raises.

    `explain_driver_use` returns the reason. It makes a few NVML calls, and the first time initializes NVML:
    too slow for every mark.
    """
    answer = explain_driver_use(device)
    return None if isinstance(answer, str) else answer


def explain_driver_use(device: int) -> DriverUse | str:
    """The driver's figures for a CUDA index, or why they cannot be read. Never raises."""
    figures = _memory_info(device)
    if isinstance(figures, str):
        return figures
    free, total = figures
    return split_processes(total, total - free, _process_use(device), os.getpid())


def split_processes(total: int, in_use: int, processes: ProcessUse | str, own_pid: int) -> DriverUse:
    """The driver's figures, with this process separated from the others.

    Args:
        total, in_use: bytes, from `cudaMemGetInfo`.
        processes: bytes by process id, or why there are none.
        own_pid: id of this process in its own namespace.
    """
    if isinstance(processes, str):
        source = f"cudaMemGetInfo; use by process unknown: {processes}"
        return DriverUse(total=total, used=in_use, processes=(), own=None, source=source)
    others = tuple((pid, size) for pid, size in sorted(processes.items()) if pid != own_pid)
    own = processes.get(own_pid)
    if own is not None:
        source = "cudaMemGetInfo; use by process from NVML"
    elif own_pid in processes:
        source = "cudaMemGetInfo; NVML lists this process without its size"
    else:
        source = "cudaMemGetInfo; NVML does not list this process under its own id"
    return DriverUse(total=total, used=in_use, processes=others, own=own, source=source)


def first_device_name() -> str | None:
    """The name of the machine's first GPU, without CUDA; None if NVML does not report one."""
    try:
        nvml = _nvml()
    except _NotReported:
        return None
    try:
        return str(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
    except nvml.NVMLError:
        return None


def process_memory(pid: int, visible: str | None) -> dict[str, int]:
    """Return the memory of any process on each CUDA device, as NVML counts it; empty if it cannot say.

    Args:
        pid: the process, in this process's namespace.
        visible: its `CUDA_VISIBLE_DEVICES`; None if not set. Devices are numbered in NVML's order, which is
            CUDA's if all are of one kind.
    """
    try:
        nvml = _nvml()
        handles = _handles(nvml)
        if visible is not None:
            handles = [_visible(nvml, handles, name.strip()) for name in visible.split(",")]
        sizes = [_listed_processes(nvml, handle).get(pid) for handle in handles]
    except _NotReported:
        return {}
    return {f"cuda:{at}": size for at, size in enumerate(sizes) if size}


def _handles(nvml: Any) -> list[Any]:
    try:
        return [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise _NotReported(f"NVML: {error}") from error


def _visible(nvml: Any, handles: list[Any], name: str) -> Any:
    """Return the handle of one of `CUDA_VISIBLE_DEVICES`: a number or a UUID. Raises `_NotReported`."""
    if name.isdigit() and int(name) < len(handles):
        return handles[int(name)]
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        raise _NotReported(f"NVML does not know the device {name!r}") from None


def _memory_info(device: int) -> tuple[int, int] | str:
    """(free, total) in bytes, or why they cannot be read."""
    if not cuda.initialized():
        return "CUDA is not initialized in this process"
    if not cuda.has_context(device):
        return f"this process has no CUDA context on device {device}"
    if cuda.capturing():
        return "a CUDA graph is being captured"
    try:
        free, total = sys.modules["torch"].cuda.mem_get_info(device)
    except RuntimeError as error:  # torch raises CUDA's errors as RuntimeError.
        return f"cudaMemGetInfo failed: {error}"
    return int(free), int(total)


class _NotReported(Exception):
    """NVML cannot say; the message is the reason."""


def _process_use(device: int) -> ProcessUse | str:
    try:
        nvml = _nvml()
        return _listed_processes(nvml, _handle(nvml, device))
    except _NotReported as reason:
        return str(reason)


def _listed_processes(nvml: Any, handle: Any) -> ProcessUse:
    sizes: dict[int, int | None] = {}
    answered = False
    for name in _PROCESS_LISTS:
        try:
            entries = getattr(nvml, name)(handle)
        except nvml.NVMLError:
            continue
        answered = True
        for entry in entries:
            # Each list counts the whole process: the sizes are the same figure, not parts of a sum.
            known = [size for size in (sizes.get(entry.pid), entry.usedGpuMemory) if size is not None]
            sizes[entry.pid] = max(known, default=None)
    if not answered:
        raise _NotReported("NVML lists no processes for this device")
    return sizes


@functools.cache
def _nvml() -> Any:
    """The NVML bindings, initialized once per process and never shut down. Raises `_NotReported`."""
    try:
        import pynvml
    except ImportError as error:
        raise _NotReported(f"nvidia-ml-py is not installed ({error})") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NotReported(f"NVML: {error}") from error
    return pynvml


def _handle(nvml: Any, device: int) -> Any:
    """NVML's handle of a CUDA index. Raises `_NotReported`.

    By UUID, else by PCI address. Both come from CUDA, which has already applied `CUDA_VISIBLE_DEVICES` and
    `CUDA_DEVICE_ORDER`, so indices need no translation.
    """
    properties = sys.modules["torch"].cuda.get_device_properties(device)
    for lookup, identifier in _identifiers(properties):
        try:
            handle = getattr(nvml, lookup)(identifier)
        except nvml.NVMLError:
            continue
        if _is_split(nvml, handle):
            # This is the whole card in MIG mode, whose processes are not those of the instance.
            raise _NotReported("NVML knows the card but not the MIG instance")
        return handle
    raise _NotReported("NVML does not find the device by its UUID or PCI address")


def _identifiers(properties: Any) -> list[tuple[str, str]]:
    """(NVML's look-up function, identifier) to try in turn."""
    lookups: list[tuple[str, str]] = []
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        bare = str(uuid).removeprefix("GPU-").removeprefix("MIG-")
        lookups += [("nvmlDeviceGetHandleByUUID", kind + bare) for kind in ("MIG-", "GPU-")]
    bus = getattr(properties, "pci_bus_id", None)
    if bus is not None:
        domain, slot = properties.pci_domain_id, properties.pci_device_id
        lookups.append(("nvmlDeviceGetHandleByPciBusId", f"{domain:08x}:{bus:02x}:{slot:02x}.0"))
    return lookups


def _is_split(nvml: Any, handle: Any) -> bool:
    """True for a whole card in MIG mode; an instance, and a card without the mode, refuse the question."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)
