"""Distributed checkpoints (`torch.distributed.checkpoint`) of one rank, and what they give to threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
import torch.distributed as dist

from memtriage.prediction.fake_cuda.stand_ins import around, replaced
from memtriage.prediction.fake_cuda.tensors import parts, true_device
from memtriage.prediction.host.memory import SAVED, HostMemory
from memtriage.prediction.host.torch_files import TorchFiles

_TRACED: Final = ("torch.distributed.checkpoint", "transformers.")
"""Modules whose work for threads is done at once, as only the program's own thread is traced."""


def replacements(memory: HostMemory, files: TorchFiles) -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value. None where torch has no distributed package."""
    submit = ThreadPoolExecutor.submit
    attributes: list[tuple[Any, str, Any]] = [(ThreadPoolExecutor, "submit", around(submit, _at_once))]
    if not dist.is_available():
        return attributes
    from torch.distributed.checkpoint import default_planner, utils
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    wrapper = utils._DistWrapper
    return [
        *attributes,
        (wrapper, "__init__", around(wrapper.__init__, _alone, memory)),
        # The other ranks' parts are in no plan.
        (default_planner, "_validate_global_plan", lambda *args: []),
        (StateDictStager, "_stage_untyped_storage", _staged(memory, files, StateDictStager)),
        *(
            (StateDictStager, name, around(getattr(StateDictStager, name), _offloaded, files))
            for name in ("_offload_tensor",)
            if hasattr(StateDictStager, name)  # not in every version of torch
        ),
    ]


class _DoneWork(Future[Any]):
    """Work that is done, whose arguments are kept until the program asks for its result.

    A trace has no clock: work in a thread is taken to last until the program waits for it.
    """

    kept: Any = None

    def result(self, timeout: float | None = None) -> Any:
        self.kept = None
        return super().result(timeout)


def _at_once(original: Callable[..., Any], pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not (getattr(function, "__module__", None) or "").startswith(_TRACED):
        return original(pool, function, *args, **kwargs)
    future = _DoneWork()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    future.kept = args, kwargs
    return future


def _alone(
    memory: HostMemory,
    original: Callable[..., None],
    self: Any,
    group: Any,
    use_dist: bool,
    coordinator_rank: int,
) -> None:
    """Each rank plans alone: what others would send is not known."""
    memory.meet()
    original(self, group, False, coordinator_rank)


def _staged(memory: HostMemory, files: TorchFiles, stager: Any) -> Callable[..., Any]:
    """The copy of a storage that asynchronous saving keeps."""
    original = stager._stage_untyped_storage

    def stage(self: Any, storage: Any, non_blocking: bool = False) -> Any:
        if storage.device.type != "meta":
            return original(self, storage, non_blocking)
        copy = self._cached_storage_mapping.get(storage)
        if copy is None:
            with replaced(memory, "kind", SAVED):
                copy = files.storage(storage.nbytes())
            self._cached_storage_mapping[storage] = copy
        return copy

    return stage


def _offloaded(
    files: TorchFiles,
    original: Callable[..., Any],
    self: Any,
    x: torch.Tensor,
    memo: dict[int, Any],
    non_blocking: bool = False,
) -> Any:
    """The copy of a tensor that asynchronous saving keeps; torch's has data."""
    if true_device(x).type != "meta" or parts(x)[0] is not x:
        return original(self, x, memo, non_blocking)
    storage = self._stage_untyped_storage(x.untyped_storage(), non_blocking=non_blocking)
    memo[id(x)] = copy = files.tensor(storage, x.dtype, x.storage_offset(), x.size(), x.stride())
    return copy
