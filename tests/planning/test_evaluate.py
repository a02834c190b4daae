"""What a traced step counts as work."""

import torch

from memtriage.planning.evaluate import Work


def test_products_forward_and_backward_are_counted():
    weight = torch.randn(16, 32, requires_grad=True)
    inputs = torch.randn(8, 16, requires_grad=True)
    work = Work()
    with work:
        (inputs @ weight).relu().sum().backward()
    assert work.flops == 3 * 2 * 8 * 16 * 32
    assert not work.uncounted
