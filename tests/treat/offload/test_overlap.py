"""Steps that are taken while backward is still at work."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter

from support.offload import (
    Pair,
    make,
    parameters,
    same_bits,
)


def test_steps_behind_the_backward_pass() -> None:
    pair = Pair(overlap_backward=True)
    weights = pair.weights
    for step in range(3):
        before = [weight.detach().clone() for weight in weights]
        factors = parameters(seed=step + 50)
        sum((w * f).sum() for w, f in zip(weights, factors, strict=True)).backward()
        assert all(weight.grad is None for weight in weights)
        assert all(same_bits(weight.detach(), old) for weight, old in zip(weights, before, strict=True))
        for master, factor in zip(pair.masters, factors, strict=True):
            master.grad = factor.detach().float()
        pair.step()
    pair.assert_same()


def test_micro_batches_with_steps_behind_the_backward_pass() -> None:
    pair = Pair(parameters(dtype=torch.float32), overlap_backward=True)
    for step in range(2):
        for of in (pair.weights, pair.masters):
            for micro_batch in range(2):
                factors = parameters(dtype=torch.float32, seed=10 * step + micro_batch)
                loss = sum((w * f.detach()).sum() for w, f in zip(of, factors, strict=True))
                ours = micro_batch == 0 and of is pair.weights
                with pair.optimizer.accumulate() if ours else nullcontext():
                    loss.backward()
        pair.step()
        pair.expected.zero_grad()
    pair.assert_same()


def test_a_second_backward_behind_a_step_half_taken_is_refused() -> None:
    weight = Parameter(torch.ones(100))
    optimizer = make([weight], overlap_backward=True)
    (weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match=r"second gradient before step\(\).*accumulate"):
        (weight * 2).sum().backward()
    weight.grad = None
    with pytest.raises(RuntimeError, match=r"call step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1
