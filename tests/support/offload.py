"""Parameters, gradients and the fp32 reference for tests of `OffloadedAdamW`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from memtriage import OffloadedAdamW

SHAPES = ((300, 70), (5,), (64,), (1,), (), (1000,), (3, 4, 5), (129,))
"""More than one tile, tails that fill no vector, single elements."""


def make(weights: Any, **settings: Any) -> OffloadedAdamW:
    """The optimizer with small tiles, so that few elements need several."""
    return OffloadedAdamW(weights, **{"tile_elements": 128, "ring_depth": 2} | settings)


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> list[Parameter]:
    """Random parameters; the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def masters_of(weights: Sequence[Parameter]) -> list[Parameter]:
    """Float32 CPU copies: what the reference optimizer steps."""
    return [Parameter(weight.detach().float().cpu().clone()) for weight in weights]


def give_gradients(
    weights: Sequence[Parameter], masters: Sequence[Parameter], seed: int, scale: float = 1.0
) -> None:
    """The same random gradients for both, in the weights' type and on their device, exactly widened."""
    generator = torch.Generator().manual_seed(seed)
    for weight, master in zip(weights, masters, strict=True):
        gradient = (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)
        weight.grad = gradient.to(weight.device, copy=True)
        master.grad = gradient.float()


def reference(masters: Sequence[Any], **settings: Any) -> torch.optim.AdamW:
    """torch's fused AdamW in float32 on the CPU."""
    return torch.optim.AdamW(masters, fused=True, **settings)


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, in which -0.0 is not 0.0 and NaN equals itself."""
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(width)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and bool(torch.equal(bits(left), bits(right)))


def assert_same_as_reference(
    optimizer: torch.optim.Optimizer,
    weights: Sequence[Parameter],
    expected: torch.optim.Optimizer,
    masters: Sequence[Parameter],
) -> None:
    """Weights, masters and moments are those of the reference, bit for bit."""
    for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        assert same_bits(weight.detach(), master.detach().to(weight.dtype)), f"weight {index}"
        ours, theirs = optimizer.state.get(weight, {}), expected.state.get(master, {})
        assert bool(ours) == bool(theirs), f"state of {index}"
        for key in theirs:
            assert same_bits(ours[key], theirs[key]), f"{key} of {index}"
        if ours and weight.dtype != torch.float32:
            assert same_bits(ours["master"], master.detach()), f"master of {index}"


class Pair:
    """The offloaded optimizer, and the reference over masters of its weights, which get the same gradients.

    Args:
        weights: what is trained.
        groups: makes of weights, or of masters, what an optimizer is given.
        both: settings of both optimizers.
        settings: those of the offloaded one.
    """

    def __init__(
        self,
        weights: list[Parameter] | None = None,
        groups: Callable[[list[Parameter]], Any] = list,
        both: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.weights = parameters() if weights is None else weights
        self.masters = masters_of(self.weights)
        self.optimizer = make(groups(self.weights), **(both or {}), **settings)
        self.expected = reference(groups(self.masters), **(both or {}))

    def give(self, seed: int, scale: float = 1.0) -> None:
        give_gradients(self.weights, self.masters, seed, scale)

    def step(self) -> None:
        self.optimizer.step()
        self.expected.step()

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            self.give(seed)
            self.step()

    def assert_same(self) -> None:
        assert_same_as_reference(self.optimizer, self.weights, self.expected, self.masters)


@contextmanager
def group_of_one() -> Iterator[torch.distributed.ProcessGroup]:
    """A process group that has this process only."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()
