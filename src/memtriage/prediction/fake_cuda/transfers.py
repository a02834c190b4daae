"""Storages and copies that bypass the dispatcher: resizing, checkpoints, `nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import _functions
from torch.utils._python_dispatch import _disable_current_modes

from memtriage.prediction.build import BuildError
from memtriage.prediction.fake_cuda.stand_ins import around
from memtriage.prediction.fake_cuda.tensors import CUDA, META, as_device, gpu, kernel
from memtriage.prediction.lifetimes import Lifetimes


def replacements(lifetimes: Lifetimes) -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value."""
    storage = torch.UntypedStorage
    resize, address = storage.resize_, storage.data_ptr

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        lifetimes.resized(self, "resize_")
        return result

    def data_ptr(self: Any) -> int:
        if self.device.type != "meta":
            return int(address(self))
        return int(self._cdata) if self.nbytes() else 0  # identified by it, never read

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        lifetimes.used_on(self.untyped_storage(), stream.stream_id)

    def is_on_gpu(storage: Any) -> bool:
        return storage.device.type == "meta" and lifetimes.block_of(storage) is not None

    return [
        (storage, "resize_", resized),
        (storage, "data_ptr", data_ptr),
        (storage, "to", around(storage.to, _storage_moved)),
        (torch.Tensor, "record_stream", record_stream),
        (torch._utils, "_rebuild_tensor", around(torch._utils._rebuild_tensor, _rebuilt, is_on_gpu)),
        (torch.serialization, "location_tag", _located(torch.serialization.location_tag, is_on_gpu)),
        (torch._C, "_scatter", _scatter),
        (_functions, "_streams", None),  # kept from call to call
    ]


def _storage_moved(
    original: Callable[..., Any], self: Any, *, device: Any, non_blocking: bool = False
) -> Any:
    """`UntypedStorage.to`, by which `torch.load(map_location="cuda")` moves what it read."""
    if torch.device(device).type != "cuda" or self.device.type != "cpu":
        return original(self, device=device, non_blocking=non_blocking)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self).to(CUDA).untyped_storage()


def _rebuilt(
    is_on_gpu: Callable[[Any], bool],
    original: Callable[..., Any],
    storage: Any,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Where `torch.load` makes a tensor of a storage."""
    untyped = storage._untyped_storage
    if not is_on_gpu(untyped):
        return original(storage, offset, size, stride)
    with _disable_current_modes(), kernel():
        empty = torch.empty(0, dtype=storage.dtype, device=META)
        return as_device(empty.set_(untyped, offset, size, stride), CUDA)


def _located(original: Callable[..., Any], is_on_gpu: Callable[[Any], bool]) -> Callable[..., Any]:
    """Where `torch.save` says that a storage was."""
    return lambda storage: str(gpu()) if is_on_gpu(storage) else original(storage)


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Any, dim: int, streams: Any
) -> list[torch.Tensor]:
    """`scatter` (torch/csrc/cuda/comm.cpp): to one device, on the stream for copies."""
    if len(devices) > 1:
        raise BuildError(
            f"nn.DataParallel over {len(devices)} GPUs cannot be traced, as one process uses them all: give "
            "it one (device_ids=[0]), or use DistributedDataParallel"
        )
    if not streams or streams[0] is None:
        return [tensor.to(CUDA)]
    with streams[0]:
        return [tensor.to(CUDA)]
