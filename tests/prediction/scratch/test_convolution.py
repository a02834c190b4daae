"""What a convolution takes besides its results: copies of what lies otherwise, workspaces, sums of a bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch import reductions
from memtriage.prediction.scratch.convolution import RULES, is_depthwise, memory_format
from memtriage.prediction.scratch.cudnn import Convolution, Operation, workspace
from memtriage.prediction.scratch.stages import AT_THE_END, BEFORE

aten = torch.ops.aten
HOPPER = machine("h200")
LAST, FIRST = torch.channels_last, torch.contiguous_format


def images(*sizes: int, last: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.empty(sizes, dtype=dtype, device="meta")
    return made.to(memory_format=LAST) if last else made


@pytest.mark.parametrize(
    ("source", "weight", "expected"),
    [
        (images(2, 8, 6, 6), images(16, 8, 3, 3), FIRST),
        (images(2, 8, 6, 6, last=True), images(16, 8, 3, 3), LAST),
        (images(2, 8, 6, 6), images(16, 8, 3, 3, last=True), LAST),
        (images(2, 1, 6, 6), images(16, 1, 3, 3), FIRST),
        (images(2, 8, 1, 1), images(16, 8, 1, 1), FIRST),
        (images(2, 8, 6), images(16, 8, 3), FIRST),
    ],
)
def test_results_lie_as_the_input_or_the_weight(
    source: torch.Tensor, weight: torch.Tensor, expected: torch.memory_format
) -> None:
    assert memory_format(source, weight) is expected
    if source.dim() == 4:  # as PyTorch says for tensors that are not ambiguous
        plain = source.is_contiguous() and weight.is_contiguous()
        assert plain == (expected is FIRST)


@pytest.mark.parametrize(
    ("source", "filters", "groups", "expected"),
    [
        (images(2, 8, 6, 6), 8, 8, True),
        (images(2, 8, 6, 6), 16, 8, True),
        (images(2, 8, 6, 6), 12, 8, False),
        (images(2, 8, 6, 6), 8, 4, False),
        (images(2, 1, 6, 6), 8, 1, False),
        (images(2, 8, 6, 6, last=True), 8, 8, False),
        (images(2, 8, 6), 8, 8, True),
        (images(2, 8, 6, 6, 6), 8, 8, False),
    ],
)
def test_filters_of_single_channels_have_a_kernel_of_pytorch(
    source: torch.Tensor, filters: int, groups: int, expected: bool
) -> None:
    weight = images(filters, source.shape[1] // groups, *[3] * (source.dim() - 2))
    assert is_depthwise(source, weight, groups) is expected


SOURCE, WEIGHT, RESULT = images(2, 64, 32, 32), images(128, 64, 3, 3), images(2, 128, 32, 32)
DESCRIBED = Convolution(
    source=(2, 64, 32, 32), weight=(128, 64, 3, 3), result=(2, 128, 32, 32), stride=1, element=2,
    channels_last=False, tensor_cores=True, depthwise=False,
)  # fmt: skip


def forward(source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int = 1) -> Any:
    args = (source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return RULES[aten.convolution.default](args, {}, [result], HOPPER)


def backward(
    gradient: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
) -> Any:
    args = (gradient, source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
    return RULES[aten.convolution_backward.default](args, {}, [], HOPPER)


def with_workspace(operation: Operation) -> list[int]:
    size = workspace(DESCRIBED, operation, HOPPER.multiprocessors)
    return [size] if size else []


def test_a_forward_has_the_workspace_of_cudnn() -> None:
    assert forward(SOURCE, WEIGHT, RESULT) == {BEFORE: [], 1: with_workspace(Operation.FORWARD)}


def test_an_input_that_lies_otherwise_is_copied_before_the_result() -> None:
    weight = images(128, 64, 3, 3, last=True)
    result = images(2, 128, 32, 32, last=True)
    assert forward(SOURCE, weight, result) == {BEFORE: [2 * 64 * 32 * 32 * 2], 1: []}
    strided = torch.empty(2, 64, 32, 64, dtype=torch.bfloat16, device="meta")[..., ::2]
    assert forward(strided, WEIGHT, RESULT)[BEFORE] == [2 * 64 * 32 * 32 * 2]


def test_a_weight_that_lies_otherwise_is_copied_after_the_result() -> None:
    source, result = images(2, 64, 32, 32, last=True), images(2, 128, 32, 32, last=True)
    assert forward(source, WEIGHT, result) == {BEFORE: [], 1: [128 * 64 * 3 * 3 * 2]}


def test_a_backward_copies_what_its_gradients_read() -> None:
    last = images(128, 64, 3, 3, last=True)
    of_source, of_result = 2 * 64 * 32 * 32 * 2, 2 * 128 * 32 * 32 * 2
    for wanted, copies in (
        ((True, True, False), [of_source, of_result]),
        ((False, True, False), [of_source, of_result]),
        ((True, False, True), [of_result]),
        ((False, False, True), []),
    ):
        assert backward(RESULT, SOURCE, last, wanted)[BEFORE] == copies


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_of_what_was_not_measured_there_is_no_workspace(dtype: torch.dtype) -> None:
    some = [images(*tensor.shape, dtype=dtype) for tensor in (SOURCE, WEIGHT, RESULT)]
    assert forward(*some) == {BEFORE: [], 1: []}


def test_a_backward_has_its_buffers_stage_by_stage() -> None:
    of_input, of_weight = (with_workspace(one) for one in (Operation.OF_INPUT, Operation.OF_WEIGHT))
    assert backward(RESULT, SOURCE, WEIGHT, (True, True, False)) == {BEFORE: [], 1: of_input, 2: of_weight}
    assert backward(RESULT, SOURCE, WEIGHT, (False, True, False)) == {BEFORE: [], 1: of_weight}
    assert backward(RESULT, SOURCE, WEIGHT, (False, False, False)) == {BEFORE: []}
    layout = reductions.layout_of((2, 128, 32, 32), RESULT.stride(), {0, 2, 3})
    of_bias = reductions.sizes(layout, 4, HOPPER)
    assert backward(RESULT, SOURCE, WEIGHT, (True, True, True))[AT_THE_END] == of_bias
    assert backward(RESULT, SOURCE, WEIGHT, (False, False, True)) == {BEFORE: [], AT_THE_END: of_bias}


def test_a_bias_is_summed_over_images_and_pixels() -> None:
    gradient = images(256, 4, 256, 256)
    stage = backward(gradient, images(256, 4, 256, 256), images(4, 4, 1, 1), (False, False, True))[AT_THE_END]
    layout = reductions.layout_of((256, 4, 256, 256), gradient.stride(), {0, 2, 3})
    assert stage == reductions.sizes(layout, 4, HOPPER) != []
