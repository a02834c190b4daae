"""The norm of gradients on one rank: the bits of torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtriage.treat.offload.norms import clip_factor, total_norm


def parts(*gradients: Tensor) -> list[Any]:
    return [(SimpleNamespace(parameter=nn.Parameter(torch.ones(1))), gradient) for gradient in gradients]


def test_the_norm_is_that_of_torch_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in (3, 100, 7)]
    assert torch.equal(total_norm(parts(*gradients), None), nn.utils.get_total_norm(gradients))
    assert float(total_norm(parts(torch.tensor([3.0]), torch.tensor([4.0])), None)) == 5.0


def test_gradients_of_half_precision_are_summed_in_single() -> None:
    norm = total_norm(parts(torch.full((4,), 200.0, dtype=torch.float16)), None)
    assert (norm.dtype, float(norm)) == (torch.float32, 400.0)


def test_without_gradients_the_norm_is_zero() -> None:
    assert total_norm([], None).tolist() == 0.0


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(0.5, 2.0, 1.0), (2.0, 2.0, 1.0), (4.0, 2.0, 0.5), (0.0, 1.0, 1.0)]
)
def test_gradients_are_scaled_down_to_the_limit(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-6)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([norm])
    nn.utils.clip_grad_norm_([weight], limit)
    assert float(weight.grad) == pytest.approx(norm * clip_factor(norm, limit), rel=1e-6)
