"""`memtriage.compact`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

import torch

from memtriage._collector import collector_paused
from memtriage.observe import cuda as allocator
from memtriage.treat.compact.one_device import compact_device, predict_device
from memtriage.treat.compact.result import Compaction
from memtriage.treat.compact.storages import Finder
from memtriage.treat.device.cuda import CudaDevice

Which: TypeAlias = int | str | torch.device


def compact(
    devices: Which | Iterable[Which] | None = None,
    *,
    dry_run: bool = False,
    keep: Iterable[torch.Tensor | torch.UntypedStorage] = (),
) -> Compaction:
    """See `memtriage.compact`."""
    note = _why_not()
    if note is not None:
        return Compaction((), dry_run, (note,))
    chosen = _chosen(devices)
    kept = tuple(keep)
    one_device = predict_device if dry_run else compact_device
    with collector_paused():  # a collection in the middle would take longer than all the rest
        done = [one_device(CudaDevice(index), partial(Finder, kept)) for index in chosen]
    return Compaction(tuple(done), dry_run)


def _why_not() -> str | None:
    """Why nothing can be done in this process now; None if it can."""
    if not allocator.initialised():
        return "CUDA is not in use in this process: there is nothing to compact"
    backend = allocator.backend()
    if backend != "native":
        return f"the allocator in use ({backend}) keeps no segments that could be looked at"
    if allocator.capturing():
        return "a CUDA graph is being captured: call compact() before or after"
    return None


def _chosen(devices: Which | Iterable[Which] | None) -> list[int]:
    """CUDA indices.

    Raises:
        ValueError: for what is no CUDA device of this process.
    """
    used = allocator.devices()
    if devices is None:
        return used
    asked = [devices] if isinstance(devices, (int, str, torch.device)) else list(devices)
    indices = [one if isinstance(one, int) else _index(torch.device(one)) for one in asked]
    count = torch.cuda.device_count()
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"no CUDA device {index}: this process sees {count}")
    return [index for index in dict.fromkeys(indices) if index in used]


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"only CUDA devices can be compacted, not {device}")
    return int(torch.cuda.current_device() if device.index is None else device.index)
