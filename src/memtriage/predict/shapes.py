"""Results that CUDA lays out otherwise than the meta kernels say. Called with meta tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.predict.scratch.convolution import is_depthwise

aten: Final = torch.ops.aten


def _convolution(source: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """PyTorch's depthwise kernel (`conv_depthwise2d`) makes channels-first results whatever it reads."""
    made: torch.Tensor = aten.convolution.default(source, weight, *rest)
    return made.contiguous() if is_depthwise(source, weight, rest[-1]) else made


def _convolution_backward(
    gradient: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> Any:
    made = aten.convolution_backward.default(gradient, source, weight, *rest)
    if not is_depthwise(source, weight, rest[-2]):
        return made
    return tuple(None if each is None else each.contiguous() for each in made)


RULES: Final[dict[Any, Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
