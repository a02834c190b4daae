"""A quantized tensor that is no `torch.Tensor`, and how it is saved for backward.

`save_for_backward` takes tensors only. So a quantized tensor hands out its parts and keeps its shell, which
goes into an ordinary list on the autograd context; in backward the parts are written back into the shell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Quantized:
    """Eight bits an element and one scale."""

    def __init__(self, values: torch.Tensor) -> None:
        self.dtype = values.dtype
        scale = LARGEST / values.detach().abs().amax().float().clamp(min=1e-12)
        self._data: torch.Tensor | None = (values.detach().float() * scale).to(torch.float8_e4m3fn)
        self._scale_inv: torch.Tensor | None = scale.reciprocal()

    def dequantize(self) -> torch.Tensor:
        assert self._data is not None and self._scale_inv is not None
        return (self._data.float() * self._scale_inv).to(self.dtype)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Quantized]:
        parts = [self._data, self._scale_inv]
        self._data = self._scale_inv = None
        return parts, self

    def restore_from_saved(self, saved: Sequence[Any]) -> Sequence[Any]:
        self._data, self._scale_inv, *rest = saved
        return rest


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Quantized | None]]:
    """What `save_for_backward` can take, and the shells of the rest."""
    parts: list[torch.Tensor | None] = []
    shells: list[Quantized | None] = []
    for tensor in tensors:
        if isinstance(tensor, Quantized):
            more, shell = tensor.prepare_for_saving()
            parts += more
            shells.append(shell)
        else:
            parts.append(tensor)
            shells.append(None)
    return parts, shells


def restore_from_saved(shells: Sequence[Quantized | None], saved: Sequence[Any]) -> list[Any]:
    """The tensors as they were before `prepare_for_saving`."""
    restored: list[Any] = []
    for shell in shells:
        if shell is None:
            restored.append(saved[0])
            saved = saved[1:]
        else:
            saved = shell.restore_from_saved(saved)
            restored.append(shell)
    return restored
