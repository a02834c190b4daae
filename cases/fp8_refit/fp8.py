"""Linear layers of three libraries, their FP8 context, and the clearing of caches as NeMo-RL does it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Blocks

LIBRARIES: Final = ("te", "torchao", "standin")
"""TransformerEngine, torchao, and a stand-in in plain torch with a cache of quantized weights as TE's."""

_E4M3_LARGEST: Final = 448.0


class _Ignoring(nn.Module):
    """A module whose layers take no word about micro-batches."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.parts(x)


class _Gated(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class TorchBlocks:
    """Plain torch layers; what torchao converts, and the bf16 row without TransformerEngine."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._place = {"device": device, "dtype": dtype}

    def norm_linear(self, width: int, out: int) -> nn.Module:
        return _Ignoring(nn.RMSNorm(width, **self._place), self._plain(width, out))

    def linear(self, width: int, out: int) -> nn.Module:
        return _Ignoring(self._plain(width, out))

    def norm_mlp(self, width: int, inner: int) -> nn.Module:
        gated = _Gated(self._plain(width, 2 * inner), self._plain(inner, width))
        return _Ignoring(nn.RMSNorm(width, **self._place), gated)

    def _plain(self, width: int, out: int) -> nn.Module:
        return nn.Linear(width, out, bias=False, **self._place)


class StandInLinear(nn.Linear):
    """Keeps quantized copies of its weight from the first micro-batch on, as TransformerEngine does.

    The product is that of the quantized weight; the second copy stands for the transposed one, which the
    backward pass of Hopper's FP8 kernels needs: so without gradients only the first one is made, and both
    again by the next pass with gradients (`get_weight_workspace` of 2.12). What is there is filled in place.
    """

    def __init__(self, *sizes: int, **place: Any) -> None:
        super().__init__(*sizes, bias=False, **place)
        self._fp8_workspaces: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}

    def forward(self, x: Tensor, first: bool) -> Tensor:
        rows, inverse = self._quantized(first)
        quantized = rows.to(x.dtype) * inverse.to(x.dtype)
        # Straight through: the gradient is that of the weight which was quantized.
        return F.linear(x, self.weight + (quantized - self.weight).detach())

    def _quantized(self, first: bool) -> tuple[Tensor, Tensor]:
        """The weight in FP8, and what undoes its scaling."""
        weight, cache = self.weight.detach(), self._fp8_workspaces
        backward = torch.is_grad_enabled()
        if backward and "weight" in cache and cache["weight"][1] is None:
            del cache["weight"]
        made = "weight" not in cache
        if made:
            cache["weight"] = self._make(backward)
        rows, columns, inverse = cache["weight"]
        if made or first:
            scale = _E4M3_LARGEST / weight.abs().amax().float().clamp(min=1e-12)
            rows.copy_(weight * scale.to(weight.dtype))
            if columns is not None:
                columns.copy_(rows.t())
            inverse.copy_(scale.reciprocal())
        return rows, inverse

    def _make(self, backward: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Memory for the copies."""
        rows = torch.empty_like(self.weight.detach(), dtype=torch.float8_e4m3fn)
        columns = rows.t().contiguous() if backward else None
        return rows, columns, torch.empty((), device=rows.device)


class _StandInNorm(nn.Module):
    def __init__(self, norm: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.norm, self.after = norm, after

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.after(self.norm(x), first)


class _StandInGated(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor, first: bool) -> Tensor:
        gate, value = self.up(x, first).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value, first)


class StandInBlocks:
    """Layers of `StandInLinear`: the case's logic where no FP8 library runs."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._place = {"device": device, "dtype": dtype}

    def norm_linear(self, width: int, out: int) -> nn.Module:
        return _StandInNorm(nn.RMSNorm(width, **self._place), self.linear(width, out))

    def linear(self, width: int, out: int) -> nn.Module:
        return StandInLinear(width, out, **self._place)

    def norm_mlp(self, width: int, inner: int) -> nn.Module:
        gated = _StandInGated(self.linear(width, 2 * inner), self.linear(inner, width))
        return _StandInNorm(nn.RMSNorm(width, **self._place), gated)


class EngineBlocks:
    """TransformerEngine's layers: the norm is fused into the linear layer behind it."""

    def __init__(self, te: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._te = te
        self._place = {"device": device, "params_dtype": dtype, "bias": False}

    def norm_linear(self, width: int, out: int) -> nn.Module:
        return self._te.LayerNormLinear(width, out, normalization="RMSNorm", **self._place)

    def linear(self, width: int, out: int) -> nn.Module:
        return self._te.Linear(width, out, **self._place)

    def norm_mlp(self, width: int, inner: int) -> nn.Module:
        return self._te.LayerNormMLP(
            width, inner, normalization="RMSNorm", activation="swiglu", **self._place
        )


def library(wanted: str | None) -> str:
    """The library to use: the wanted one, else the first that can be imported.

    Raises:
        SystemExit: the wanted one is not installed, or none is.
    """
    modules = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8", "standin": "torch"}
    for name in LIBRARIES[:2] if wanted is None else (wanted,):
        try:
            importlib.import_module(modules[name])
        except ImportError as error:
            if wanted is not None:
                raise SystemExit(f"--library {wanted}: {modules[name]} does not import: {error}") from error
        else:
            return name
    raise SystemExit("neither TransformerEngine nor torchao is installed; --library standin needs neither")


def blocks(name: str, quantized: bool, device: torch.device, dtype: torch.dtype) -> Blocks:
    """Makers of layers. TransformerEngine's serve the bf16 row too, so that the rows differ in FP8 alone."""
    if name == "te":
        return EngineBlocks(importlib.import_module("transformer_engine.pytorch"), device, dtype)
    if name == "standin" and quantized:
        return StandInBlocks(device, dtype)
    return TorchBlocks(device, dtype)


def convert(name: str, model: nn.Module) -> None:
    """Turn linear layers into those of torchao; the other libraries have theirs from the beginning."""
    if name != "torchao":
        return
    torchao = importlib.import_module("torchao.float8")

    def inner(module: nn.Module, path: str) -> bool:
        return not path.startswith("output")

    torchao.convert_to_float8_training(model, module_filter_fn=inner)


def context(name: str, quantized: bool, recipe: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context in which forward passes run.

    Args:
        name: of the library.
        quantized: in FP8.
        recipe: of TransformerEngine: `delayed`, `current` or `block` scaling.
    """
    if name != "te" or not quantized:
        return contextlib.nullcontext
    te = importlib.import_module("transformer_engine.pytorch")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    made = {
        "delayed": lambda: recipes.DelayedScaling(amax_history_len=1024, amax_compute_algo="max"),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[recipe]()
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=made)


def clear_workspaces(model: nn.Module) -> int:
    """What NeMo-RL's `force_clear_fp8_caches` does: empty `_fp8_workspaces` of each module.

    Returns:
        how many quantized weights were released.
    """
    cleared = 0
    for module in model.modules():
        cached = getattr(module, "_fp8_workspaces", None)
        if cached:
            cleared += len(cached)
            cached.clear()
    return cleared
