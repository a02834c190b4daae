"""The attention kernel that a GPU would choose, rule by rule."""

from dataclasses import replace

import pytest
import torch

from memtriage.prediction.fake_cuda.attention import AttentionCall, Backend, Switches, choose, default_order
from memtriage.prediction.gpu_kinds import machine

NOW = (2, 11)
SHAPE = (2, 8, 128, 64)
CALL = AttentionCall(
    dtype=torch.bfloat16,
    query=SHAPE,
    key=SHAPE,
    value=SHAPE,
    strides_end_in_one=True,
    masked=False,
    mask_dim=0,
    mask_needs_grad=False,
    dropout=0.0,
    causal=True,
    gqa=False,
    needs_grad=True,
)
FEW = (2, 2, 128, 64)
LONG = (2, 8, 256, 64)


def wide(size):
    return {"query": (2, 8, 128, size), "key": (2, 8, 128, size), "value": (2, 8, 128, size)}


def lengths(query, key):
    return {"query": (2, 8, query, 64), "key": (2, 8, key, 64), "value": (2, 8, key, 64), "causal": False}


def heads(key, value):
    return {"key": (2, key, 128, 64), "value": (2, value, 128, 64), "gqa": True}


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        ("h200", {}, Backend.CUDNN),
        ("a100", {}, Backend.FLASH),
        ("v100", {"dtype": torch.float16}, Backend.EFFICIENT),
        ("v100", {}, Backend.MATH),
        ("h200", {"dtype": torch.float32}, Backend.EFFICIENT),
        ("h200", {"dtype": torch.float64}, Backend.MATH),
        ("a100", {"masked": True, "mask_dim": 4, "causal": False}, Backend.EFFICIENT),
        ("h200", {"masked": True, "mask_dim": 4, "causal": False}, Backend.CUDNN),
        (
            "h200",
            {"masked": True, "mask_dim": 4, "mask_needs_grad": True, "causal": False},
            Backend.EFFICIENT,
        ),
        ("a100", {"key": FEW, "value": FEW, "gqa": True}, Backend.FLASH),
        ("a100", {"key": FEW, "value": FEW, "gqa": False}, Backend.MATH),
        (
            "a100",
            {"key": FEW, "value": FEW, "gqa": True, "masked": True, "mask_dim": 4, "causal": False},
            Backend.MATH,
        ),
        ("a100", {"key": LONG, "value": LONG}, Backend.EFFICIENT),
        ("h200", wide(192), Backend.FLASH),
        ("h200", wide(512), Backend.EFFICIENT),
        ("h200", wide(60), Backend.FLASH),
        ("rtx4090", wide(256) | {"dropout": 0.1}, Backend.EFFICIENT),
        ("h200", {"query": (2, 128, 64), "key": (2, 128, 64), "value": (2, 128, 64)}, Backend.MATH),
        ("h200", {"strides_end_in_one": False}, Backend.MATH),
        # head sizes at which consumer cards have no backward of flash attention
        ("rtx4090", wide(192) | {"dropout": 0.1}, Backend.FLASH),
        ("rtx4090", wide(200), Backend.EFFICIENT),
        ("rtx3090", wide(224), Backend.EFFICIENT),
        ("rtx4090", wide(232), Backend.FLASH),
        ("rtx4090", wide(232) | {"dropout": 0.1, "needs_grad": False}, Backend.FLASH),
        ("a100", wide(200), Backend.FLASH),
        # the largest head sizes
        ("a100", wide(256), Backend.FLASH),
        ("a100", wide(264), Backend.EFFICIENT),
        ("h200", wide(128), Backend.CUDNN),
        ("h200", wide(136), Backend.FLASH),
        # sizes of heads that the kernels can load
        ("a100", wide(264) | {"dtype": torch.float32}, Backend.EFFICIENT),
        ("a100", wide(268) | {"dtype": torch.float32}, Backend.EFFICIENT),
        ("a100", wide(266) | {"dtype": torch.float32}, Backend.MATH),
        ("a100", wide(268), Backend.MATH),
        ("v100", wide(264) | {"dtype": torch.float16}, Backend.EFFICIENT),
        ("v100", wide(268) | {"dtype": torch.float16}, Backend.MATH),
        ("v100", wide(263) | {"dtype": torch.float32}, Backend.EFFICIENT),
        ("a100", {"value": (2, 8, 128, 32)}, Backend.EFFICIENT),
        ("a100", {"key": (2, 8, 128, 32)}, Backend.MATH),
        # fewer heads of keys and values
        ("h200", heads(4, 2), Backend.CUDNN),
        ("a100", heads(4, 2), Backend.MATH),
        ("a100", heads(3, 3), Backend.MATH),
        ("h200", heads(4, 3), Backend.MATH),
        ("h200", heads(0, 0), Backend.MATH),
        ("h200", {"key": (1, 8, 128, 64), "value": (1, 8, 128, 64)}, Backend.MATH),
        # lengths
        ("h200", lengths(128, 1), Backend.FLASH),
        ("h200", lengths(128, 2), Backend.CUDNN),
        ("h200", lengths(1, 128), Backend.CUDNN),
        ("h200", lengths(1, 128) | {"dropout": 0.125}, Backend.FLASH),
        ("h200", lengths(2, 128) | {"dropout": 0.125}, Backend.CUDNN),
        ("h200", lengths(0, 128), Backend.MATH),
        ("h200", lengths(128, 0), Backend.MATH),
        # masks
        ("h200", {"masked": True, "mask_dim": 2, "causal": False}, Backend.CUDNN),
        ("h200", {"masked": True, "mask_dim": 3, "causal": False}, Backend.EFFICIENT),
        ("h200", {"mask_needs_grad": True}, Backend.CUDNN),
    ],
)
def test_choice(gpu, changes, expected):
    assert choose(replace(CALL, **changes), machine(gpu), NOW, Switches()) is expected


def test_odd_dropout_is_refused_by_cudnn_where_that_is_checked():
    call = replace(CALL, dropout=0.1)
    assert choose(call, machine("h200"), (2, 13), Switches()) is Backend.CUDNN
    assert choose(call, machine("h200"), (2, 14), Switches()) is Backend.FLASH


def test_the_program_may_forbid_kernels_and_order_them():
    hopper = machine("h200")
    assert choose(CALL, hopper, NOW, Switches(cudnn=False)) is Backend.FLASH
    assert choose(CALL, hopper, NOW, Switches(deterministic=True)) is Backend.FLASH
    assert choose(CALL, hopper, NOW, Switches(order=(Backend.MATH, Backend.FLASH))) is Backend.MATH
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose(replace(CALL, dtype=torch.float64), hopper, NOW, Switches(math=False))


@pytest.mark.parametrize(
    ("gpu", "version", "first"),
    [
        ("h200", (2, 9), Backend.FLASH),
        ("h200", (2, 10), Backend.CUDNN),
        ("b200", (2, 10), Backend.CUDNN),
        ("a100", (2, 14), Backend.FLASH),
    ],
)
def test_which_kernel_is_asked_first(gpu, version, first):
    order = default_order(machine(gpu), version)
    assert order[0] is first
    assert order[-1] is (Backend.MATH if first is Backend.CUDNN else Backend.CUDNN)
    assert set(order) == set(Backend)


def test_grouped_heads_in_the_efficient_kernel():
    call = replace(CALL, **heads(2, 2), masked=True, mask_dim=4, causal=False)
    switches = Switches(cudnn=False)
    assert choose(call, machine("a100"), (2, 13), switches) is Backend.MATH
    assert choose(call, machine("a100"), (2, 14), switches) is Backend.EFFICIENT
