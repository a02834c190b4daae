"""Reductions: the partial results that blocks exchange through global memory.

The configuration is that of `setReduceConfig` in ATen/native/cuda/Reduce.cuh (torch 2.8 to 2.14). Where a
sum runs over other than the innermost dimension (the gradient of a bias) the buffer has room for every
thread of a block, and can be larger than the tensor that is summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.operators import Args, Kwargs
from memtriage.prediction.scratch.stages import Rule, Tensors

aten: Final = torch.ops.aten

MAX_THREADS: Final = 512
WARP: Final = 32
VECTOR: Final = 4
"""Elements that a thread loads at once (`vt0`, `input_vec_size`)."""
VECTORIZED_FROM: Final = 128
LEAST_VALUES: Final = 16
MOST_VALUES: Final = 256

MANY_ROWS: Final = 64 * 1024
ROWS_OF_BLOCK: Final = 32

SINGLE: Final = 4
"""Bytes of a partial result in single precision."""
_PAIR: Final = 16
"""A value and its index (arg-max and the like), or Welford's mean, square sum and counts."""

ACCUMULATORS: Final[dict[Any, int]] = {
    aten.sum.default: SINGLE,
    aten.sum.dim_IntList: SINGLE,
    aten.mean.default: SINGLE,
    aten.mean.dim: SINGLE,
    aten.prod.default: SINGLE,
    aten.prod.dim_int: SINGLE,
    aten.amax.default: SINGLE,
    aten.amin.default: SINGLE,
    aten.norm.Scalar: SINGLE,
    aten.norm.ScalarOpt_dim: SINGLE,
    aten.linalg_vector_norm.default: SINGLE,
    aten.any.dim: SINGLE,
    aten.all.dim: SINGLE,
    aten.var.correction: _PAIR,
    aten.std.correction: _PAIR,
    aten.var_mean.correction: _PAIR,
    aten.std_mean.correction: _PAIR,
    aten.argmax.default: _PAIR,
    aten.argmin.default: _PAIR,
}
"""Bytes that one partial result takes: half precision is accumulated in single precision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a reduction reads, after its dimensions were sorted and merged.

    Attributes:
        outputs: number of results.
        inputs: values that go into each.
        innermost: whether it runs along the innermost dimension.
        one_dimension: whether one dimension is left after merging.
        unit_stride: whether neighbors along the fastest dimension of the block lie side by side.
        output_vector: results that a thread computes at once.
    """

    outputs: int
    inputs: int
    innermost: bool
    one_dimension: bool
    unit_stride: bool
    output_vector: int


def buffers(func: Any, args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """The partial results and the counters of a reduction; none where one block does all."""
    source: torch.Tensor = args[0]
    if not source.numel() or not outputs[0].numel():
        return []
    element = ACCUMULATORS[func] * (2 if source.element_size() == 8 and ACCUMULATORS[func] == SINGLE else 1)
    layout = layout_of(tuple(source.shape), source.stride(), reduced_dimensions(func, args, kwargs))
    return sizes(layout, element, machine)


def reduced_dimensions(func: Any, args: Args, kwargs: Kwargs) -> set[int]:
    """The dimensions that a call reduces."""
    ndim = args[0].dim()
    names = [argument.name for argument in func._schema.arguments]
    if "dim" not in names:
        return set(range(ndim))
    place = names.index("dim")
    given = args[place] if place < len(args) else kwargs.get("dim")
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in ([given] if isinstance(given, int) else given)}


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], reduced: set[int]) -> Layout:
    """What `TensorIterator` makes of it: reduced dimensions first, each kind by stride, neighbors merged."""
    inner = _merged([(shape[dim], strides[dim]) for dim in reduced if shape[dim] != 1])
    outer = _merged(
        [(shape[dim], strides[dim]) for dim in range(len(shape)) if dim not in reduced and shape[dim] != 1]
    )
    outputs = math.prod(size for size, _ in outer)
    inputs = math.prod(size for size, _ in inner)
    innermost = not outer or (bool(inner) and inner[0][1] < outer[0][1])
    fastest = (inner[0][1] if inner else 1) if innermost else outer[0][1]
    vector = VECTOR
    if not innermost:
        vector = math.gcd(VECTOR, outer[0][0], *(stride for _, stride in (*inner, *outer[1:])))
    return Layout(outputs, inputs, innermost, len(inner) + len(outer) <= 1, fastest == 1, vector)


def sizes(layout: Layout, element: int, machine: GpuKind) -> list[int]:
    """Bytes of the partial results and of the counters (`global_memory_size`, `semaphore_size`)."""
    across, down = (layout.inputs, layout.outputs) if layout.innermost else (layout.outputs, layout.inputs)
    vector = 1
    if layout.unit_stride:
        if layout.innermost and across > VECTORIZED_FROM and layout.one_dimension:
            across //= VECTOR
        elif not layout.innermost:
            vector = layout.output_vector
            across //= vector
    most = MAX_THREADS // vector
    across_power, down_power = min(_last_power(across), most), min(_last_power(down), most)
    width = min(across_power, WARP)
    height = min(down_power, most // width)
    width = min(across_power, most // height)
    step_input = width if layout.innermost else 1
    step_output = 1 if layout.innermost else width
    values = -(-layout.inputs // step_input)
    if values < height * LEAST_VALUES and values < MOST_VALUES:
        return []
    step_input *= height
    values = -(-layout.inputs // step_input)
    grid = -(-(layout.outputs // vector) // step_output)
    target = machine.multiprocessors * (machine.threads_per_multiprocessor // (width * height))
    if values < MOST_VALUES or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks <= 1:
        return []
    partial = element * layout.outputs * blocks
    if not layout.innermost:
        partial *= width * vector
    return [partial, 4 * grid]


def _merged(dimensions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides, smallest stride first, with those merged that can be walked as one."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def _last_power(number: int) -> int:
    """The largest power of two that is no larger; 1 for 0.

    >>> _last_power(96), _last_power(1), _last_power(0)
    (64, 1, 1)
    """
    return 1 << max(number.bit_length() - 1, 0)


def _layer_norm(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`LaunchGammaBetaBackwardCUDAKernel` in layer_norm_kernel.cu: for many short rows one partial sum for
    each 32 of them, then a plain sum."""
    source, shape = args[1], args[2]
    width = torch.Size(shape).numel()
    rows = source.numel() // max(width, 1)
    gradients = [tensor for tensor in outputs if tensor.shape == torch.Size(shape)]
    if rows <= MANY_ROWS or width // WARP >= machine.multiprocessors // 2 or not gradients:
        return []
    blocks = -(-rows // ROWS_OF_BLOCK)
    layout = layout_of((blocks, width), (width, 1), {0})
    partial = [blocks * width * gradient.element_size() for gradient in gradients]
    return [*partial, *sizes(layout, SINGLE, machine)]


RULES: Final[dict[Any, Rule]] = {aten.native_layer_norm_backward.default: _layer_norm}
