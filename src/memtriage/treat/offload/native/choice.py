"""Decide once whether this process uses the compiled kernel: build it, load it, and compare it with torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final, Literal

import torch
from torch import Tensor

from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.native.build import NotBuilt, built
from memtriage.treat.offload.native.library import Crew, CrewJob, Library

_log = logging.getLogger(__name__)

Kernel = Literal["auto", "compiled", "torch"]

LENGTHS: Final = (64, 2048)
"""Multiples of 64, as in tiles."""

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
    """Where the jobs of `prepare` differ from torch in any bit, in words; None if nowhere.

    It tries all types of gradients, moments and weights; settings on either side of each branch; magnitudes
    down to denormal numbers, and zeros; the first step and a later one.
    """
    scratch = {dtype: FloatRoom(sum(LENGTHS), moments=dtype != torch.float32) for dtype in DTYPES}
    for number, (gradient, moment, hyper, scaling) in enumerate(product(DTYPES, DTYPES, _HYPERS, _SCALINGS)):
        for rounded in (*DTYPES, None):
            ours, theirs = (list(_tiles(number, gradient, moment, rounded)) for _ in range(2))
            for own, other in zip(ours, theirs, strict=True):
                job = prepare(own, hyper, scaling)
                job.start()
                job.wait()
                adamw(other, hyper, scaling, scratch[moment])
                if not _same(own, other):
                    return (
                        f"{hyper}, {scaling}, gradients {gradient}, moments {moment}, weights {rounded}, "
                        f"step {int(own.steps[0])}"
                    )
    return None


def _tiles(
    seed: int, gradient: torch.dtype, moment: torch.dtype, rounded: torch.dtype | None
) -> Iterator[Operands]:
    """Random tiles, one for each step; masters and moments are the same memory in all of them."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float) -> list[Tensor]:
        tensors = []
        for length in LENGTHS:
            values, powers = (torch.rand(length, generator=generator) for _ in range(2))
            tensors.append((values - 0.5) * 10 ** ((powers - 1) * _EXPONENTS * scale))
        return tensors

    masters = [values * 4 for values in random(0.2)]
    averages = [values.to(moment) for values in random(1)]
    squares = [values.square().to(moment) for values in random(1)]
    weights = [] if rounded is None else [torch.empty_like(master, dtype=rounded) for master in masters]
    for number in range(1, _STEPS + 1):
        gradients = [values.to(gradient) for values in random(1)]
        gradients[0][:8] = 0
        yield Operands(
            masters, gradients, averages, squares, [torch.tensor(float(number))] * len(LENGTHS), weights
        )


def _same(left: Operands, right: Operands) -> bool:
    return all(
        torch.equal(own.view(torch.int8), other.view(torch.int8))
        for ours, theirs in (
            (left.masters, right.masters),
            (left.exp_avgs, right.exp_avgs),
            (left.exp_avg_sqs, right.exp_avg_sqs),
            (left.rounded, right.rounded),
        )
        for own, other in zip(ours, theirs, strict=True)
    )


class NotProven(RuntimeError):
    """The compiled kernel's results differ from torch's here; the message says where."""


def proven() -> Library:
    """The compiled kernel.

    Raises:
        NotBuilt, NotProven: why there is none.
    """
    try:
        library = Library(built())
    except OSError as error:
        raise NotBuilt(f"the compiled kernel cannot be loaded: {error}") from error
    threads = torch.get_num_threads()
    # With all threads on such small tensors, most of the time would be spent waiting for other processes.
    torch.set_num_threads(1)
    crew = Crew(library, 1)
    try:
        where = difference(crew.job)
    finally:
        crew.close()
        torch.set_num_threads(threads)
    if where is not None:
        raise NotProven(f"the compiled kernel's bits are not those of this torch: {where}")
    return library


def library_for(kernel: Kernel) -> Library | None:
    """The compiled kernel, if `OffloadedAdamW(kernel=...)` uses it.

    Raises:
        NotBuilt, NotProven: it must be used, and there is none.
    """
    if kernel == "torch":
        return None
    return proven() if kernel == "compiled" else available()


@functools.cache
def available() -> Library | None:
    """The compiled kernel; None if torch's kernels must be used, which is logged once with the reason."""
    try:
        return proven()
    except (NotBuilt, NotProven) as error:
        _log.warning("OffloadedAdamW uses torch's own kernels, which are slower: %s", error)
        return None
