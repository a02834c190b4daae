"""One tile's AdamW step on the host, by torch's own vectorised kernel: its bits are those of `fused=True`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hyper:
    """The settings of one parameter group, as plain numbers; names as in `torch.optim.AdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a gradient goes through before it is used, in this order; None where there is nothing to do.

    Attributes:
        ranks: it is a sum over so many ranks: divide.
        grad_scale: it was multiplied by so much (loss scaling): divide.
        clip: factor of global-norm clipping.
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
        masters, gradients: float32.
        exp_avgs, exp_avg_sqs: float32 or bfloat16.
        steps: the number of the update being taken, a float32 scalar for each piece.
    """

    masters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


def adamw(operands: Operands, hyper: Hyper, scratch: Sequence[Tensor]) -> None:
    """Step masters and moments in place.

    Args:
        operands: the tile.
        hyper: the settings of the group that all pieces belong to.
        scratch: two float32 tensors of a tile's length; used where the moments are not float32.
    """
    averages, squares = operands.exp_avgs, operands.exp_avg_sqs
    if scratch:
        averages = _widened(averages, scratch[0])
        squares = _widened(squares, scratch[1])
    torch._fused_adamw_(
        list(operands.masters),
        list(operands.gradients),
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
    if scratch:
        torch._foreach_copy_(list(operands.exp_avgs), list(averages))
        torch._foreach_copy_(list(operands.exp_avg_sqs), list(squares))


def _widened(narrow: Sequence[Tensor], scratch: Tensor) -> list[Tensor]:
    wide = list(scratch[: sum(one.numel() for one in narrow)].split([one.numel() for one in narrow]))
    torch._foreach_copy_(wide, list(narrow))
    return wide
