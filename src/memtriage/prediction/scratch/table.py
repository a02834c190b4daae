"""The table of operators with buffers of their own."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.operators import Args, Kwargs, tensors_in
from memtriage.prediction.scratch import (
    attention,
    convolution,
    embedding,
    products,
    reductions,
)
from memtriage.prediction.scratch.products import Workspaces
from memtriage.prediction.scratch.stages import AT_THE_END, BEFORE, Staged, Tensors

aten: Final = torch.ops.aten

COPIED_BEFORE: Final[dict[Any, tuple[int, ...]]] = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
    aten.embedding_dense_backward.default: (0,),
    aten.roll.default: (0,),
}
"""Positions of the arguments that are made contiguous before the results are allocated, in
layer_norm_kernel.cu, group_norm_kernel.cu, Embedding.cu and TensorTransformations.cu of ATen/native/cuda."""
COPIED: Final[dict[Any, tuple[int, ...]]] = {
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.sort.default: (0,),
    aten.sort.stable: (0,),
    aten.topk.default: (0,),
    aten.upsample_nearest1d.default: (0,),
    aten.upsample_nearest1d_backward.default: (0,),
    aten.upsample_nearest3d.default: (0,),
    aten.upsample_nearest3d_backward.default: (0,),
}
"""The same for operators whose results are allocated first, in SoftMax.cu, Sort.cpp, TensorTopK.cu and
UpSampleNearest*.cu."""
COPIED_IN_ITS_LAYOUT: Final = frozenset(
    {
        aten.upsample_bilinear2d_backward.default,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
    }
)
"""Operators that then make their first argument contiguous in the layout that its strides suggest, unless the
result has the same size, in UpSampleBilinear2d.cu and UpSampleNearest2d.cu."""


class Scratch:
    """Answers for one kind of GPU and one version of torch.

    Attributes:
        workspaces: those that cuBLAS keeps.
        convolved: whether there were convolutions.
    """

    def __init__(self, machine: GpuKind, version: tuple[int, int], lifetimes: Lifetimes) -> None:
        self._machine = machine
        self.workspaces = Workspaces(machine, version, lifetimes)
        self.convolved = False
        self._lifetimes = lifetimes
        self._tried: set[tuple[Any, ...]] = set()
        self._rules = {**attention.RULES, **embedding.RULES, **reductions.RULES}

    def keep(self, func: Any, args: Args) -> None:
        """Make what libraries keep or drop from here on; called when the results are allocated."""
        func = products.SAME_BUFFERS.get(func, func)
        if func in products.PRODUCTS or func in products.SCALED:
            self.workspaces.keep(func, args)
        elif func in convolution.RULES:
            self.convolved = True
            self._try_kernels(func, args)

    def __call__(self, func: Any, args: Args, kwargs: Kwargs, outputs: Tensors) -> Staged:
        """Return the buffers that the operator holds besides its results."""
        func = products.SAME_BUFFERS.get(func, func)
        if func in convolution.RULES:
            return convolution.RULES[func](args, kwargs, outputs, self._machine)
        if func in products.PRODUCTS:
            buffers = products.copies(func, args)
        elif func in reductions.ACCUMULATORS:
            buffers = reductions.buffers(func, args, kwargs, outputs, self._machine)
        else:
            rule = self._rules.get(func) or attention.OF_PACKAGES.get(func._schema.name)
            buffers = [] if rule is None else rule(args, kwargs, outputs, self._machine)
            before = _copies(func, args, COPIED_BEFORE)
            if before:
                return {BEFORE: before, len(outputs): buffers}  # the copies are still held then
            buffers = _copies(func, args, COPIED) + _copies_of_images(func, args, outputs) + buffers
        return {AT_THE_END: buffers} if buffers else {}

    @property
    def tried(self) -> bool:
        """Whether cuDNN chose a convolution by trial."""
        return bool(self._tried)

    def _try_kernels(self, func: Any, args: Args) -> None:
        """Note the first call of each kind with `cudnn.benchmark`.

        It runs every kernel, in one workspace that is large enough for all and at most what is free; then the
        cache is emptied (`run_single_conv`, Conv_v8.cpp).
        """
        if not (torch.backends.cudnn.benchmark and torch.backends.cudnn.enabled):
            return
        kind = (
            func,
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_in(args)),
            *(tuple(arg) if isinstance(arg, list) else arg for arg in args if isinstance(arg, (list, int))),
        )
        if kind not in self._tried:
            self._tried.add(kind)
            self._lifetimes.cache_emptied()


def _copies(func: Any, args: Args, copied: dict[Any, tuple[int, ...]]) -> list[int]:
    """Return the bytes of each copy that a kernel makes because it reads contiguous memory only."""
    read = (args[place] for place in copied.get(func, ()))
    return convolution.copies(torch.contiguous_format, *read)


def _copies_of_images(func: Any, args: Args, outputs: Tensors) -> list[int]:
    """The same for `COPIED_IN_ITS_LAYOUT`."""
    if func not in COPIED_IN_ITS_LAYOUT or args[0].shape == outputs[0].shape:
        return []
    return convolution.copies(convolution.suggested_format(args[0]), args[0])
