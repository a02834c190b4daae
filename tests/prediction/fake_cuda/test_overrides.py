"""Kernels are put into PyTorch's dispatcher, and restored."""

import warnings

import torch

from memtriage.prediction.fake_cuda.overrides import Overrides


def test_kernels_are_replaced_until_they_are_removed():
    rows, made = torch.ones(2), []

    def make(overload):
        made.append(overload)
        return lambda *args, **kwargs: torch.full((2,), 7.0)

    overrides = Overrides()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert overrides.put("erfinv", "CPU", make) is torch.ops.aten.erfinv.default
        assert overrides.put("xlogy.Tensor", "CPU", make) is torch.ops.aten.xlogy.Tensor
    assert made == [torch.ops.aten.erfinv.default, torch.ops.aten.xlogy.Tensor]
    assert overrides.put("no_such_operator", "CPU", make) is None
    assert overrides.put("xlogy.NoOverload", "CPU", make) is None
    try:
        assert torch.erfinv(rows).tolist() == torch.xlogy(rows, rows).tolist() == [7, 7]
    finally:
        overrides.remove()
    assert torch.erfinv(rows).tolist() == [float("inf")] * 2 and torch.xlogy(rows, rows).tolist() == [0, 0]
