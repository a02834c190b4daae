"""Convolutions: copies in the layout that the kernel reads.

cuDNN does not say which of its kernels will run. Inferred: the gradients of kernels larger than one pixel run
on tensor cores, which read channels-last data, and copies of all three tensors are the workspace; forward and
kernels of one pixel (a plain product) work without. With it the reserved bytes of ResNet-50 on an H200, in
single precision and under autocast, are met within 0.3 and 2.5 %; without any workspace they would be 7 and
9 % too low, and with one in forward as well 6 and 7 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from memtriage.predict.machines import Machine
from memtriage.predict.scratch import reductions
from memtriage.predict.scratch.stages import Staged

aten: Final = torch.ops.aten

Rule = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor], Machine], Staged]

CHANNEL_BYTES: Final = 16
"""Tensor cores read channels in units of it: cuDNN pads the channels of its copies."""


def is_depthwise(source: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether PyTorch's own kernel runs: one filter or more for each channel (`is_depthwise`)."""
    return source.dim() == 4 and groups > 1 and groups == source.shape[1] and weight.shape[0] % groups == 0


def memory_format(source: torch.Tensor, weight: torch.Tensor, *, groups: int) -> torch.memory_format:
    """The layout of the results: PyTorch's depthwise kernel knows channels first only, cuDNN follows input or
    weight (`cudnn_conv_suggest_memory_format`)."""
    if source.dim() != 4 or is_depthwise(source, weight, groups):
        return torch.contiguous_format
    return torch.channels_last if _lies_so(source) or _lies_so(weight) else torch.contiguous_format


def _forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], machine: Machine
) -> Staged:
    return {1: _copies(args[0], args[1], outputs[0], args[8])}


def _backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], machine: Machine
) -> Staged:
    """The gradient of the input, then that of the weight, then that of the bias, each with its buffers."""
    gradient, source, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    buffers = _copies(source, weight, gradient, groups)
    if _converted(source, weight, groups, machine):
        buffers = [sum(_padded_bytes(each) for each in (source, weight, gradient))]
    stages: Staged = {}
    for what in range(2):
        if wanted[what]:
            stages[sum(wanted[: what + 1])] = buffers
    if wanted[2]:
        others = {dim for dim in range(gradient.dim()) if dim != 1}
        layout = reductions.layout_of(tuple(gradient.shape), gradient.stride(), others)
        stages[sum(wanted)] = reductions.sizes(layout, reductions.SINGLE, machine)
    return stages


def _copies(source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int) -> list[int]:
    """What ATen copies before it calls a kernel: all that does not lie as the others do."""
    wanted = memory_format(source, weight, groups=groups)
    return [_bytes(each) for each in (source, weight, result) if not each.is_contiguous(memory_format=wanted)]


def _converted(source: torch.Tensor, weight: torch.Tensor, groups: int, machine: Machine) -> bool:
    """Whether cuDNN converts channels-first data for a kernel on tensor cores."""
    if source.dim() != 4 or machine.capability < (7, 0) or is_depthwise(source, weight, groups):
        return False
    first = memory_format(source, weight, groups=groups) is torch.contiguous_format
    return first and weight.shape[2:].numel() > 1


def _lies_so(tensor: torch.Tensor) -> bool:
    """Whether strides say channels last; what could be both is channels first
    (`is_channels_last_strides_2d`, c10/core/MemoryFormat.h)."""
    least = 0
    strides, sizes = tensor.stride(), tensor.shape
    for dim in (1, 3, 2, 0):
        if strides[dim] < least or not sizes[dim] or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(sizes[dim], 1)
    return True


def _bytes(tensor: torch.Tensor) -> int:
    count: int = tensor.numel() * tensor.element_size()
    return count


def _padded_bytes(tensor: torch.Tensor) -> int:
    step = CHANNEL_BYTES // tensor.element_size()
    channels = tensor.shape[1]
    padded: int = -(-channels // step) * step
    count: int = _bytes(tensor) // channels * padded
    return count


RULES: Final[dict[Any, Rule]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
