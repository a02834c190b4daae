"""What softmax's backward holds besides its result: gradient times output."""

from __future__ import annotations

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.attention import RULES


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_softmax_product_has_the_type_of_the_gradient(source: torch.dtype) -> None:
    rule = RULES[torch.ops.aten._softmax_backward_data.default]
    gradient, result = torch.ones(2, 3, 8, 8), torch.empty(2, 3, 8, 8, dtype=source)
    assert rule((gradient, gradient, -1, source), {}, [result], machine("h200")) == [2 * 3 * 8 * 8 * 4]
