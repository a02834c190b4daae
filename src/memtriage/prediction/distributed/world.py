"""A process group of many ranks in one process, for the time of a trace.

PyTorch's "fake" backend: this process is one rank, the others do not exist, and collectives leave their
tensors as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from memtriage.prediction.build import BuildError
from memtriage.prediction.fake_cuda.stand_ins import all_replaced, around, replaced
from memtriage.prediction.fake_cuda.tensors import devices_true, gpu
from memtriage.prediction.lifetimes import Lifetimes

NCCL_VERSION: Final = (2, 27, 3)
"""What `torch.cuda.nccl.version` answers: new enough for bfloat16 everywhere."""


def check_world(size: int, rank: int) -> None:
    """Whether this process can play such a rank.

    Raises:
        BuildError: there is no such rank, this build of torch has no process groups, or one is there already.
    """
    if size < 1 or not 0 <= rank < size:
        raise BuildError(f"world_size={size}, rank={rank}; expected a rank from 0 up to world_size - 1")
    if size > 1 and not dist.is_available():
        raise BuildError(f"world_size={size}; this build of torch has no torch.distributed")
    if size > 1 and dist.is_initialized():
        raise BuildError(
            f"world_size={size}; a process group exists already: predict before it is made, or in another "
            "process"
        )


@contextmanager
def fake_world(size: int, rank: int, lifetimes: Lifetimes) -> Iterator[None]:
    """This process is one rank of a job of `size` on one node, with the GPU of its rank."""
    # A launcher such as `torchrun` may start the program as the only rank, without a group so far.
    alone = os.environ.get("WORLD_SIZE") == "1" and dist.is_available() and not dist.is_initialized()
    if size == 1 and not alone:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memtriage.prediction.distributed import buffers, pipeline

    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        # The group puts its rank before errors.
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        stack.callback(dist.destroy_process_group)
        known = [*_replacements(size), *buffers.replacements(lifetimes), *pipeline.replacements()]
        # Not every version of torch has all of them.
        stack.enter_context(all_replaced(each for each in known if hasattr(*each[:2])))
        yield


def _replacements(size: int) -> list[tuple[Any, str, Any]]:
    import torch.distributed.tensor._random as random_of_shards
    from torch._subclasses import fake_tensor
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed as data_parallel

    core = dist.distributed_c10d
    replacements: list[tuple[Any, str, Any]] = [
        (torch._C, "_get_accelerator", lambda *args: torch.device("cuda")),
        (torch.cuda.nccl, "version", lambda: NCCL_VERSION),
        # `torch.device` of a number asks C++ for the accelerator.
        (_init_utils, "_get_compute_device", lambda *args: gpu()),
        (random_of_shards, "_rng_tracker", _Unseeded()),
        (ShardingPropagator, _SHAPES, around(getattr(ShardingPropagator, _SHAPES), _unwatched)),
        # A build for CUDA would make a tensor there, as the fake GPU is reported as present.
        (fake_tensor, "init_gpu_context", lambda device: None),
        # Compares shapes between ranks, by values of the device.
        (data_parallel, "_verify_param_shape_across_processes", lambda *args: None),
    ]
    for owner in (dist, core):
        replacements += [
            (owner, "init_process_group", around(core.init_process_group, _made_already, size)),
            (owner, "destroy_process_group", lambda group=None: None),
            (owner, "new_group", around(core.new_group, _without_backend)),
            (owner, "is_nccl_available", lambda: True),
        ]
    return replacements


class _Unseeded:
    """In place of DTensor's keeper of random states, which reads those of the device."""

    distribute_region_enabled = False

    def _distribute_region(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _manual_seed(self, seed: int) -> None: ...


_SHAPES: Final = "_propagate_tensor_meta_non_cached"
"""Where DTensor finds the shape of a result, by running the operator on tensors without data of its own."""


def _unwatched(original: Callable[..., Any], *args: Any) -> Any:
    # Shapes are the same on every device, and only a build for CUDA can fill tensors of its kind.
    on_host = replaced(DeviceMesh, "device_type", property(lambda self: "cpu"))
    with _disable_current_modes(), devices_true(), on_host:
        return original(*args)


def _made_already(
    size: int,
    original: Callable[..., None],
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`init_process_group`: the group is there, and must be the one that the program means."""
    if world_size not in (-1, None, size):
        raise BuildError(
            f"the program makes a process group of {world_size} ranks; "
            f"expected {size}, the world_size that was asked for"
        )


def _without_backend(
    original: Callable[..., Any],
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`new_group`: of the backend that there is."""
    return original(ranks, timeout, None, None, *args, **kwargs)
