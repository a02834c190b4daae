"""Parking without a GPU: a CPU "device" whose operations are counted, and fail where a test wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtriage.treat.parking.arena import Home
from memtriage.treat.parking.device import Spot, Ways


class Hollow(Tensor):
    """A wrapper of two tensors, as TransformerEngine's quantized ones are."""

    inner: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, scale: Tensor) -> Hollow:
        made: Hollow = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner, made.scale = inner, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(arg.inner * arg.scale if isinstance(arg, Hollow) else arg for arg in args))


class Declared(Hollow):
    """The same with torch's own way of telling, as torchao's are."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None


class Script:
    """What was done on all devices, in order; the operation of one number fails.

    Attributes:
        done: names of the operations.
        fails_at: number of the operation that fails; None for none.
        error: what it raises.
    """

    def __init__(self, fails_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.done: list[str] = []
        self.fails_at = fails_at
        self.error = error

    def ways(self, device: torch.device) -> ScriptedWays:
        """Pass this as `find_ways`."""
        return ScriptedWays(device, self)

    def step(self, name: str) -> None:
        """One operation begins."""
        self.done.append(name)
        if len(self.done) - 1 == self.fails_at:
            self.fails_at = None
            raise self.error(f"{name} fails")


class ScriptedWays(Ways):
    """Copies take effect at the next synchronization, by which a real device has finished them."""

    def __init__(self, device: torch.device, script: Script) -> None:
        super().__init__(device)
        self._script = script
        self._begun: list[tuple[str, torch.UntypedStorage, Home]] = []

    def look(self, storages: Sequence[torch.UntypedStorage], *, graphs: bool) -> list[Spot]:
        self._script.step("look")
        return super().look(storages, graphs=graphs)

    def synchronize(self) -> None:
        self._script.step("synchronize")
        begun, self._begun = self._begun, []
        for way, storage, home in begun:
            (super().down if way == "down" else super().up)(storage, home)

    def resize(self, storage: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        self._script.step("resize")
        super().resize(storage, nbytes, stream)

    def down(self, storage: torch.UntypedStorage, home: Home) -> None:
        self._script.step("down")
        self._begun.append(("down", storage, home))

    def up(self, storage: torch.UntypedStorage, home: Home) -> None:
        self._script.step("up")
        self._begun.append(("up", storage, home))

    def release(self) -> None:
        self._script.step("release")
