"""A traced program's host: what operators, parameters and files need, noted while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memtriage.prediction.distributed.collectives import WAITED_FOR_LATER
from memtriage.prediction.fake_cuda.stand_ins import all_replaced, around, replaced
from memtriage.prediction.fake_cuda.tensors import CPU, META, as_device, kernel, parts, true_device
from memtriage.prediction.host import checkpoints, loaders
from memtriage.prediction.host.memory import COMMUNICATION, HostMemory, MemoryPlace
from memtriage.prediction.host.safetensors_files import safetensors_followed
from memtriage.prediction.host.torch_files import TorchFiles
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.notes import Notes
from memtriage.prediction.operators import FUNCTIONAL_COLLECTIVES, Args, Operator, tensors_in

PARAMETER: Final = "parameter"
_COPIED: Final = ("allgather", "all_gather", "reduce_scatter")
_UNTOUCHED: Final = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Operators whose results have no pages before they are written."""


class HostNotes:
    """Notes storages of the host that operators make, read and write."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._sent: int | None = None  # the block that gloo copied for the last collective

    def collective(self, func: Any, args: Args) -> None:
        """A collective is about to run, or to be waited for: all ranks are here.

        gloo copies the whole that is gathered or scattered (measured with four processes, torch 2.13). If
        nobody waits at once, its copy is there until the next collective.
        """
        if self._sent is not None:
            self.memory.free(self._sent)
            self._sent = None
        name = func._schema.name
        if name.endswith(("wait_tensor", WAITED_FOR_LATER)):
            return
        self.memory.meet()
        if not any(kind in name for kind in _COPIED):
            return
        of_host = (sum(tensor.nbytes for tensor in tensors_in(arg) if _of_host(tensor)) for arg in args)
        size = max(of_host, default=0)
        if name.startswith(FUNCTIONAL_COLLECTIVES):
            size *= next((arg for arg in args if isinstance(arg, int)), 1) if "gather" in name else 1
        self._sent = self.memory.allocate(size, COMMUNICATION)
        waits = [
            not given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.name == "async_op"
        ]
        if any(waits):
            self.memory.free(self._sent)
            self._sent = None

    def operator(
        self,
        operator: Operator,
        inputs: list[torch.Tensor],
        targets: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """An operator has run; all tensors are plain ones."""
        for tensor in targets:
            if _of_host(tensor):
                self.memory.use(tensor.untyped_storage(), written=True)
                if operator.resizes:
                    self.memory.resized(tensor.untyped_storage())
        if operator.makes or targets:  # and does not only look at them
            for tensor in inputs:
                if _of_host(tensor):
                    self.memory.use(tensor.untyped_storage(), written=False)
        for tensor in outputs:
            if _of_host(tensor):
                self.memory.see(tensor.untyped_storage(), used=operator.name not in _UNTOUCHED)


def _of_host(tensor: torch.Tensor) -> bool:
    """Whether it is on the host, with or without data."""
    device = true_device(tensor)
    if device.type == "meta":
        return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.CPU))
    return device.type == "cpu" and tensor.layout is torch.strided


def without_gpu() -> AbstractContextManager[None]:
    """In the block torch says that there is no GPU."""
    answers = (
        (torch.cuda, "is_available", False),
        (torch.cuda, "device_count", 0),
        (torch.accelerator, "is_available", False),
        (torch.accelerator, "current_accelerator", None),
        (torch.accelerator, "device_count", 0),
        (torch._C, "_get_accelerator", torch.device("cpu")),
    )
    return all_replaced(
        (owner, name, lambda *args, answer=answer, **kwargs: answer) for owner, name, answer in answers
    )


@contextmanager
def host_followed(memory: HostMemory, lifetimes: Lifetimes, notes: Notes) -> Iterator[None]:
    """In the block parameters of the host have no data, and files are read and written without."""
    files = TorchFiles(memory, lambda storage: lifetimes.block_of(storage) is not None)
    attributes = [
        *files.replacements(),
        *checkpoints.replacements(memory, files),
        *loaders.replacements(memory, notes),
        (nn.Parameter, "__new__", staticmethod(around(nn.Parameter.__new__, _parameter_made, memory))),
        (nn.Module, "_apply", around(nn.Module._apply, _applied, memory)),
        (torch.Tensor, "is_pinned", lambda self, device=None: memory.pins(self.untyped_storage())),
        (torch.Tensor, "pin_memory", around(torch.Tensor.pin_memory, _pin, memory)),
    ]
    with all_replaced(attributes), safetensors_followed(memory, files):
        yield


def _pin(memory: HostMemory, original: Any, self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """`Tensor.pin_memory`, which copies what is not pinned."""
    if not torch.cuda.is_available() or memory.pins(self.untyped_storage()):
        return self
    with replaced(memory, "place", MemoryPlace.PINNED):
        return self.clone()


def _parameter_made(
    memory: HostMemory, original: Any, cls: type, data: Any = None, requires_grad: bool = True
) -> Any:
    """`nn.Parameter`: of the host it has no data, like all that is computed from it.

    Autograd refuses a gradient without data for a parameter with data.
    """
    if type(data) in (torch.Tensor, nn.Parameter) and (
        true_device(data).type == "cpu" and data.is_floating_point() and bool(data.numel())
    ):
        data = _without_data(memory, data)
    made = original(cls, data, requires_grad)
    _name(memory, made)
    return made


def _applied(memory: HostMemory, original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module._apply`, by which `to` gives parameters other storages."""
    result = original(self, *args, **kwargs)
    for parameter in self._parameters.values():
        if parameter is not None:
            _name(memory, parameter)
    return result


def _name(memory: HostMemory, parameter: torch.Tensor) -> None:
    for part in parts(parameter):
        if _of_host(part):
            memory.name(part.untyped_storage(), PARAMETER)


def _without_data(memory: HostMemory, data: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), _disable_current_modes(), kernel():
        empty = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device=META)
        made = as_device(empty, CPU)
    storage = data.untyped_storage()
    memory.see(made.untyped_storage(), used=not memory.knows(storage) or memory.block_of(storage) is not None)
    return made
