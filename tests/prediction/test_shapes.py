"""Results that CUDA lays out in its own way."""

import pytest
import torch
from torch import nn

import memtriage


def in_a_step(look):
    """What `look(device)` returns inside a traced step."""
    found = []

    def build(device):
        model = nn.Linear(4, 4).to(device)
        return model, torch.optim.SGD(model.parameters()), lambda: found.append(look(device))

    memtriage.predict(build, steps=1)
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((32, 16), (4, 16, 8), (32, 8)),
        ((16, 32), (32, 8), (4, 16, 8)),
        ((4, 16, 8), (8, 32), (16, 32)),
        ((4, 16, 8), (4, 8, 32), (4, 16, 32)),
    ],
)
def test_grouped_products(left, right, expected, dtype):
    def look(device):
        ends = None
        if (len(left), len(right)) != (3, 3):
            ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32, device=device)
        made = torch._grouped_mm(
            torch.randn(left, device=device, dtype=dtype),
            torch.randn(right, device=device, dtype=dtype),
            offs=ends,
        )
        return tuple(made.shape), made.dtype

    assert in_a_step(look) == (expected, dtype)


def convolved(device, *, groups=1, last=False):
    pictures = torch.randn(2, 8, 6, 6, device=device)
    if last:
        pictures = pictures.to(memory_format=torch.channels_last)
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=groups).to(device)
    return layer(pictures).is_contiguous(memory_format=torch.channels_last)


def test_convolutions_follow_their_input():
    assert in_a_step(lambda device: convolved(device)) is False
    assert in_a_step(lambda device: convolved(device, last=True)) is True
    assert in_a_step(lambda device: convolved(device, last=True, groups=8)) is True


def test_the_gradient_of_a_layer_norm_is_contiguous():
    def look(device):
        given = torch.randn(2, 8, 4, 4, device=device).permute(0, 2, 3, 1).detach().requires_grad_()
        seen = []
        given.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        nn.functional.layer_norm(given, (8,)).sum().backward()
        return seen

    assert in_a_step(look) == [True]
