"""Workspaces of convolutions against those that an H200 recorded (`tests/gpu/record_conv.py`)."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.cudnn import Convolution, Operation, workspace
from memtriage.prediction.trace import trace
from support.training import training

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "conv_h200.json").read_text())
ELEMENT = {"fp32": 4, "fp32-last": 4, "fp32-ieee": 4, "bf16": 2, "bf16-last": 2, "fp16": 2}
OPERATIONS = {"forward": Operation.FORWARD, "input": Operation.OF_INPUT, "weight": Operation.OF_WEIGHT}
MULTIPROCESSORS = 132
MIB = 1 << 20
SLACK = 17 * MIB
"""Of partial sums in forward, which are left out."""


def described(layer, mode):
    batch, channels, size, filters, kernel, stride, padding, dilation, groups, dims, transposed = layer
    if transposed:
        result = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        weight = (channels, filters // groups)
    else:
        result = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        weight = (filters, channels // groups)
    return Convolution(
        source=(batch, channels, *[size] * dims),
        weight=(*weight, *[kernel] * dims),
        result=(batch, filters, *[result] * dims),
        stride=stride,
        element=ELEMENT[mode],
        channels_last=mode.endswith("last") and dims == 2,
        tensor_cores=mode != "fp32-ieee",
        depthwise=1 < groups == channels,
    )


def judged():
    """(mode, operation, layer, recorded, predicted) of all that cuDNN ran."""
    for number, mode, operation, recorded in RECORDED["rows"]:
        layer = RECORDED["layers"][number]
        depthwise = 1 < layer[8] == layer[1]
        if depthwise and not mode.endswith("last"):
            continue  # PyTorch's own kernel
        made = workspace(described(layer, mode), OPERATIONS[operation], MULTIPROCESSORS)
        yield mode, operation, number, recorded, made


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "bf16-last"])
@pytest.mark.parametrize("half", [0, 1], ids=["found on", "judged on"])
def test_what_was_recorded(mode, half):
    rows = [
        row for row in judged() if row[0] == mode and (row[2] // 2 if mode == "fp16" else row[2]) % 2 == half
    ]
    close = [abs(made - recorded) <= max(SLACK, recorded // 50) for *_, recorded, made in rows]
    assert len(rows) > 50
    assert sum(close) / len(rows) >= 0.9
    assert sum(row[4] for row in rows) == pytest.approx(sum(row[3] for row in rows), rel=0.12)


def test_copies_of_all_three_are_exact():
    """A kernel of several pixels, channels first, forward: to the byte, but for some hundred."""
    exact = defaultdict(int)
    for mode, operation, number, recorded, made in judged():
        _, channels, _, _, kernel, _, _, _, groups, _, _ = RECORDED["layers"][number]
        if mode == "bf16" and operation == "forward" and kernel > 1 and channels > 8 and groups == 1:
            exact[abs(recorded - made) < 1024] += 1
    assert exact[True] >= 30 and exact[True] > 5 * exact[False]


def test_images_under_small_kernels_are_read_as_they_lie():
    compared = 0
    for mode, _, number, recorded, made in judged():
        _, channels, _, _, kernel, *_ = RECORDED["layers"][number]
        if mode == "fp32" and channels < 4 and kernel <= 4:
            assert made == recorded == 0
            compared += 1
    assert compared >= 15


OF_NINE, OF_ONE = (64, 64, 56, 64, 3, 1, 1, 1, 1, 2, False), (64, 64, 56, 256, 1, 1, 0, 1, 1, 2, False)
"""Layers whose kernels have so many pixels."""


@pytest.mark.parametrize(
    ("layer", "mode", "operation", "size"),
    [
        (OF_NINE, "fp32", "forward", 2 * 64 * 64 * 56 * 56 * 4 + 64 * 64 * 9 * 4),
        (OF_NINE, "bf16-last", "forward", 0),
        (OF_ONE, "fp32", "forward", 0),
        (OF_ONE, "fp32", "weight", 64 * 64 * 256 * 4),
        ((64, 512, 7, 2048, 1, 1, 0, 1, 1, 2, False), "bf16", "forward", 64 * 49 * 2560 * 2),
        (OF_NINE, "fp32-ieee", "weight", (64 * 14 * 14 * 128 + 64 * 64) * 36 * 4),
    ],
)
def test_by_arithmetic(layer, mode, operation, size):
    assert workspace(described(layer, mode), OPERATIONS[operation], MULTIPROCESSORS) == size


def test_a_weight_with_few_tiles_is_summed_by_all_multiprocessors():
    # 128 filters of 128 channels and 3 by 3: 9 tiles of 128 by 128, so 14 of each.
    layer = (64, 128, 28, 128, 3, 1, 1, 1, 1, 2, False)
    of_input = workspace(described(layer, "fp32"), Operation.OF_INPUT, MULTIPROCESSORS)
    of_weight = workspace(described(layer, "fp32"), Operation.OF_WEIGHT, MULTIPROCESSORS)
    assert of_weight - of_input == 14 * 9 * 128 * 128 * 4


def convolved(device):
    model = torch.nn.Conv2d(64, 64, 3, padding=1).to(device)
    return training(model, lambda: model(torch.randn(8, 64, 56, 56, device=device)).sum())


def copied_forward():
    """Whether a forward convolution has a workspace: on tensor cores alone."""
    blocks = trace(convolved, machine("h200"), (2, 11), 1).recording.blocks
    return any(block.op == "aten::convolution" and block.owner == "workspace" for block in blocks)


def test_tf32_is_read_from_either_setting():
    assert copied_forward()
    settings, name, off = torch.backends.cudnn, "allow_tf32", False
    if hasattr(settings, "conv"):
        settings, name, off = settings.conv, "fp32_precision", "ieee"
    before = getattr(settings, name)
    setattr(settings, name, off)
    try:
        assert not copied_forward()
    finally:
        setattr(settings, name, before)
