"""Operators that C++ breaks up before they reach the dispatch mode, broken up as for a CUDA tensor.

Their C++ code asks the tensor for its device, which is `meta` in a trace, and would take the way of the host.
Each function follows the CUDA branch of the source it names (torch 2.8 to 2.14).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda import attention
from memtriage.prediction.fake_cuda.attention import AttentionCall, Backend, Switches
from memtriage.prediction.fake_cuda.overrides import Overrides
from memtriage.prediction.fake_cuda.stand_ins import around
from memtriage.prediction.fake_cuda.tensors import is_gpu, parts
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.notes import Notes

aten: Final = torch.ops.aten

FLASH_ALIGNMENT: Final = 8
"""`pad_last_dim<8>` in aten/src/ATen/native/transformers/attention.cpp."""
BIAS_ALIGNMENT: Final = 8
"""`pad_bias<8>` in the same file."""

MATRIX: Final = 2
"""Dimensions of a matrix."""

FUSED_RMS_NORM_SINCE: Final = (2, 9)
"""Before it `rms_norm` was a composite on CUDA too (pytorch #153666)."""
KERNELS_OF_CUDA: Final = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operators with a kernel for CUDA and a composite for others, which a build without CUDA prefers."""
WHOLE: Final = ("isfinite", "isinf")
"""Composites that are kept whole, because their result is known where their parts are not."""
RECURRENT: Final = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")

KEY: Final = "AutogradCUDA"
"""Where they are put: above autograd, instead of C++'s composite kernels."""
KEY_OF_SHARDS: Final = "AutogradMeta"
"""Where DTensors come: they have the keys of the true device."""


def _of_shards(kernel: Callable[..., Any], overload: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel for a DTensor of the GPU, whose keys are those of the true device of its parts."""
    if type(source) is not torch.Tensor and any(map(is_gpu, parts(source))):
        return kernel(source, *args, **kwargs)
    return overload.decompose(source, *args, **kwargs)


class Composites:
    """The replacements, for one kind of GPU and one version of torch.

    Attributes:
        kernels: what replaces an overload; None where it is run whole. In inference mode nothing stops above
            autograd, and the dispatch mode must look here.
    """

    def __init__(self, machine: GpuKind, version: tuple[int, int], notes: Notes) -> None:
        self._machine = machine
        self._version = version
        self._notes = notes
        self.kernels: dict[Any, Callable[..., Any] | None] = {}

    def register(self, overrides: Overrides) -> None:
        """Puts them above autograd, instead of C++'s composite kernels."""
        for name, kernel in (
            ("scaled_dot_product_attention", self.attention),
            ("dropout", dropout),
            ("rms_norm", self.rms_norm),
            ("batch_norm", batch_norm),
        ):
            self._put(overrides, name, kernel)
        # Not at the key of shards: C++ adds out of place to a DTensor on a GPU, too.
        self.kernels[overrides.put("linear", KEY, lambda overload: linear)] = linear
        for name in (*KERNELS_OF_CUDA, *WHOLE):
            self.kernels[overrides.put(name, KEY, partial(around, function=_below_autograd))] = None
        for name in RECURRENT:
            overrides.put(name, KEY, partial(around, function=self._cell_by_cell))

    def _put(self, overrides: Overrides, name: str, kernel: Callable[..., Any]) -> None:
        self.kernels[overrides.put(name, KEY, lambda overload: kernel)] = kernel
        overrides.put(name, KEY_OF_SHARDS, lambda overload: around(overload, _of_shards, kernel))

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` (transformers/attention.cpp)."""
        needs_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in (query, key, value))
        call = AttentionCall(
            dtype=query.dtype,
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            strides_end_in_one=all(
                operand is None or operand.stride(-1) == 1 for operand in (query, key, value, attn_mask)
            ),
            masked=attn_mask is not None,
            mask_dim=0 if attn_mask is None else attn_mask.dim(),
            mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p,
            causal=is_causal,
            gqa=enable_gqa,
            needs_grad=needs_grad,
        )
        chosen = attention.choose(call, self._machine, self._version, _switches())
        self._notes.add(_attention_note(chosen, call))
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = _additive(mask, query.dtype)
        if chosen is Backend.CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
            )[0]
        if chosen is Backend.FLASH:
            size = query.size(-1)
            padded = [_padded(operand, FLASH_ALIGNMENT) for operand in (query, key, value)]
            scale = 1 / math.sqrt(size) if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[
                0
            ]
            return out if out.size(-1) == size else out[..., :size]
        if chosen is Backend.EFFICIENT:
            if mask is not None:
                mask = _aligned(mask)
                mask = mask.expand(*query.shape[:2], query.size(-2), key.size(-2))
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        return _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)

    def rms_norm(
        self,
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """`rms_norm` (layer_norm.cpp): fused where the weight has the type of the input."""
        same = weight is None or weight.dtype is input.dtype
        if same and self._version >= FUSED_RMS_NORM_SINCE and not input.is_complex():
            return _FusedRmsNorm.apply(input, normalized_shape, weight, eps)
        return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]

    def _cell_by_cell(self, overload: Any, *args: Any, **kwargs: Any) -> Any:
        self._notes.add(
            "recurrent layers are traced cell by cell: what cuDNN keeps for backward is not known",
        )
        output, *last = overload.decompose(*args, **kwargs)
        # Some versions of PyTorch give the last states of an LSTM a dimension too many.
        first = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
        return output, *(state.view(given.shape) for state, given in zip(last, first, strict=True))


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` (Linear.cpp), which adds the bias in place where the input is not contiguous.

    C++ would add it out of place here, because a dispatch mode is on.
    """
    if bias is None or input.dim() == MATRIX or input.is_contiguous():
        return aten.linear.default.decompose(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`dropout` (Dropout.cpp): the fused kernel, which keeps one byte of mask an element."""
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout(input, p, train)[0]
    if p == 0 or not train or not input.numel():
        return input
    return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))


def batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """`batch_norm` (`_select_batch_norm_backend`, Normalization.cpp): cuDNN in training."""
    cudnn = (
        cudnn_enabled
        and torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and running_mean is not None
        and running_var is not None
        and weight.dtype is bias.dtype is torch.float32
        and input.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and training
        and 2 <= input.dim() <= 5
        and input.size(0) <= 880801
    )
    if cudnn:
        return aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[
            0
        ]
    return aten.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _below_autograd(overload: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return overload(*args, **kwargs)


def _switches() -> Switches:
    cuda = torch.backends.cuda
    return Switches(
        flash=cuda.flash_sdp_enabled(),
        efficient=cuda.mem_efficient_sdp_enabled(),
        math=cuda.math_sdp_enabled(),
        cudnn=cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        order=_order_asked(),
    )


def _order_asked() -> tuple[Backend, ...] | None:
    """The order that the program set (`sdpa_kernel(..., set_priority=True)`); None where it set none."""
    order = torch._C._get_sdp_priority_order()
    return (
        None
        if order == _ORDER_AT_FIRST
        else tuple(_NUMBERS[number] for number in order if number in _NUMBERS)
    )


_ORDER_AT_FIRST: Final = torch._C._get_sdp_priority_order()
_NUMBERS: Final = {0: Backend.MATH, 1: Backend.FLASH, 2: Backend.EFFICIENT, 3: Backend.CUDNN}
"""`SDPBackend` in ATen/SDPBackend.h."""


def _attention_note(chosen: Backend, call: AttentionCall) -> str:
    what = f"{str(call.dtype).removeprefix('torch.')}, head size {call.query[-1]}"
    what += ", with a mask" if call.masked else ""
    return f"attention ({what}) is run by {chosen.value}"


def _padded(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    missing = -tensor.size(-1) % alignment
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """`_scaled_dot_product_attention_math`: half precision is computed in single precision.

    C++ would add the mask out of place here, because a dispatch mode is on.
    """
    original = query.dtype
    if original in attention.HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else abs(scale))
    scaled = query * factor  # query, key and value in single precision are held until the end
    if causal:
        lengths = (query.size(-2), key.size(-2))
        mask = _additive(torch.ones(lengths, dtype=torch.bool, device=query.device).tril(), query.dtype)
    keys, values = key, value
    if gqa:
        groups = query.size(-3) // key.size(-3)
        keys, values = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    weights = torch.matmul(scaled, keys.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    returned = weights.to(original)  # next to the result, and made before it
    result = torch.matmul(weights, values).to(original)
    del returned
    return result


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`convert_boolean_attn_mask`: 0 where something may be seen, minus infinity elsewhere."""
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: a mask whose rows do not begin at multiples of 8 is copied with some padding."""
    strides = mask.stride()
    if strides[-1] == 1 and all(stride % BIAS_ALIGNMENT == 0 for stride in strides[:-1]):
        return mask
    length = mask.size(-1)
    padding = BIAS_ALIGNMENT - length % BIAS_ALIGNMENT
    return torch.nn.functional.pad(mask, (0, padding))[..., :length]


class _FusedRmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """CUDA's `_fused_rms_norm` and its gradient (derivatives.yaml): whole: a build without CUDA would break
    it up, and a DTensor runs it on its shards."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output, deviation = aten._fused_rms_norm.default(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, deviation)
        ctx.normalized_shape = normalized_shape
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, deviation = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_input, of_weight = aten._fused_rms_norm_backward.default(
                gradient, input, ctx.normalized_shape, deviation, weight, wanted
            )
        return of_input, None, of_weight, None
