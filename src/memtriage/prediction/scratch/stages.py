"""When the buffers of an operator are held."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.operators import Args, Kwargs

Tensors = list[torch.Tensor]
Rule = Callable[[Args, Kwargs, Tensors, GpuKind], list[int]]
"""What an operator is called with, its results, and the GPU; the bytes of each of its buffers."""

Staged = dict[int, list[int]]
"""Bytes of the buffers that are held at once, by how many of the results were allocated before them.

An operator that computes its results one after the other holds other buffers for each.
"""

BEFORE = 0
"""From before the results are allocated until `AT_THE_END`."""
AT_THE_END = -1
"""After all results were allocated."""
