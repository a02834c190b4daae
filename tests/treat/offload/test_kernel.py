"""Cutting a tile's parts into what vector code takes and what is left behind it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.kernel import Operands, Scaling


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


def test_a_gradient_is_divided_and_clipped_in_this_order() -> None:
    gradient = torch.tensor([12.0])
    Scaling().apply(gradient)
    assert gradient.item() == 12
    Scaling(ranks=2, grad_scale=3.0, clip=0.5).apply(gradient)
    assert gradient.item() == 1
