"""One tile's AdamW step on the host with torch's own kernels: bit-identical to `fused=True`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memtriage.treat.offload.pinned import host_memory


@dataclass(frozen=True, slots=True)
class Hyper:
    """The settings of one parameter group, as plain numbers; names as in `torch.optim.AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The settings of a parameter group as numbers. Waits for the device if one is a tensor on it."""
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a gradient is scaled before it is used, in this order; None if there is nothing to do.

    Attributes:
        ranks: number of ranks that were summed: divide.
        grad_scale: factor of loss scaling: divide.
        clip: factor of global-norm clipping: multiply.
    """

    ranks: int = 1
    grad_scale: float | None = None
    clip: float | None = None

    def apply(self, gradient: Tensor) -> None:
        """Scale a float32 gradient in place."""
        if self.ranks > 1:
            gradient.div_(self.ranks)
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if self.clip is not None:
            gradient.mul_(self.clip)


@dataclass(frozen=True, slots=True)
class Operands:
    """The pieces of one tile, in the same order in every list; each piece is a part of one parameter.

    Attributes:
        masters: float32, stepped in place.
        gradients: as they traveled, or float32 kept on the host; overwritten.
        exp_avgs, exp_avg_sqs: float32 or bfloat16, stepped in place.
        steps: the number of the current update, a float32 scalar for each piece.
        rounded: where the rounded masters go; empty if they are not wanted yet.
    """

    masters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]
    rounded: Sequence[Tensor] = ()

    def cut(self, block: int) -> tuple[Operands, Operands]:
        """Split into whole blocks of `block` elements and the rest after them, without empty pieces."""
        lengths = [master.numel() for master in self.masters]
        ends = [length // block * block for length in lengths]
        if ends == lengths:  # nearly always; new views of every piece would take as long as launching a copy
            return self, self._chosen([], slice)
        blocks = [index for index, end in enumerate(ends) if end]
        rests = [index for index, end in enumerate(ends) if end < lengths[index]]
        return (
            self._chosen(blocks, lambda index: slice(0, ends[index])),
            self._chosen(rests, lambda index: slice(ends[index], None)),
        )

    def _chosen(self, indices: Sequence[int], span: Callable[[int], slice]) -> Operands:
        def chosen(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[index][span(index)] for index in indices] if tensors else []

        return Operands(
            masters=chosen(self.masters),
            gradients=chosen(self.gradients),
            exp_avgs=chosen(self.exp_avgs),
            exp_avg_sqs=chosen(self.exp_avg_sqs),
            steps=[self.steps[index] for index in indices],
            rounded=chosen(self.rounded),
        )


class FloatRoom:
    """Float32 room for values that arrive or are kept in another type: gradients and moments of a tile."""

    def __init__(self, elements: int, *, moments: bool) -> None:
        """Raises MemoryError when the system refuses the memory."""
        nbytes = elements * torch.float32.itemsize
        self.gradient = host_memory(nbytes).view(torch.float32)
        self.moments = [host_memory(nbytes).view(torch.float32) for _ in range(2)] if moments else []

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(moment.nbytes for moment in (self.gradient, *self.moments))


def adamw(operands: Operands, hyper: Hyper, scaling: Scaling, scratch: FloatRoom) -> None:
    """Step masters and moments in place, and round the masters.

    Args:
        operands: the tile, with at least one piece.
        scratch: for a tile of this length.
    """
    gradients = operands.gradients
    if gradients[0].dtype != torch.float32:
        gradients = _widened(gradients, scratch.gradient)
    if scaling != Scaling():
        for gradient in gradients:
            scaling.apply(gradient)
    averages, squares = operands.exp_avgs, operands.exp_avg_sqs
    if scratch.moments:
        averages = _widened(averages, scratch.moments[0])
        squares = _widened(squares, scratch.moments[1])
    torch._fused_adamw_(
        list(operands.masters),
        list(gradients),
        list(averages),
        list(squares),
        [],
        list(operands.steps),
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=hyper.maximize,
    )
    if scratch.moments:
        torch._foreach_copy_(list(operands.exp_avgs), list(averages))
        torch._foreach_copy_(list(operands.exp_avg_sqs), list(squares))
    if operands.rounded:
        torch._foreach_copy_(list(operands.rounded), list(operands.masters))


def _widened(narrow: Sequence[Tensor], scratch: Tensor) -> list[Tensor]:
    lengths = [tensor.numel() for tensor in narrow]
    wide = list(scratch[: sum(lengths)].split(lengths))
    torch._foreach_copy_(wide, list(narrow))
    return wide
