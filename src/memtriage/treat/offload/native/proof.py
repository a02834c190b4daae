"""What a compiled kernel has to pass before it is used: torch's bits, in every kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

import torch
from torch import Tensor

from memtriage.treat.offload.kernel import Hyper, Operands, Scaling, Scratch, adamw
from memtriage.treat.offload.native.library import CrewJob

LENGTHS: Final = (64, 2048)
"""Multiples of 64, as in use."""

DTYPES: Final = (torch.float32, torch.bfloat16)

_HYPERS: Final = (
    Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False),
    Hyper(lr=0.3, beta1=0.0, beta2=0.0, eps=1e-12, weight_decay=0.0, maximize=False),
    # Below one half, torch interpolates from the other end.
    Hyper(lr=1e-2, beta1=0.4, beta2=0.7, eps=1e-3, weight_decay=0.5, maximize=True),
    Hyper(lr=2e-5, beta1=0.5, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=True),
)
_SCALINGS: Final = (Scaling(), Scaling(ranks=3, grad_scale=1024.7, clip=0.3))
_STEPS: Final = 2
_EXPONENTS: Final = 24  # gradients and moments spread over so many powers of ten


def difference(prepare: Callable[[Operands, Hyper, Scaling], CrewJob]) -> str | None:
    """Where the jobs that `prepare` makes give other bits than torch, in words; None if nowhere.

    Tried: all types of gradients, moments and weights; settings on either side of each branch; magnitudes
    down to denormal ones, zeros; the first step and a later one.
    """
    scratch = {dtype: Scratch(sum(LENGTHS), moments=dtype != torch.float32) for dtype in DTYPES}
    for number, (gradient, moment, hyper, scaling) in enumerate(product(DTYPES, DTYPES, _HYPERS, _SCALINGS)):
        for rounded in (*DTYPES, None):
            ours, theirs = (list(_tiles(number, gradient, moment, rounded)) for _ in range(2))
            for one, other in zip(ours, theirs, strict=True):
                job = prepare(one, hyper, scaling)
                job.start()
                job.wait()
                adamw(other, hyper, scaling, scratch[moment])
                if not _same(one, other):
                    return (
                        f"{hyper}, {scaling}, gradients {gradient}, moments {moment}, weights {rounded}, "
                        f"step {int(one.steps[0])}"
                    )
    return None


def _tiles(
    seed: int, gradient: torch.dtype, moment: torch.dtype, rounded: torch.dtype | None
) -> Iterator[Operands]:
    """Random tiles, one for each step; masters and moments are the same memory in all of them."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float) -> list[Tensor]:
        found = []
        for length in LENGTHS:
            values, powers = (torch.rand(length, generator=generator) for _ in range(2))
            found.append((values - 0.5) * 10 ** ((powers - 1) * _EXPONENTS * scale))
        return found

    masters = [one * 4 for one in random(0.2)]
    averages = [one.to(moment) for one in random(1)]
    squares = [one.square().to(moment) for one in random(1)]
    weights = [] if rounded is None else [torch.empty_like(one, dtype=rounded) for one in masters]
    for number in range(1, _STEPS + 1):
        gradients = [one.to(gradient) for one in random(1)]
        gradients[0][:8] = 0
        yield Operands(
            masters, gradients, averages, squares, [torch.tensor(float(number))] * len(LENGTHS), weights
        )


def _same(left: Operands, right: Operands) -> bool:
    return all(
        torch.equal(one.view(torch.int8), other.view(torch.int8))
        for ours, theirs in (
            (left.masters, right.masters),
            (left.exp_avgs, right.exp_avgs),
            (left.exp_avg_sqs, right.exp_avg_sqs),
            (left.rounded, right.rounded),
        )
        for one, other in zip(ours, theirs, strict=True)
    )
