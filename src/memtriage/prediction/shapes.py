"""Results that CUDA lays out otherwise than the meta kernels say. Called with meta tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.scratch.convolution import memory_format
from memtriage.prediction.scratch.products import WITH_OUT_DTYPE

aten: Final = torch.ops.aten


def _convolution(source: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    made: torch.Tensor = aten.convolution.default(source, weight, *rest)
    return made.contiguous(memory_format=memory_format(source, weight))


def _convolution_backward(
    gradient: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> Any:
    of_source, of_weight, of_bias = aten.convolution_backward.default(gradient, source, weight, *rest)
    layout = memory_format(source, weight)
    of_source, of_weight = (
        None if result is None else result.contiguous(memory_format=layout)
        for result in (of_source, of_weight)
    )
    return of_source, of_weight, of_bias


def _layer_norm_backward(*args: Any) -> Any:
    """`layer_norm_backward_cuda` allocates like its contiguous copy of the input."""
    made = aten.native_layer_norm_backward.default(*args)
    return tuple(None if gradient is None else gradient.contiguous() for gradient in made)


def _fused_rms_norm(
    source: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> Any:
    """`_fused_rms_norm_cuda`, which has no meta kernel."""
    rows = [*source.shape[: source.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    output = torch.empty_like(source, memory_format=torch.contiguous_format)
    return output, source.new_empty(rows, dtype=torch.promote_types(source.dtype, torch.float32))


def _fused_rms_norm_backward(
    gradient: torch.Tensor,
    source: torch.Tensor,
    normalized_shape: list[int],
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: list[bool],
) -> Any:
    """`_fused_rms_norm_backward_cuda`, which has no meta kernel."""
    like = (source, weight)
    return tuple(
        None if each is None or not want else torch.empty_like(each)
        for each, want in zip(like, wanted, strict=True)
    )


def _written_in_place(*args: Any, **kwargs: Any) -> None:
    """An optimizer's fused step without a meta kernel: it allocates nothing."""


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`_grouped_mm`: CUDA multiplies single precision too, group by group (`_grouped_mm_fallback`)."""
    rows, columns = left.shape[-2], right.shape[-1]
    shape: tuple[int, ...]
    if left.dim() == 2 and right.dim() == 2:
        shape = (0 if offs is None else offs.shape[0], rows, columns)
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _wider_product(*args: Any, out: torch.Tensor | None = None, **scales: Any) -> torch.Tensor:
    """A product with an `out_dtype`: some of torch's shape functions take it for `beta` (2.8 to 2.13)."""
    *_, left, right, dtype = args
    made = torch.matmul(left, right).new_empty((*left.shape[:-1], right.shape[-1]), dtype=dtype)
    return made if out is None else out


RULES: Final[dict[Any, Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._grouped_mm.default: _grouped_mm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_sgd_.default: _written_in_place,
    aten._fused_sgd_.tensor_lr: _written_in_place,
    **dict.fromkeys(WITH_OUT_DTYPE, _wider_product),
}

LAST_FIRST: Final = frozenset({aten.native_dropout.default})
"""Operators whose kernels allocate their results from the last to the first (`dropout_cuda`: mask first)."""
