"""The whole remedy: put the patches on, take them off."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.model.blocks import pinned_block
from memtriage.observe.malloc import trim
from memtriage.treat.deepspeed.internals import ACCUMULATE, FINISH, Internals, find_internals
from memtriage.treat.deepspeed.staging import Tiles, restore, slim
from memtriage.treat.deepspeed.sums import SharedSums
from memtriage.treat.offload.pinned import locked_memory

EXACT_FROM: Final = 256 << 10
"""Bytes from which a buffer is pinned exactly.

Below it torch's rounding costs little, while each mapping takes one of the 65,530 that Linux gives a process
(`vm.max_map_count`).
"""

_PATCHES: Final = "_memtriage_exact_host_memory"


class ExactHostMemory:
    """Makes DeepSpeed's ZeRO-1/2 `offload_optimizer` take 16 host bytes per parameter instead of 18 to 28.

        remedy = memtriage.deepspeed_exact_host_memory()
        engine, *_ = deepspeed.initialize(...)

    It applies to engines made from now on. Results stay the same, bit for bit:

    - pinned memory takes its exact size, not the next power of two (on CUDA; also under ZeRO-3);
    - two tiles of 8 MiB replace the 16-bit copy of the partition through which the weights go to the device;
      a buffer as large as the largest gradient, which nothing uses, is not kept;
    - after `initialize` and after the first step, malloc returns its free memory to the system.

    With `share_gradient_sums`, gradient accumulation takes 16 bytes, too, instead of 18: the 16-bit sums of
    the micro-batches are in the fp32 gradients until those are written. Results stay the same, bit for bit.
    But if parameters are unused in some micro-batches of a step, `SumsLost` may be raised, and between
    micro-batches the fp32 gradients must not be read.

    A context manager: `with memtriage.deepspeed_exact_host_memory(): ...` around all of the training.

    Attributes:
        rounding: bytes that torch's rounding would have added to what was pinned so far, freed or not.
        staging: bytes of staging copies that engines no longer need.

    Limits: `DS_PIN_MEMORY_BACKEND=native` pins exactly by itself and is not changed. ZenFlow's optimizer has
    its own buffers and keeps them. If the driver refuses a registration, a `PinningFailed` warning is given,
    and torch pins as before. Engines made before the call do not change.
    """

    def __init__(self, *, share_gradient_sums: bool = False) -> None:
        """Put the patches on.

        Raises:
            ImportError: DeepSpeed is not installed.
            UnknownDeepSpeed: it differs from the known ones; nothing was changed.
            RuntimeError: the remedy is on already.
        """
        self.rounding = 0
        self.staging = 0
        self._slimmed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        internals = find_internals(sums=share_gradient_sums)
        self._internals: Internals | None = internals
        if getattr(internals.optimizer, _PATCHES, None) is not None:
            raise RuntimeError("deepspeed_exact_host_memory() is on already: undo() the first one before")
        setattr(internals.optimizer, _PATCHES, self)
        self._undo: list[Callable[[], None]] = [lambda: delattr(internals.optimizer, _PATCHES)]
        if internals.on_cuda:
            self._replace(internals.accelerator, "_torch_pin_memory", self._pin)
            self._replace(internals.accelerator, "_torch_empty_pinned", self._empty_pinned)
        self._replace(internals.optimizer, "initialize_optimizer_states", self._initializing)
        self._sums = SharedSums(self._slimmed.__contains__) if share_gradient_sums else None
        if self._sums is not None:
            self._replace(internals.optimizer, ACCUMULATE, self._sums.accumulating)
            self._replace(internals.optimizer, FINISH, self._sums.finishing)
        self._replace(internals.optimizer, "step", self._stepping)

    @property
    def active(self) -> bool:
        """Whether the patches are on."""
        return self._internals is not None

    def undo(self) -> None:
        """Take all patches off, and restore the staging copies of living engines. Repeatable.

        Memory pinned exactly stays so until its engine is freed.
        """
        internals, self._internals = self._internals, None
        if internals is None:
            return
        while self._undo:
            self._undo.pop()()
        for optimizer, elements in list(self._slimmed.items()):
            restore(optimizer, internals.accelerator, elements)
        if self._sums is not None:
            self._sums.undo(internals.accelerator)
        self._slimmed.clear()

    def __enter__(self) -> ExactHostMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Call a function, with the attribute first, instead of it; `undo` restores the owner's own."""
        before = getattr(owner, name)
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(functools.partial(delattr, owner, name))

        @functools.wraps(before)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(before, *args, **kwargs)

        setattr(owner, name, replaced)

    def _pin(self, original: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.is_pinned():
            return original(tensor)
        locked = self._locked(tensor.dtype, tensor.shape)
        return original(tensor) if locked is None else locked.copy_(tensor.detach())

    def _empty_pinned(self, original: Callable[[Tensor, Any], Tensor], tensor: Tensor, shape: Any) -> Tensor:
        locked = self._locked(tensor.dtype, torch.Size(shape))
        return original(tensor, shape) if locked is None else locked

    def _locked(self, dtype: torch.dtype, shape: torch.Size) -> Tensor | None:
        """Exactly pinned memory; None if it is small, or the driver refuses."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < EXACT_FROM:
            return None
        locked = locked_memory(nbytes)
        if locked is None:
            return None
        self.rounding += pinned_block(nbytes) - nbytes
        return locked.view(dtype).view(shape)

    def _initializing(self, original: Callable[[Any], Any], optimizer: Any) -> Any:
        """DeepSpeed calls it when the partitions are made, and before their gradients are."""
        internals = self._internals
        if internals is not None:
            self._slim(optimizer, internals)
        result = original(optimizer)
        trim()
        return result

    def _stepping(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sums is not None:
            self._sums.before_step(optimizer)
        result = original(optimizer, *args, **kwargs)
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            trim()
        return result

    def _slim(self, optimizer: Any, internals: Internals) -> None:
        if not optimizer.cpu_offload or type(optimizer).step is not internals.optimizer.step:
            return  # a subclass with its own step may use the copies in other ways
        staging, elements = slim(optimizer, Tiles(), drop_buffer=internals.drops_gradient_buffer)
        self.staging += staging
        self._slimmed[optimizer] = elements


def deepspeed_exact_host_memory(*, share_gradient_sums: bool = False) -> ExactHostMemory:
    """Cut the host memory of DeepSpeed's ZeRO-1/2 optimizer offload from 18 to 28 bytes per parameter to 16.

    Call it before `deepspeed.initialize`. Pinned memory takes its exact size, small tiles replace the 16-bit
    staging copy, and malloc is trimmed after the first step. Results stay the same, bit for bit.

    Args:
        share_gradient_sums: with gradient accumulation, keep the 16-bit sums of the micro-batches in the
            memory of the fp32 gradients: 16 bytes instead of 18. `SumsLost` may be raised in a step in which
            some micro-batches leave parameters unused.

    Returns:
        The remedy; `undo()` or the end of its `with` block removes it.

    Raises:
        ImportError: DeepSpeed is not installed.
        memtriage.UnknownDeepSpeed: it differs from the known ones; nothing was changed.
        RuntimeError: the remedy is on already.

    Limits: see `memtriage.ExactHostMemory`. Engines made before the call do not change.
    """
    return ExactHostMemory(share_gradient_sums=share_gradient_sums)
