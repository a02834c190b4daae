"""Operators that C++ breaks up by device allocate what they allocate on CUDA."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.traced import traced

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
SMALL = (2, 4, 16, 64)


def attend(dtype=HALF, query=SMALL, key=None, value=None, mask=None, needs_grad=(), **options):
    """Run attention on the device; returns shape, strides and type of what comes out."""

    def run(device):
        inputs = [torch.empty(shape, device=device, dtype=dtype) for shape in (query, key or query)]
        inputs.append(torch.empty(value or key or query, device=device, dtype=dtype))
        given = None
        if mask is not None:
            make = torch.empty if len(mask) == 2 else torch.empty_strided
            shape, kind, *strides = mask
            given = make(shape, *strides, device=device, dtype=kind)
        for number in needs_grad:
            [*inputs, given][number].requires_grad_()
        result = functional.scaled_dot_product_attention(*inputs, given, **options)
        if needs_grad:
            result.sum().backward()
        return tuple(result.shape), result.stride(), result.dtype

    return run


CUDNN, FLASH, EFFICIENT, MATH = "cuDNN attention", "flash attention", "memory-efficient attention", "math"
WIDE_HEADS = {"query": (1, 6, 16, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 24), "enable_gqa": True}


@pytest.mark.parametrize(
    ("gpu", "arguments", "kernel", "padded"),
    [
        ("h200", {}, CUDNN, 0),
        ("h200", {"needs_grad": (2,), "is_causal": True}, CUDNN, 0),
        ("h200", {"mask": ((16, 16), torch.bool)}, CUDNN, 0),
        ("h200", {"mask": ((2, 1, 16, 16), HALF)}, CUDNN, 0),
        ("a100", {"dropout_p": 0.1}, FLASH, 0),
        ("a100", {"needs_grad": (0,)}, FLASH, 0),
        ("a100", {"query": (2, 4, 16, 60), "needs_grad": (0,)}, FLASH, 4),
        ("a100", {"query": (2, 4, 16, 60), "scale": 2.0}, FLASH, 3),
        ("h200", {"dtype": SINGLE}, EFFICIENT, 0),
        ("h200", {"dtype": SINGLE, "needs_grad": (1,)}, EFFICIENT, 0),
        ("a100", {"mask": ((1, 1, 16, 16), HALF)}, EFFICIENT, 0),
        ("a100", {"query": (2, 4, 20, 64), "mask": ((20, 20), torch.bool)}, EFFICIENT, 1),
        ("a100", {"mask": ((4, 16, 16), HALF, (260, 16, 1))}, EFFICIENT, 1),
        ("h200", {"dtype": DOUBLE, "mask": ((16, 16), DOUBLE), "needs_grad": (3,)}, MATH, 0),
        # As T5's position bias, whose heads lie side by side (`check_last_dim_stride_equals_1_dense`).
        ("h200", {"mask": ((1, 4, 16, 16), HALF, (1, 1, 64, 4))}, MATH, 0),
        ("v100", {"query": (2, 4, 3, 8), "scale": -4.0}, MATH, 0),
        ("h200", {"dtype": DOUBLE, "is_causal": True, "key": (2, 4, 8, 64)}, MATH, 0),
        ("h200", {"dtype": DOUBLE, "dropout_p": 0.1}, MATH, 0),
        ("v100", {**WIDE_HEADS, "mask": ((16, 5), torch.bool), "needs_grad": (0,)}, MATH, 0),
    ],
    ids=str,
)
def test_attention_allocates_its_result_as_its_kernel_lays_it_out(gpu, arguments, kernel, padded):
    """The memory-efficient kernel puts the heads inside the rows; flash attention pads heads to 8 numbers."""
    run = traced(attend(**arguments), gpu)
    batch, heads, rows, size = (*arguments.get("query", SMALL)[:3], arguments.get("value", SMALL)[3])
    if "value" not in arguments:
        size = arguments.get("query", SMALL)[3]
    wide = -(-size // 8) * 8 if kernel == FLASH else size
    across = (wide, heads * wide) if kernel == EFFICIENT else (rows * wide, wide)
    strides = (heads * rows * wide, *across, 1)
    assert run.answer == ((batch, heads, rows, size), strides, arguments.get("dtype", HALF))
    assert [note.rpartition(" is run by ")[2] for note in run.notes] == [kernel]
    assert run.made.count("constant_pad_nd") == padded
    result = f" {batch * heads * rows * wide * arguments.get('dtype', HALF).itemsize}"
    assert any(made.endswith(result) and not made.startswith("empty") for made in run.made.split(", "))


@pytest.mark.parametrize(
    ("allowed", "first", "kernel"),
    [
        ([SDPBackend.MATH], False, "math"),
        ([SDPBackend.EFFICIENT_ATTENTION], False, "memory-efficient attention"),
        ([SDPBackend.FLASH_ATTENTION], False, "flash attention"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], False, "cuDNN attention"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], False, "flash attention"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], True, "flash attention"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], True, "memory-efficient attention"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], True, "cuDNN attention"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], True, "math"),
    ],
    ids=str,
)
def test_the_program_chooses_among_kernels(allowed, first, kernel):
    def run(device):
        with sdpa_kernel(allowed, set_priority=first):
            return attend()(device)

    assert traced(run).notes == [f"attention (bfloat16, head size 64) is run by {kernel}"]


def test_a_deterministic_program_leaves_cudnn_out():
    def run(device):
        torch.use_deterministic_algorithms(True)
        try:
            return attend()(device)
        finally:
            torch.use_deterministic_algorithms(False)

    assert traced(run).notes == ["attention (bfloat16, head size 64) is run by flash attention"]


def test_half_precision_is_kept_where_the_program_allows_it():
    def run(device):
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
        try:
            return attend()(device)
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)

    scores = 2 * 4 * 16 * 16
    for allowed in (True, False):
        made = traced(run, "v100").made.split(", ")
        assert (f"bmm {scores * 2}" in made, f"bmm {scores * 4}" in made) == (allowed, not allowed)


def normalized(kind=torch.float32, weight=torch.float32, backward=False):
    def run(device):
        rows = torch.empty(4, 8, device=device, dtype=kind, requires_grad=True)
        scale = None if weight is None else torch.empty(8, device=device, dtype=weight, requires_grad=True)
        result = functional.rms_norm(rows, (8,), scale)
        if backward:
            result.sum().backward()
            return rows.grad.dtype, None if scale is None else scale.grad.shape
        return result.dtype

    return run


@pytest.mark.parametrize(
    ("version", "arguments", "fused"),
    [
        ((2, 9), (HALF, HALF, True), True),
        ((2, 9), (SINGLE, None, True), True),
        ((2, 9), (HALF, SINGLE), False),
        ((2, 8), (SINGLE, SINGLE), False),
        ((2, 9), (torch.complex64, None), False),
    ],
    ids=["fused", "without a weight", "mixed", "before it was fused", "complex"],
)
def test_rms_norm_is_fused_where_the_weight_has_the_type_of_the_input(version, arguments, fused):
    kind, weight, *backward = arguments
    run = traced(normalized(*arguments), version=version)
    assert run.answer == ((kind, weight and torch.Size([8])) if backward else kind)
    rows, sums = 4 * 8 * kind.itemsize, 4 * 4
    whole = [f"_fused_rms_norm {rows}", f"_fused_rms_norm {sums}"]
    backwards = [f"_fused_rms_norm_backward {rows}"] * bool(backward)
    backwards += [f"_fused_rms_norm_backward {8 * kind.itemsize}"] * bool(backward and weight)
    made = run.made.split(", ")
    assert [each for each in made if "fused" in each] == (whole + backwards if fused else [])
    assert ("rsqrt" in run.made) is not fused


@pytest.mark.parametrize(
    ("count", "p", "train", "expected"),
    [
        (64, 0.5, True, (False, "empty 256, native_dropout 64, native_dropout 256")),
        (64, 0.0, True, (True, "empty 256")),
        (64, 1.0, True, (False, "empty 256, zeros 4, mul 256")),
        (64, 0.5, False, (True, "empty 256")),
        (0, 0.5, True, (True, "")),
        (0, 1.0, True, (True, "")),
    ],
)
def test_dropout_keeps_a_mask_where_it_draws_one(count, p, train, expected):
    def run(device):
        rows = torch.empty(count, device=device)
        return torch.dropout(rows, p, train) is rows

    run = traced(run)
    assert (run.answer, run.made) == expected


@pytest.mark.parametrize(
    ("rows", "bias", "expected"),
    [
        (lambda device: torch.empty(2, 3, 4, device=device), True, "addmm 192"),
        (lambda device: torch.empty(4, 6, device=device).t(), True, "addmm 192"),
        (lambda device: torch.empty(2, 4, 3, device=device).transpose(1, 2), True, "bmm 192"),
        (lambda device: torch.empty(2, 4, 3, device=device).transpose(1, 2), False, "bmm 192"),
        (lambda device: torch.empty(3, 2, 1, 4, device=device).transpose(0, 1), True, "clone 96, bmm 192"),
    ],
    ids=["contiguous", "a matrix", "turned", "turned, without a bias", "turned and copied"],
)
def test_linear_adds_its_bias_in_place(rows, bias, expected):
    def run(device):
        weight = torch.empty(8, 4, device=device)
        functional.linear(rows(device), weight, torch.empty(8, device=device) if bias else None)

    given = "empty 128, empty 96, empty 32, " if bias else "empty 128, empty 96, "
    for mode in (run, torch.inference_mode()(run)):
        assert traced(mode).made == f"{given}{expected}, cublas 33554432 workspace"


def normalize_batch(shape=(2, 8, 4, 4), kind=torch.float32, norm=None, train=True):
    def run(device):
        layer = (norm or (lambda: nn.BatchNorm2d(8)))().to(device).train(train)
        rows = torch.empty(shape, device=device, dtype=kind, requires_grad=True)
        return layer(rows).dtype

    return run


@pytest.mark.parametrize(
    ("arguments", "cudnn"),
    [
        ({}, True),
        ({"kind": torch.float16}, True),
        ({"kind": torch.bfloat16}, True),
        ({"kind": torch.float64, "norm": lambda: nn.BatchNorm2d(8, dtype=torch.float64)}, False),
        ({"train": False}, False),
        ({"norm": lambda: nn.BatchNorm2d(8, affine=False)}, False),
        ({"norm": lambda: nn.BatchNorm2d(8, track_running_stats=False)}, False),
        ({"norm": lambda: nn.BatchNorm1d(8), "shape": (4, 8)}, True),
        ({"norm": lambda: nn.BatchNorm3d(8), "shape": (1, 8, 2, 2, 2)}, True),
        ({"norm": lambda: nn.BatchNorm1d(8), "shape": (880801, 8)}, True),
        ({"norm": lambda: nn.BatchNorm1d(8), "shape": (880802, 8)}, False),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_cudnn_normalizes_batches_in_training(arguments, cudnn):
    made = traced(normalize_batch(**arguments)).made
    assert ("cudnn_batch_norm" in made, "native_batch_norm" in made) == (cudnn, not cudnn)


def test_a_program_may_switch_cudnn_off(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert "native_batch_norm" in traced(normalize_batch()).made


def recurrent(layer):
    def run(device):
        made = layer().to(device)
        output, state = made(torch.empty(3, 2, 4, device=device))
        states = state if isinstance(state, tuple) else (state,)
        return tuple(output.shape), [tuple(each.shape) for each in states]

    return run


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (lambda: nn.LSTM(4, 8, 2), ((3, 2, 8), [(2, 2, 8), (2, 2, 8)])),
        (lambda: nn.GRU(4, 8, bidirectional=True), ((3, 2, 16), [(2, 2, 8)])),
        (lambda: nn.RNN(4, 8), ((3, 2, 8), [(1, 2, 8)])),
        (lambda: nn.RNN(4, 8, nonlinearity="relu"), ((3, 2, 8), [(1, 2, 8)])),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_recurrent_layers_are_run_cell_by_cell(layer, expected):
    run = traced(recurrent(layer))
    assert run.answer == expected
    assert run.notes == [
        "recurrent layers are traced cell by cell: what cuDNN keeps for backward is not known"
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (functional.silu, "empty 256, silu 256, sum 4, ones_like 4, silu_backward 256"),
        (functional.mish, "empty 256, mish 256, sum 4, ones_like 4, mish_backward 256"),
        (lambda rows: rows.isinf(), "empty 256, isinf 64"),
        (
            lambda rows: torch.native_channel_shuffle(rows.view(1, 4, 4, 4), 2),
            "empty 256, native_channel_shuffle 256",
        ),
    ],
    ids=["silu", "mish", "isinf", "channel shuffle"],
)
def test_kernels_of_cuda_are_run_whole(function, expected):
    def run(device):
        rows = torch.empty(64, device=device, requires_grad=True)
        result = function(rows)
        if result.requires_grad:
            result.sum().backward()

    assert traced(run).made == expected


def test_the_parts_of_a_sharded_tensor_are_normalized_whole():
    def run(device):
        mesh = init_device_mesh(device.type, (2,))
        rows = DTensor.from_local(torch.empty(4, 8, device=device), mesh, [Shard(0)])
        on_host = DTensor.from_local(torch.empty(1 << 20, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
        return [type(functional.rms_norm(each, (8,))) for each in (rows, on_host)]

    run = traced(run, world_size=2)
    assert (run.answer, run.made) == (
        [DTensor, DTensor],
        "empty 128, _fused_rms_norm 128, _fused_rms_norm 16",
    )
