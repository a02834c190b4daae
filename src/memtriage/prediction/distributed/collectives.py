"""Collectives on tensors without data: what they hold, and for which owner."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.distributed as dist

from memtriage.prediction.engine import called_by_engine
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.operators import Args, Kwargs, mapped, tensors_in

_FLATTENED: Final = {"c10d::allgather_": 0, "c10d::reduce_scatter_": 1}
"""Collectives between one tensor and a list of them, by the position of the list: NCCL wants it as one
tensor, into which it is copied where all are of one size (`newLikeFlat` in ProcessGroupNCCL.cpp)."""

WAITED_FOR_LATER: Final = "_c10d_functional::_wrap_tensor_autograd"
"""Wraps a functional collective's result, which is waited for at its first use: no memory of its own. A trace
uses the result itself, as a compiler does."""

HOLDS_UNTIL_STEP: int | float = math.inf
"""What the reducer puts into earlier steps is held; 0 for a watchdog that always looks in time."""


class Collectives:
    """The collectives of one trace.

    NCCL keeps the tensors of a collective that is never waited for: every 100 ms its watchdog looks which
    ones are complete, and the process group's next collective lets their tensors go (`shelvesToUnstash_` in
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.8 and newer). DDP's reducer waits for no work,
    only for its future. A trace has no clock: what the reducer put into one step is released by the first
    collective in a backward of a later step. So the bucket of the first step is there until the second
    backward, next to those that replace it.

    The all-reduce of a group of one rank waits for no other and launches nothing where it is in place
    (`ncclLaunchOneRank`), so it is taken to be complete in time: the next collective in a later step lets its
    tensors go, before DDP makes its buckets again.

    How far the host is ahead of the watchdog differs from run to run and from rank to rank: on two H200s
    (torch 2.11) six of eight ranks let the bucket go before the second step, one in its backward, and one in
    the third's.

    Attributes:
        groups: ranks of the process groups that were used, by name: NCCL makes a communicator of each.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._shelves: list[tuple[int, bool, list[torch.Tensor]]] = []  # step, whether of one rank, tensors
        self.groups: dict[str, int] = {}
        self._buckets: dict[int, dict[int, int]] = {}  # by step, the bytes of the reducer's storages

    def answer(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs an operator of a process group on empty tensors of the host, and returns the caller's instead.

        The process group is one without communication, which would copy between the tensors that it is given.
        """
        stands_for: dict[int, torch.Tensor] = {}
        made: list[torch.Tensor] = []

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            made.append(torch.empty(0, dtype=tensor.dtype, device="cpu"))
            stands_for[id(made[-1])] = tensor
            return made[-1]

        ranks = self._note_group(args)
        if func._schema.name in _FLATTENED:
            for tensors in args[_FLATTENED[func._schema.name]]:
                if len({tensor.shape for tensor in tensors}) == 1:
                    size = sum(tensor.nbytes for tensor in tensors)
                    self._lifetimes.release(self._lifetimes.scratch([size], func._schema.name))
        now, backward = self._lifetimes.step, self._lifetimes.phase == "backward"
        self._shelves = [
            (step, alone, tensors)
            for step, alone, tensors in self._shelves
            if step == now or not (backward or alone)
        ]
        result = func(*mapped(args, stand_in), **mapped(kwargs, stand_in))
        *written, work = result if isinstance(result, (tuple, list)) else (result,)
        written = mapped(written, lambda value: stands_for.get(id(value), value))
        if isinstance(work, torch.ScriptObject):
            work = _done(tensors_in(written)).boxed()
        if now < HOLDS_UNTIL_STEP and called_by_engine():  # of DDP's reducer
            tensors = tensors_in(written)
            self._shelves.append((now, ranks == 1, tensors))
            if ranks != 1:
                storages = (tensor.untyped_storage() for tensor in tensors)
                self._buckets.setdefault(now, {}).update(
                    {storage._cdata: storage.nbytes() for storage in storages}
                )
        return (*written, work) if isinstance(result, (tuple, list)) else work

    def _note_group(self, args: Args) -> int:
        """Note the group of a collective, and return how many ranks it has."""
        ranks = 0
        for arg in args:
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                group = dist.ProcessGroup.unbox(arg)
                ranks = self.groups[group.group_name] = group.size()
        return ranks

    @property
    def held(self) -> int:
        """Bytes of the first step's buckets that others replaced, while NCCL still held them."""
        first = self._buckets.get(0, {})
        later = {storage for step, storages in self._buckets.items() if step > 0 for storage in storages}
        return sum(size for storage, size in first.items() if storage not in later) if later else 0


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    """Work that is done; its future has the tensors, as DDP's reducer wants."""
    core: Any = torch._C._distributed_c10d
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    work: dist.Work = core._create_work_from_future(future)
    return work
