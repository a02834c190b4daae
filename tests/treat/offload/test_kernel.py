"""Cutting a tile's parts into what vector code takes and what is left behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw


@given(st.lists(st.integers(1, 300), max_size=6), st.booleans())
def test_blocks_and_rests_are_the_parts(lengths: list[int], rounded: bool) -> None:
    numbers = torch.arange(float(sum(lengths)))
    parts = list(numbers.split(lengths)) if lengths else []
    steps = [torch.tensor(float(index)) for index in range(len(parts))]
    whole = Operands(parts, parts, parts, parts, steps, parts if rounded else [])
    blocks, rests = whole.cut(64)
    assert all(master.numel() % 64 == 0 and master.numel() for master in blocks.masters)
    assert all(0 < master.numel() < 64 for master in rests.masters)
    for both in (blocks, rests):
        assert len(both.masters) == len(both.gradients) == len(both.exp_avgs) == len(both.steps)
        assert len(both.rounded) == (len(both.masters) if rounded else 0)
    put_together = {int(step): [master] for step, master in zip(blocks.steps, blocks.masters, strict=True)}
    for step, master in zip(rests.steps, rests.masters, strict=True):
        put_together.setdefault(int(step), []).append(master)
    for index, part in enumerate(parts):
        assert torch.equal(torch.cat(put_together[index]), part)
        assert put_together[index][0].data_ptr() == part.data_ptr()


HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, maximize=False)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arrived", [torch.float32, torch.bfloat16])
def test_two_steps_are_those_of_torch(arrived: torch.dtype, state: torch.dtype, maximize: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (64, 5)
    reference = [torch.nn.Parameter(torch.randn(length, generator=generator)) for length in lengths]
    masters = [weight.detach().clone() for weight in reference]
    moments = [[torch.zeros(length, dtype=state) for length in lengths] for _ in range(2)]
    rounded = [torch.zeros(length, dtype=torch.bfloat16) for length in lengths]
    optimizer = torch.optim.AdamW(
        reference, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=maximize, fused=True
    )
    scratch = FloatRoom(69, moments=state is not torch.float32)
    assert scratch.nbytes == 69 * 4 * (1 if state is torch.float32 else 3)
    for step in (1, 2):
        gradients = [torch.randn(length, generator=generator).to(arrived) for length in lengths]
        for weight, gradient in zip(reference, gradients, strict=True):
            weight.grad = gradient.float() / 2
        optimizer.step()
        kept = optimizer.state
        for weight in reference:  # as moments that are kept in another type are rounded after each step
            for name in ("exp_avg", "exp_avg_sq"):
                kept[weight][name] = kept[weight][name].to(state).float()
        steps = [torch.tensor(float(step)) for _ in lengths]
        operands = Operands(masters, gradients, *moments, steps, rounded)
        adamw(operands, replace(HYPER, maximize=maximize), Scaling(ranks=2), scratch)
        assert all(torch.equal(master, weight) for master, weight in zip(masters, reference, strict=True))
        for number, name in enumerate(("exp_avg", "exp_avg_sq")):
            for moment, weight in zip(moments[number], reference, strict=True):
                assert torch.equal(moment.float(), kept[weight][name])
    assert all(torch.equal(low, master.bfloat16()) for low, master in zip(rounded, masters, strict=True))


def test_a_gradient_is_divided_and_clipped_in_this_order() -> None:
    gradient = torch.tensor([12.0])
    Scaling().apply(gradient)
    assert gradient.item() == 12
    Scaling(ranks=2, grad_scale=3.0, clip=0.5).apply(gradient)
    assert gradient.item() == 1
