"""Results that CUDA lays out in its own way."""

import pytest
import torch
from torch import nn

from support.traced import traced


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

    assert traced(look).answer == (expected, dtype)


@pytest.mark.parametrize("operator", ["mm", "addmm", "bmm", "baddbmm"])
@pytest.mark.parametrize("given", [False, True])
def test_a_product_of_a_wider_type_allocates_its_result_alone(operator, given):
    batch = (3,) if "bmm" in operator else ()
    if "dtype" not in getattr(torch.ops.aten, operator).overloads():
        pytest.skip("this torch has no such product")

    def look(device):
        left = torch.ones(*batch, 5, 7, device=device, dtype=torch.bfloat16)
        right = torch.ones(*batch, 7, 9, device=device, dtype=torch.bfloat16)
        summed = torch.ones(*batch, 5, 9, device=device)
        operands = [summed, left, right] if "add" in operator else [left, right]
        multiply = getattr(torch, operator)
        multiply(*operands, out_dtype=torch.float32)  # makes the workspace of cuBLAS
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        options = {"out": summed} if given else {}
        made = multiply(*operands, out_dtype=torch.float32, **options)
        return tuple(made.shape), made.dtype, made is summed, torch.cuda.max_memory_allocated() - before

    rows = 3 * 5 * 9 if batch else 5 * 9
    size = -(-4 * rows // 512) * 512
    assert traced(look).answer == ((*batch, 5, 9), torch.float32, given, 0 if given else size)


def convolved(device, *, groups=1, last=False):
    pictures = torch.randn(2, 8, 6, 6, device=device)
    if last:
        pictures = pictures.to(memory_format=torch.channels_last)
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=groups).to(device)
    return layer(pictures).is_contiguous(memory_format=torch.channels_last)


def test_convolutions_follow_their_input():
    assert traced(lambda device: convolved(device)).answer is False
    assert traced(lambda device: convolved(device, last=True)).answer is True
    assert traced(lambda device: convolved(device, last=True, groups=8)).answer is True


def test_the_gradient_of_a_layer_norm_is_contiguous():
    def look(device):
        given = torch.randn(2, 8, 4, 4, device=device).permute(0, 2, 3, 1).detach().requires_grad_()
        seen = []
        given.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        nn.functional.layer_norm(given, (8,)).sum().backward()
        return seen

    assert traced(look).answer == [True]
