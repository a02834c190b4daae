"""What stays on the host for each parameter: master weight, the two moments, optionally an fp32 gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memtriage.treat.offload.pinned import host_memory
from memtriage.treat.offload.tiles import (
    Share,
    aligned,
    is_dense,
    like_parameter,
    local,
    memory_order,
    ordered_as,
)

WEIGHT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES: Final = (torch.float32, torch.bfloat16)
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MASTER: Final = "master"


class ResidentParameter:
    """One parameter's memory on the host, and what is known about its weights on the device.

    The master is a plain float32. Kept as two planes of high and low 16 bits, it would take the same 4 bytes
    and need two more passes over the tile.

    Attributes:
        share: which elements are this rank's.
        master, exp_avg, exp_avg_sq: this rank's elements in the parameter's memory order.
        gradient: the same for the fp32 gradient; None if gradients do not stay on the host.
        has_gradient: whether `gradient` holds one.
        step: updates taken, a float32 scalar as torch keeps it.
        known: whether `master` holds the weights. False at first, and after loading a state without master.
    """

    def __init__(self, parameter: Tensor, name: str, ranks: int, rank: int) -> None:
        """Raises ValueError or TypeError if the parameter cannot be offloaded."""
        self.parameter = parameter
        self.name = name
        weights = local(parameter)
        _check(weights, name)
        if isinstance(parameter, DTensor) and any(
            placement.is_partial() for placement in parameter.placements
        ):
            raise ValueError(f"{name} is a DTensor with a Partial placement; shard or replicate it")
        self.shape, self.strides, self.dtype = weights.shape, weights.stride(), weights.dtype
        self.share = Share(weights.numel(), ranks, rank)
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.step = torch.zeros((), dtype=torch.float32)
        self.known = False
        self._written = False
        self._views: dict[str, Tensor] = {}
        self._entry: dict[str, Tensor] | None = None
        self._seen: tuple[int, int] | None = None

    def place(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor | None) -> None:
        """Give the memory to work in, one-dimensional and of `share.length` elements each."""
        self.master, self.exp_avg, self.exp_avg_sq, self.gradient = master, exp_avg, exp_avg_sq, gradient

    def weights(self) -> Tensor:
        """The local weights on the device in memory order.

        Raises:
            RuntimeError: the parameter has changed since construction, or its memory is gone.
        """
        now = local(self.parameter)
        if now.shape != self.shape or now.dtype != self.dtype or now.stride() != self.strides:
            raise RuntimeError(
                f"{self.name} was {tuple(self.shape)} {self.dtype} when the optimizer was made and is "
                f"{tuple(now.shape)} {now.dtype} now; make a new optimizer after changing parameters"
            )
        _check_alive(now, self.name)
        return memory_order(now)

    def device_gradient(self) -> Tensor | None:
        """The local gradient on the device in the weights' memory order; None if there is none.

        Raises:
            RuntimeError: the gradient is sparse, complex, on another device or without memory.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {self.name} is sparse, which OffloadedAdamW does not support: "
                "make the embedding with sparse=False, or give it torch.optim.SparseAdam"
            )
        own = local(gradient)
        weights = local(self.parameter)
        if own.dtype not in WEIGHT_DTYPES or own.device != weights.device or own.shape != weights.shape:
            raise RuntimeError(
                f"the gradient of {self.name} is {tuple(own.shape)} {own.dtype} on {own.device}; expected "
                f"{tuple(weights.shape)} on {weights.device}, of a type among {WEIGHT_DTYPES}"
            )
        _check_alive(own, f"the gradient of {self.name}")
        return ordered_as(own, weights)

    def unseen(self) -> bool:
        """Whether the master may differ from the weights, because something else has written to them."""
        return not self.known or self._seen != _signature(self.parameter)

    def saw(self) -> None:
        """Note that the weights, as they are now, match the master."""
        self.known = True
        self._seen = _signature(self.parameter)

    def publish(self) -> dict[str, Tensor]:
        """The views for the optimizer's `state`, in the layout of `torch.optim.AdamW`.

        Called before anything is written to them. They include `master`, unless the weights on the device are
        float32, which is the same.
        """
        self._written = True
        if self._entry is None:
            self._views = {"step": self.step} | {key: self._view(flat) for key, flat in self._kept().items()}
            self._entry = dict(self._views)
        return self._entry

    def published(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether `entry` is the unchanged result of `publish`, or None before that was called."""
        if entry is not self._entry:
            return False
        return entry is None or all(entry.get(key) is view for key, view in self._views.items())

    def forget(self) -> None:
        """Start over: no moments, no updates taken, the master from the weights."""
        if self._written:  # else they are zeros already, on pages that may not be committed yet
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
        self._written = False
        self.step.zero_()
        self.known = False
        self._entry = None

    def check(self, entry: Mapping[str, Any], *, partitioned: bool) -> None:
        """Raise ValueError if `entry` is not a state of this parameter. Changes nothing."""
        if "max_exp_avg_sq" in entry:
            raise ValueError(f"the state of {self.name} comes from amsgrad, which OffloadedAdamW lacks")
        missing = [key for key in ("step", *MOMENTS) if key not in entry]
        if missing:
            raise ValueError(f"the state of {self.name} lacks {', '.join(missing)}")
        shape = torch.Size([self.share.length]) if partitioned else self.shape
        for key in (*MOMENTS, MASTER):
            if key in entry and local(entry[key]).shape != shape:
                given = tuple(local(entry[key]).shape)
                raise ValueError(f"{key} of {self.name} has shape {given}, expected {tuple(shape)}")

    def load(self, entry: Mapping[str, Any], *, partitioned: bool) -> None:
        """Copy a checked entry into the memory that is already there, tensor by tensor.

        Args:
            entry: `step`, `exp_avg`, `exp_avg_sq`, maybe `master`, on any device and of any float type.
            partitioned: whether the tensors are this rank's share rather than the whole (local) parameter.
        """
        self._written = True
        self.step.fill_(float(entry["step"]))
        for key, flat in (self._kept() | {MASTER: self.master}).items():
            if key in entry:
                value = local(entry[key])
                if not partitioned:
                    pattern = torch.empty_strided(self.shape, self.strides, device="meta")
                    first, last = self.share.span(0, self.share.chunk)
                    value = ordered_as(value, pattern)[first:last]
                flat.copy_(value)
        self.known = MASTER in entry
        self._seen = None
        self._entry = None

    def _kept(self) -> dict[str, Tensor]:
        kept = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return kept if self.dtype == torch.float32 else kept | {MASTER: self.master}

    def _view(self, flat: Tensor) -> Tensor:
        if self.share.ranks > 1:
            return flat
        return like_parameter(flat.as_strided(self.shape, self.strides), self.parameter)


def settle_in(residents: Sequence[ResidentParameter], state_dtype: torch.dtype, *, gradients: bool) -> int:
    """Give each resident its memory, from one mapping per kind; return the bytes mapped.

    Pages are committed when first written, so moments of parameters that never have a gradient cost nothing.

    Raises:
        MemoryError: the system refuses the memory; no resident is changed then.
    """
    counts = [aligned(resident.share.length) for resident in residents]
    dtypes = [torch.float32, state_dtype, state_dtype] + ([torch.float32] if gradients else [])
    maps = [host_memory(sum(counts) * dtype.itemsize).view(dtype) for dtype in dtypes]
    at = 0
    for resident, count in zip(residents, counts, strict=True):
        runs = [mapping[at : at + resident.share.length] for mapping in maps]
        resident.place(runs[0], runs[1], runs[2], runs[3] if gradients else None)
        at += count
    return sum(mapping.nbytes for mapping in maps)


def _signature(parameter: Tensor) -> tuple[int, int]:
    """A value that changes when the weights are replaced or written to, except through `.data`."""
    weights = local(parameter)
    return weights.data_ptr(), weights._version


def _check(weights: Tensor, name: str) -> None:
    if weights.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} is on {weights.device}; OffloadedAdamW works for CUDA (and CPU) parameters")
    if weights.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"{name} is {weights.dtype}; OffloadedAdamW works for {WEIGHT_DTYPES}")
    if not is_dense(weights):
        raise ValueError(f"{name} has strides {weights.stride()} for shape {tuple(weights.shape)}: not dense")


def _check_alive(tensor: Tensor, name: str) -> None:
    if tensor.numel() == 0:
        return
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed:
        raise RuntimeError(f"the memory of {name} has been freed; nothing was changed")
