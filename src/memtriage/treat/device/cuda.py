"""A CUDA device that implements the protocol with PyTorch's own allocator calls.

Known limitations: only the native allocator (`backend:cudaMallocAsync` and pluggable ones have no segments);
inside `torch.cuda.use_mem_pool`, allocations would go to that pool.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from memtriage.allocator.settings import parse_version
from memtriage.allocator.what_if import settings_of
from memtriage.model.recording import Int64s
from memtriage.observe import cuda as allocator
from memtriage.treat.device.copy_kernel import compiled, ranges_of
from memtriage.treat.device.protocol import Device, DeviceLayout, Use, layout_of_raw

KERNEL_FROM: Final = 64
"""For this many ranges or more, one table is faster than a call per range (5 us of Python and launch)."""
LARGE: Final = 1 << 20
"""A range of at least this many bytes uses the whole device: a plain copy is as fast as any."""
_NOTHING: Final = contextlib.nullcontext()


class CudaDevice(Device):
    """One CUDA device of this process. CUDA must be initialized."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The device is current; no `__torch_function__`, dispatch mode or autograd takes part."""
        with (
            torch.cuda.device(self.index),
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch.no_grad(),
        ):
            # A thread has no context until it calls the runtime, and the driver's calls need one.
            torch.cuda.synchronize(self.index)
            yield

    def use(self) -> Use:
        counters = allocator.counters(self.index)
        return Use(allocated=counters.allocated or 0, reserved=counters.reserved or 0)

    def available(self) -> int:
        """Free memory of the device, within `set_per_process_memory_fraction`."""
        free = int(torch.cuda.mem_get_info(self.index)[0])
        limit = allocator.per_process_limit(self.index)
        return free if limit is None else max(0, min(free, limit - self.use().reserved))

    def layout(self) -> DeviceLayout:
        """Segments, blocks and settings, without event traces where torch can leave them out (2.11)."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], DeviceLayout]:
        """Copy torch's data now; it is converted to columns when the result is called."""
        snapshot = _snapshot()

        def read() -> DeviceLayout:
            settings = msgspec.structs.replace(
                settings_of(snapshot.get("allocator_settings", {})),
                torch_version=parse_version(torch.__version__),
            )
            return layout_of_raw(snapshot["segments"], self.index, settings)

        return read

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def empty_cache(self) -> None:
        """Return wholly free segments and pages, of every device as in torch."""
        torch.cuda.empty_cache()

    def allocate(self, nbytes: int, stream: int) -> int:
        return int(torch._C._cuda_cudaCachingAllocator_raw_alloc(nbytes, stream))

    def release(self, address: int) -> None:
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)

    def resize(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int], stream: int) -> None:
        """`resize_` in one pass of C code: between two storages no Python runs, so no signal handler."""
        with self._on(stream):
            deque(map(torch.UntypedStorage.resize_, storages, sizes), maxlen=0)

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Copy in one launch if there are many ranges, else one copy per range."""
        with self._on(stream):
            if len(sizes) < KERNEL_FROM or not self._copy_by_table(targets, sources, sizes):
                self._copy_each(targets, sources, sizes)

    def _copy_each(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        large = sizes >= LARGE
        for target, source, size in zip(
            targets[large].tolist(), sources[large].tolist(), sizes[large].tolist(), strict=True
        ):
            self._bytes(target, size).copy_(self._bytes(source, size))
        small = [
            (self._bytes(target, size), self._bytes(source, size))
            for target, source, size in zip(
                targets[~large].tolist(), sources[~large].tolist(), sizes[~large].tolist(), strict=True
            )
        ]
        if small:
            torch._foreach_copy_([target for target, _ in small], [source for _, source in small])

    def download(self, target: Tensor, source: int) -> None:
        target.copy_(self._bytes(source, target.numel()))

    def upload(self, target: int, source: Tensor) -> None:
        self._bytes(target, source.numel()).copy_(source)

    def _copy_by_table(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> bool:
        kernel = compiled(self.index)
        if kernel is None:
            return False
        rows, tiles = ranges_of(targets, sources, sizes)
        try:
            table = torch.empty(rows.size, dtype=torch.int64, device=self._device)
        except torch.OutOfMemoryError:
            return False
        table.copy_(torch.from_numpy(rows.reshape(-1)))
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        kernel.launch(table.data_ptr(), len(rows), tiles, stream)
        return True

    def _bytes(self, address: int, nbytes: int) -> Tensor:
        """Device memory as a tensor that does not own it."""
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        # Checking is much cheaper than torch's context manager, which would slow down moves of single
        # storages.
        if torch._C._cuda_getCurrentRawStream(self.index) == stream:
            return _NOTHING
        other = torch.cuda.ExternalStream(stream, device=self._device) if stream else None
        entered: contextlib.AbstractContextManager[object] = torch.cuda.stream(
            other or torch.cuda.default_stream(self.index)
        )
        return entered


def _snapshot() -> dict[str, Any]:
    snapshot = torch._C._cuda_memorySnapshot
    if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters:
        state: dict[str, Any] = snapshot((0, 0, False))
    else:
        state = snapshot(None)
    return state
