"""CUDA graphs of compiled code without a GPU: torch's own trees decide what is recorded, copied and kept.

`torch._inductor.cudagraph_trees` runs as it is. What it asks of CUDA is answered here: what is captured runs
on the tensors of the trace, in a private pool; a replay does nothing. Once there is a graph, storages have
made-up addresses, by which the trees tell them apart.

Known limitations: no two storages have the same address one after the other, as on a GPU. What graphs take
from the driver is not known.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memtriage.prediction.fake_cuda.stand_ins import around, replaced
from memtriage.prediction.fake_cuda.tensors import CUDA, META, as_device, meaning_meta, true_device
from memtriage.prediction.lifetimes import SHARED_POOL, Lifetimes

_ADDRESS_SHIFT: Final = 40
"""Bits for the offset in a storage; none is that big."""
_OF_GENERATOR: Final = (8, 8)
"""Seed and offset of the default generator, which the first capture makes in the shared pool
(`CUDAGeneratorState::register_graph`, ATen/cuda/CUDAGeneratorImpl.cpp)."""


class CudaGraphs:
    """What torch's trees of CUDA graphs ask of CUDA."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._pools = itertools.count(SHARED_POOL + 1)
        self._captured = False

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """The attributes to replace: owner, name, value."""
        _trees()
        lifetimes, storages, native = self._lifetimes, torch.UntypedStorage, torch._C
        return [
            (torch.cuda, "CUDAGraph", type("CUDAGraph", (_Graph,), {"graphs": self})),
            (torch.cuda, "graph_pool_handle", lambda: (next(self._pools), 0)),
            (storages, "data_ptr", around(storages.data_ptr, self._with_address)),
            (torch.Tensor, "data_ptr", around(torch.Tensor.data_ptr, self._in_storage)),
            (native, "_cuda_beginAllocateCurrentThreadToPool", lambda device, pool: self.enter(pool)),
            (native, "_cuda_endAllocateToPool", self.leave),
            (native, "_cuda_getCheckpointState", lambda device, pool: lifetimes.keep_pool(pool[0])),
            (
                native,
                "_cuda_setCheckpointPoolState",
                lambda device, state, stale, owning: lifetimes.put_back(state, owning),
            ),
            (
                native,
                "_cuda_cudaCachingAllocator_raw_delete",
                lambda address: lifetimes.free_block(_block(address)),
            ),
            (native, "_construct_storage_from_data_pointer", self._storage_at),
            (native, "_construct_CUDA_Tensor_From_Storage_And_Metadata", _tensor_of),
            (native, "_free_And_Remove_DeleterFn", lifetimes.disown),
            (native, "_set_storage_data_ptr_access_error_msg", lifetimes.overwritten.__setitem__),
            (native, "_tensors_data_ptrs_at_indices_equal", _addresses_equal),
            *(
                (native, name, lambda *args: True)
                for name in (
                    *("_cuda_cudaCachingAllocator_is_enabled", "_cuda_checkPoolLiveAllocations"),
                    *("_cuda_get_conv_benchmark_empty_cache", "_has_Standard_Deleter"),
                )
            ),
            *(
                (native, name, lambda *args: None)
                for name in (
                    *("_cuda_releasePool", "_host_emptyCache", "_cudnn_set_conv_benchmark_empty_cache"),
                    "_set_storage_access_error_msg",
                )
            ),
        ]

    def drop(self) -> None:
        """Drop all graphs; to be called while what is replaced is still replaced."""
        _trees().reset_cudagraph_trees()

    def capture(self, pool: tuple[int, int]) -> None:
        """What is allocated from now on is a graph's."""
        if not self._captured:
            self._captured = True
            self._lifetimes.scratch(list(_OF_GENERATOR), "cuda graph")
        self.enter(pool)

    def enter(self, pool: tuple[int, int]) -> None:
        """What is allocated from now on is in a private pool."""
        self._lifetimes.pool = pool[0]

    def leave(self, *args: object) -> None:
        """What is allocated from now on is in the shared pool."""
        self._lifetimes.pool = SHARED_POOL

    def _with_address(self, original: Callable[[Any], int], storage: Any) -> int:
        """`UntypedStorage.data_ptr`, which is 0 of what takes no memory."""
        block = self._lifetimes.block_of(storage) if self._captured else None
        if block is None or not self._lifetimes.recording.blocks[block].size:
            return original(storage)
        return (block + 1) << _ADDRESS_SHIFT

    def _in_storage(self, original: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int:
        """`Tensor.data_ptr`, in a storage that has an address."""
        address = original(tensor)  # which may refuse to answer
        if self._captured and true_device(tensor).type == "meta":
            offset = tensor.storage_offset() * tensor.element_size()
            address = int(tensor.untyped_storage().data_ptr() + offset)
        return address

    def _storage_at(self, address: int, device: torch.device, size: int) -> Any:
        """A storage of what is at an address; when it goes, nothing is freed."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            storage = torch.UntypedStorage(size, device="meta")
        self._lifetimes.adopt(storage, _block(address))
        return storage


class _Graph:
    """`torch.cuda.CUDAGraph`. A class of each trace derives from it: programs name it in annotations."""

    graphs: CudaGraphs

    def capture_begin(self, pool: tuple[int, int] | None = None, **options: object) -> None:
        if pool is None:
            raise RuntimeError("a CUDAGraph was captured outside the trees of torch.compile")
        self.graphs.capture(pool)

    def capture_end(self) -> None:
        self.graphs.leave()

    def register_generator_state(self, state: object) -> None:
        """Nothing is drawn."""

    def replay(self) -> None:
        """Nothing is computed, and nothing allocated."""


def _trees() -> Any:
    """torch's module of the trees; as it is imported, it asks for a type of what was built for CUDA."""
    built = hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState")
    with replaced(torch.backends.cuda, "is_built", lambda: built):
        return importlib.import_module("torch._inductor.cudagraph_trees")


def _block(address: int) -> int:
    return (address >> _ADDRESS_SHIFT) - 1


def _addresses_equal(tensors: list[Any], addresses: list[int | None], places: list[int]) -> bool:
    """Whether the tensors at these places have these addresses."""
    return all(tensors[place].data_ptr() == addresses[place] for place in places)


_empty = meaning_meta(torch.empty, lambda *args, **kwargs: True)


def _tensor_of(metadata: dict[str, Any], storage: Any) -> torch.Tensor:
    """A tensor on the device with this storage."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        made = _empty(0, dtype=metadata["dtype"], device=META)
        made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])
        return as_device(made, CUDA)
