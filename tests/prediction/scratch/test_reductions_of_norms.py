"""Partial sums of layer norm's gradients."""

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.reductions import RULES

aten = torch.ops.aten


def buffers(rows, width):
    source = torch.empty(rows, width, device="meta")
    weight = torch.empty(width, device="meta")
    rule = RULES[aten.native_layer_norm_backward.default]
    return rule((source, source, [width]), {}, [torch.empty_like(source), weight, weight], machine("h200"))


def test_as_recorded_for_the_first_stage_of_convnext():
    # H200, torch 2.11: 64 images of 56 by 56 pixels, 96 channels.
    sizes = buffers(64 * 56 * 56, 96)
    assert sizes[:2] == [6272 * 96 * 4] * 2
    assert sizes[2] == 1176 << 10


@pytest.mark.parametrize(("rows", "width"), [(64 * 1024, 96), (1 << 20, 4096)])
def test_few_or_long_rows_have_none(rows, width):
    assert buffers(rows, width) == []
