"""Convolutions: copies of what does not lie as the kernel reads it, and cuDNN's workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.operators import Args, Kwargs
from memtriage.prediction.scratch import reductions
from memtriage.prediction.scratch.cudnn import Convolution, Operation, workspace
from memtriage.prediction.scratch.stages import AT_THE_END, BEFORE, Staged, Tensors

aten: Final = torch.ops.aten

Rule = Callable[[Args, Kwargs, Tensors, GpuKind], Staged]

LEAST_DIMENSIONS: Final = 3
IMAGES: Final = 4
SINGLE_BYTES: Final = 4


def is_depthwise(source: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether PyTorch's own kernel runs: one filter or more for each channel, which lie channels first
    (`is_depthwise` and `use_cudnn_depthwise`)."""
    # One dimension is seen as two, of which one is a pixel wide (`view1d_as_2d`).
    if source.dim() > IMAGES or memory_format(source, weight) is torch.channels_last:
        return False
    return groups > 1 and groups == source.shape[1] and weight.shape[0] % groups == 0


def memory_format(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The layout of the results: that of the input or the weight (`cudnn_conv_suggest_memory_format`)."""
    suggested = suggested_format(source)
    return suggested_format(weight) if suggested is torch.contiguous_format else suggested


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The layout that the strides of images say (`suggest_memory_format`)."""
    last = tensor.dim() == IMAGES and _channels_last(tensor)
    return torch.channels_last if last else torch.contiguous_format


def _forward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> Staged:
    """A copy of the input before the result, one of the weight after it."""
    source, weight, _, stride, *_, groups = args
    wanted = memory_format(source, weight)
    described = _described(source, weight, outputs[0], stride, groups, machine)
    return {
        BEFORE: copies(wanted, source),
        1: [*copies(wanted, weight), *_workspace(described, Operation.FORWARD, machine)],
    }


def _backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> Staged:
    """The gradient of the input, then that of the weight, then that of the bias, each with its buffers.

    What is copied for the first two is freed before the third.
    """
    gradient, source, weight, stride, groups, wants = args[0], args[1], args[2], args[4], args[9], args[10]
    wanted = memory_format(source, weight)
    described = _described(source, weight, gradient, stride, groups, machine)
    read = [tensor for tensor, by in ((source, wants[1]), (gradient, wants[0] or wants[1])) if by]
    stages: Staged = {BEFORE: copies(wanted, *read)}
    for what, operation in enumerate((Operation.OF_INPUT, Operation.OF_WEIGHT)):
        if wants[what]:
            weights = [] if operation is Operation.OF_WEIGHT else [weight]
            buffers = [*copies(wanted, *weights), *_workspace(described, operation, machine)]
            stages[sum(wants[: what + 1])] = buffers
    if wants[2]:
        others = {dim for dim in range(gradient.dim()) if dim != 1}
        layout = reductions.layout_of(tuple(gradient.shape), gradient.stride(), others)
        stages[AT_THE_END] = reductions.sizes(layout, reductions.SINGLE, machine)
    return stages


def copies(wanted: torch.memory_format, *read: torch.Tensor) -> list[int]:
    """Bytes of what ATen copies before it calls a kernel: each tensor that does not lie as wanted."""
    return [tensor.nbytes for tensor in read if not tensor.is_contiguous(memory_format=wanted)]


def _workspace(described: Convolution | None, operation: Operation, machine: GpuKind) -> list[int]:
    size = 0 if described is None else workspace(described, operation, machine.multiprocessors)
    return [size] if size else []


def _described(
    source: torch.Tensor,
    weight: torch.Tensor,
    result: torch.Tensor,
    stride: list[int],
    groups: int,
    machine: GpuKind,
) -> Convolution | None:
    """The convolution as cuDNN sees it; None where it does not run it, or in a way that was not measured."""
    own = is_depthwise(source, weight, groups)
    if own or source.dim() < LEAST_DIMENSIONS or source.dtype.itemsize > SINGLE_BYTES:
        return None
    return Convolution(
        source=tuple(source.shape),
        weight=tuple(weight.shape),
        result=tuple(result.shape),
        stride=stride[0],
        element=source.element_size(),
        channels_last=memory_format(source, weight) is torch.channels_last,
        tensor_cores=_on_tensor_cores(source.dtype, machine),
        depthwise=groups > 1 and groups == source.shape[1] and source.dim() == IMAGES,
    )


def _on_tensor_cores(dtype: torch.dtype, machine: GpuKind) -> bool:
    if dtype is torch.float32:
        return machine.bfloat16 and _tf32_allowed()
    return machine.tensor_cores


def _tf32_allowed() -> bool:
    settings = torch.backends.cudnn
    if hasattr(settings, "conv"):  # torch 2.9; once it was set there, `allow_tf32` can no longer be asked
        return bool(settings.conv.fp32_precision == "tf32")
    return bool(settings.allow_tf32)


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether strides say channels last; what could be both is channels first
    (`is_channels_last_strides_2d`, c10/core/MemoryFormat.h)."""
    least = 0
    strides, sizes = tensor.stride(), tensor.shape
    for dim in (1, 3, 2, 0):
        if strides[dim] < least or not sizes[dim] or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(sizes[dim], 1)
    return True


RULES: Final[dict[Any, Rule]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
