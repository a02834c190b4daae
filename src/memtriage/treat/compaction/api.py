"""`memtriage.compact`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

import torch

from memtriage.observe import cuda as allocator
from memtriage.process.collector import collector_paused
from memtriage.treat.compaction.one_device import compact_device, predict_device
from memtriage.treat.compaction.result import Compaction
from memtriage.treat.compaction.storages import StorageFinder
from memtriage.treat.device.cuda import CudaDevice

Which: TypeAlias = int | str | torch.device


def compact(
    devices: Which | Iterable[Which] | None = None,
    *,
    dry_run: bool = False,
    keep: Iterable[torch.Tensor | torch.UntypedStorage] = (),
) -> Compaction:
    """Move the few live storages that strand mostly empty segments, and return the memory to the driver.

    Every tensor, view, saved tensor and alias stays valid and keeps its values: only the memory under the
    storage objects changes. The allocator's cache is emptied, too. Call it at the end of a phase or a step,
    when no other thread uses the device.

    Args:
        devices: CUDA devices (`0`, `"cuda:1"`, a `torch.device`, or several); by default all that are in use.
        dry_run: move nothing; `predicted` of the result says what moving would achieve.
        keep: tensors or storages that must not move.

    Returns:
        Per device: allocated and reserved before, predicted and after; bytes moved; what could not be moved,
        and why. Empty, with a note, if CUDA is not in use. Sizes in bytes.

    Raises:
        memtriage.CompactionError: storages gave up their memory for the move, and something else took it
            before they got memory again. The error holds their values; see its `restore()`.
        ValueError: there is no such device.
        RuntimeError: the device failed; values are in place. Running out of memory is not an error: the
            result's `stopped` says so.

    Limits: nothing moves while a CUDA graph is alive. Addresses handed out (DLPack to another library, raw
    pointers) cannot be seen: name such tensors in `keep`. See docs/compact.md.
    """
    note = _why_not()
    if note is not None:
        return Compaction((), dry_run, (note,))
    chosen = _chosen(devices)
    kept = tuple(keep)
    one_device = predict_device if dry_run else compact_device
    with collector_paused():  # a collection in the middle would take longer than the move
        done = [one_device(CudaDevice(index), partial(StorageFinder, kept)) for index in chosen]
    return Compaction(tuple(done), dry_run)


def _why_not() -> str | None:
    """Why nothing can be done in this process now; None if it can."""
    if not allocator.initialized():
        return "CUDA is not in use in this process: there is nothing to compact"
    backend = allocator.backend()
    if backend != "native":
        return f"the allocator in use ({backend}) has no segments to inspect"
    if allocator.capturing():
        return "a CUDA graph is being captured: call compact() before or after"
    return None


def _chosen(devices: Which | Iterable[Which] | None) -> list[int]:
    """CUDA indices.

    Raises:
        ValueError: one is not a CUDA device of this process.
    """
    used = allocator.devices()
    if devices is None:
        return used
    asked = [devices] if isinstance(devices, (int, str, torch.device)) else list(devices)
    indices = [device if isinstance(device, int) else _index(torch.device(device)) for device in asked]
    count = torch.cuda.device_count()
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"no CUDA device {index}: this process sees {count}")
    return [index for index in dict.fromkeys(indices) if index in used]


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"only CUDA devices can be compacted, not {device}")
    return int(torch.cuda.current_device() if device.index is None else device.index)
