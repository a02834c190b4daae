"""Real values of small tensors, so that programs which look at data take the path that they would take.

Tensors on the device have no data in a trace. Where a value follows from what the program itself wrote down
(indices, masks, lengths, labels drawn at random) the operators are run on the host as well. Values
that come out of the network are unknown; a router's choices among experts are drawn at random, as those of a
freshly initialized network are, or as they were recorded.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.drawn import Draws, scores
from memtriage.prediction.operators import FUNCTIONAL_COLLECTIVES, Args, Kwargs, mapped, tensors_in
from memtriage.prediction.routing import Routing

aten: Final = torch.ops.aten

INTEGER_LIMIT: Final = 1 << 22
"""Largest tensor whose values are followed, in elements: a mask of 2048 by 2048."""
FLOAT_LIMIT: Final = 1 << 16
"""The same of floating-point numbers: tables of positions, step counts."""
DRAWN_LIMIT: Final = 1 << 22
"""Largest tensor of unknown values over which a choice (top-k, arg-max) is drawn at random, in elements."""

DRAWS: Final = frozenset(
    {
        aten.randint.default,
        aten.randint.low,
        aten.rand.default,
        aten.randn.default,
        aten.randperm.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.rand_like.default,
        aten.randn_like.default,
    }
)
CHOICES: Final = frozenset(
    {
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.argsort.stable,
        aten.argmax.default,
        aten.argmin.default,
        aten.max.dim,
        aten.min.dim,
        aten.multinomial.default,
    }
)
FINITE: Final = {aten.isfinite.default: True, aten.isnan.default: False, aten.isinf.default: False}
UNINITIALIZED: Final = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})


class KnownValues:
    """Host copies of device storages whose contents are known, by storage.

    Attributes:
        generator: of what is drawn. What checkpointing computes again, it draws again: it restores the state.
        draws: what is drawn in each step, where that is asked for.
        routing: how routers choose; None: each expert is equally likely.
    """

    draws: Draws | None = None
    routing: Routing | None = None

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def forget(self, identity: int) -> None:
        """The storage is gone, or was overwritten by something unknown."""
        self._known.pop(identity, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values on the host (a view: writing to it writes the known values); None: unknown."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = self._known.get(tensor.untyped_storage()._cdata)
        if flat is None:
            return None
        try:
            return flat.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        except RuntimeError:  # another element size than the values were noted with
            return None

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the values of a tensor that has its storage for itself."""
        limit = FLOAT_LIMIT if tensor.is_floating_point() else INTEGER_LIMIT
        size = tensor.untyped_storage().nbytes()
        if not 0 < tensor.numel() <= limit or size != tensor.numel() * tensor.element_size():
            return
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        self.run(aten.copy_.default, (view, value))
        self._known[tensor.untyped_storage()._cdata] = flat

    def run(self, func: Any, args: Args, kwargs: Kwargs | None = None, draws: bool = False) -> Any:
        """Run an operator on the host, as one of the current step's draws if it draws or works on such."""
        if self.draws is None:
            return func(*args, **(kwargs or {}))
        return self.draws.now().call(func, args, kwargs or {}, draws)

    def ask(self, tensor: torch.Tensor, is_size: bool = False) -> None:
        """Note that the program asks for the size of a tensor of the host, or reads its elements."""
        if self.draws is not None:
            self.draws.now().ask(tensor, is_size)

    def compute(self, func: Any, args: Any, kwargs: Kwargs) -> Any:
        """The operator's result on known values; None when an input is unknown or too large to follow."""
        if func in UNINITIALIZED:
            return None
        if func in FINITE:
            return torch.full(args[0].shape, FINITE[func])
        real = _ValueReader(
            self, func in CHOICES, _chosen_of_each(args) if func is aten.topk.default else None
        )
        real_args, real_kwargs = mapped(args, real.read), mapped(kwargs, real.read)
        if real.missing:
            return None
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        if func in DRAWS:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.generator.get_state())
                drawn = self._tried(func, real_args, real_kwargs, draws=True)
                self.generator.set_state(torch.get_rng_state())
            return drawn
        result = self._tried(func, real_args, real_kwargs)
        if func.namespace == FUNCTIONAL_COLLECTIVES:
            for tensor in tensors_in(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
        return result

    def _tried(self, func: Any, args: Any, kwargs: Kwargs, draws: bool = False) -> Any:
        """Run an operator on the host; None where the host cannot."""
        try:
            return self.run(func, args, kwargs, draws)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            return None


class _ValueReader:
    def __init__(self, values: KnownValues, draws: bool, chosen: int | None) -> None:
        self._values, self._draws, self._chosen = values, draws, chosen
        self.missing = False

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        from memtriage.prediction.fake_cuda.tensors import true_device

        if true_device(tensor).type == "cpu":
            return tensor
        values, chances = self._values, None
        if values.routing is not None and self._chosen is not None and tensor.is_floating_point():
            chances = values.routing.chances(tensor, self._chosen, values.generator.get_state())
        known = values.of(tensor) if chances is None else None
        if known is not None:
            return known
        if self._draws and tensor.numel() <= DRAWN_LIMIT and tensor.is_floating_point():
            drawn = scores(tensor.shape, chances, values.generator)
            return drawn if values.draws is None else values.draws.now().draw(drawn, chances)
        self.missing = True
        return tensor


def _chosen_of_each(args: Any) -> int | None:
    """How many columns of each row a top-k chooses; None if it chooses rows."""
    tensor, chosen, dim = (*args, -1)[:3]
    return int(chosen) if dim in (-1, tensor.dim() - 1) else None
