"""Counts the floating-point operations of a traced step."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Work(TorchDispatchMode):  # type: ignore[misc]
    """Adds up matrix products, convolutions and attention, by torch's own formulas.

    Attributes:
        flops: operations so far.
        uncounted: operators whose formula does not know the shapes that were met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.uncounted: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except AssertionError:  # torch's formula of attention expects as many key heads as query heads
                self.uncounted.add(str(func._overloadpacket))
        return result
