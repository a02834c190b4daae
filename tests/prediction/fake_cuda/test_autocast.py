"""What autocast casts, and how long cast weights are kept."""

import pytest
import torch
from torch import nn

from memtriage.prediction.fake_cuda.autocast_lists import LOWER, SINGLE, SINGLE_BY_DTYPE, SINGLE_NORM, WIDEST
from support.traced import traced

BF16, FP32 = torch.bfloat16, torch.float32


OPERATIONS = {
    "matmul": (lambda x: x @ x, BF16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), BF16),
    "convolution": (lambda x: nn.functional.conv1d(x[None], x[:, :1, None].expand(8, 8, 1)), BF16),
    "softmax": (lambda x: x.bfloat16().softmax(-1), FP32),
    "layer norm": (lambda x: nn.functional.layer_norm(x.bfloat16(), (8,)), FP32),
    "sum": (lambda x: x.bfloat16().sum(), FP32),
    "sum of a given type": (lambda x: x.bfloat16().sum(dtype=BF16), BF16),
    "sum over a dimension of a given type": (lambda x: x.bfloat16().sum(0, dtype=BF16), BF16),
    "sum of whole numbers": (lambda x: x.int().sum(), torch.int64),
    "cumulative sum": (lambda x: x.bfloat16().cumsum(0), FP32),
    "norm": (lambda x: x.bfloat16().norm(), FP32),
    "exp": (lambda x: x.bfloat16().exp(), FP32),
    "mean": (lambda x: x.bfloat16().mean(), BF16),
    "add": (lambda x: x + x.bfloat16(), FP32),
    "relu": (lambda x: x.bfloat16().relu(), BF16),
    "addcmul": (lambda x: torch.addcmul(x.bfloat16(), x, x.bfloat16()), FP32),
    "attention": (lambda x: nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3), BF16),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_types_are_those_of_cuda(name):
    operation, expected = OPERATIONS[name]

    def look(device):
        with torch.autocast("cuda", BF16):
            return operation(torch.randn(8, 8, device=device)).dtype

    assert traced(look, version=(2, 11)).answer is expected


BANNED = "binary_cross_entropy"
"""Raises under autocast, before it reaches anything."""


def test_every_operator_that_torch_casts_is_listed():
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    there = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and registered(name, "AutocastCUDA")
    }
    lists = (LOWER, SINGLE, SINGLE_BY_DTYPE, SINGLE_NORM, WIDEST)
    listed = {name for names in lists for name in names}
    # Builds with CUDA have cuDNN's recurrent layers besides, which predictions do not run.
    besides = {"_cudnn_rnn"} if torch.backends.cuda.is_built() else set()
    assert there - {BANNED, "rms_norm"} == listed | besides


def test_rms_norm_is_cast_since_2_12():
    def look(device):
        with torch.autocast("cuda", BF16):
            return nn.functional.rms_norm(torch.randn(8, 8, device=device).bfloat16(), (8,)).dtype

    assert traced(look, version=(2, 11)).answer is BF16
    assert traced(look, version=(2, 12)).answer is FP32


def test_cast_weights_are_kept_for_the_region_and_no_longer():
    def look(device):
        model = nn.Linear(8, 8).to(device)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", BF16), torch.no_grad():
            model(torch.randn(8, 8, device=device))
            first = torch.cuda.memory_allocated()
            model(torch.randn(8, 8, device=device))
            second = torch.cuda.memory_allocated()
        return first - before, second - first, torch.cuda.memory_allocated() - before

    kept, more, after = traced(look, version=(2, 11)).answer
    weights = 2 * 512  # of 128 and 16 bytes, in blocks
    workspaces = (32 << 20) + (1 << 20)
    assert kept == workspaces + weights
    assert more == 0
    assert after == workspaces


def test_a_layer_computes_with_cast_weights_the_second_time_too():
    def look(device):
        model = nn.Linear(8, 8).to(device)
        with torch.autocast("cuda", BF16):
            given = torch.randn(8, 8, device=device, requires_grad=True)
            results = [model(given) for _ in range(2)]
        return [(each.dtype, each.grad_fn._saved_mat2.dtype) for each in results]

    assert traced(look, version=(2, 11)).answer == [(BF16, BF16)] * 2


def test_nothing_is_cast_outside_and_where_it_is_off():
    def look(device):
        model = nn.Linear(8, 8).to(device)
        given = torch.randn(8, 8, device=device)
        with torch.autocast("cuda", BF16), torch.autocast("cuda", enabled=False):
            inside = model(given).dtype
        return inside, model(given).dtype

    assert traced(look, version=(2, 11)).answer == (FP32, FP32)
