"""What a step draws at random, and the numbers that follow from it, to draw them again without a trace.

A router's choices are drawn, and how many tokens each expert gets follows from them. The operators between
are kept with their arguments on the host, so that they can be run on other draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch

from memtriage.prediction.operators import Kwargs, mapped, tensors_in

aten: Final = torch.ops.aten
READ_AT_MOST: Final = 4096
"""Elements of a tensor that a program copies to the host of which each may be a size."""


class ChangedError(Exception):
    """Other draws cannot be followed: a tensor has another shape by them, on which others depend."""


@dataclass(frozen=True, slots=True)
class _HostCall:
    func: Any
    args: Any
    kwargs: Kwargs
    results: list[torch.Tensor]
    draws: bool


@dataclass(frozen=True, slots=True)
class _Number:
    """What a program may use as a size: the first dimension of a tensor, or each of its elements, and each
    difference between neighbours, which may be the ends of slices."""

    tensor: torch.Tensor
    is_size: bool

    def values(self, tensor: torch.Tensor) -> list[int]:
        if self.is_size:
            return [tensor.shape[0]]
        elements = [int(value) for value in tensor.flatten().tolist()]
        return [*elements, *(after - before for before, after in pairwise(elements))]


@dataclass(frozen=True, slots=True)
class _Scores:
    drawn: torch.Tensor
    chances: torch.Tensor | None


def scores(shape: Sequence[int], chances: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """Draw values from 0 to 1 for unknown ones, of which the largest in each row will be chosen.

    Args:
        chances: how likely each column is chosen; the sum is how many are. None: all are equally likely.

    The chosen ones are a systematic sample of the columns in random order: the ends of their chances, laid
    one after the other from a random place, are in another whole number. It has exactly these chances;
    drawing one after the other in proportion to them would flatten them.
    """
    drawn = torch.rand(shape, generator=generator)
    if chances is None:
        return drawn
    order = drawn.argsort(-1)
    begins = torch.rand((*shape[:-1], 1), generator=generator, dtype=chances.dtype)
    ends = torch.cat([begins, begins + chances[order].cumsum(-1)], -1)
    chosen = ends.floor().diff() > 0
    return (drawn + torch.zeros(shape).scatter_(-1, order, chosen.float())) / 2


@dataclass(slots=True)
class StepDraws:
    """The draws of one step.

    Attributes:
        numbers: those that follow from what was drawn, in the order in which the program asked for them.
    """

    numbers: list[int] = field(default_factory=list)
    _asked: list[_Number] = field(default_factory=list)
    _calls: list[_HostCall] = field(default_factory=list)
    _at_first: dict[int, torch.Tensor] = field(default_factory=dict)  # by storage that is written later
    _drawn: dict[int, _Scores] = field(default_factory=dict)  # stand for unknown values, by storage
    _follow: dict[int, torch.Tensor] = field(default_factory=dict)  # hold what follows from draws, likewise

    def draw(self, tensor: torch.Tensor, chances: torch.Tensor | None = None) -> torch.Tensor:
        """Note that the values of a tensor were drawn for unknown ones, by `scores`."""
        self._drawn[tensor.untyped_storage()._cdata] = _Scores(tensor, chances)
        return tensor

    def call(self, func: Any, args: Any, kwargs: Kwargs, draws: bool) -> Any:
        """Run an operator on the host, and keep it if it draws, or works on what was drawn."""
        given = tensors_in(args, kwargs)
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in given}
        known = [storage in self._follow or storage in self._drawn for storage in storages]
        if not draws and not any(known):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            for is_known, (storage, tensor) in zip(known, storages.items(), strict=True):
                if not is_known:
                    self._at_first[storage] = _whole(tensor).clone()
                    self._follow[storage] = tensor
        result = func(*args, **kwargs)
        results = tensors_in(result)
        self._calls.append(_HostCall(func, args, kwargs, results, draws))
        self._follow.update((tensor.untyped_storage()._cdata, tensor) for tensor in results)
        return result

    def ask(self, tensor: torch.Tensor, is_size: bool = False) -> None:
        """Note that the program asks for the size of a tensor, or reads its elements."""
        if tensor.untyped_storage()._cdata not in self._follow or tensor.is_floating_point():
            return
        if is_size or tensor.numel() <= READ_AT_MOST:
            if not is_size:  # the program may write to it later
                tensor = self.call(aten.clone.default, (tensor,), {}, draws=False)
            number = _Number(tensor, is_size)
            self._asked.append(number)
            self.numbers.extend(number.values(tensor))

    def again(self, wanted: Set[int]) -> Callable[[torch.Generator], list[int]]:
        """What draws again: it returns the numbers that follow, 0 for those whose places are not wanted.

        It raises `ChangedError` where they cannot be followed.
        """
        asked: list[tuple[_Number, int, bool]] = []
        place = 0
        for number in self._asked:
            count = len(number.values(number.tensor))
            asked.append((number, count, not wanted.isdisjoint(range(place, place + count))))
            place += count
        calls = self._needed([number.tensor for number, _, is_wanted in asked if is_wanted])

        def drawn(generator: torch.Generator) -> list[int]:
            values = _Redrawn(self._drawn, self._at_first, generator)
            for call in calls:
                values.run(call)
            numbers: list[int] = []
            for number, count, is_wanted in asked:
                numbers.extend(values.number(number) if is_wanted else [0] * count)
            return numbers

        return drawn

    def _needed(self, tensors: list[torch.Tensor]) -> list[_HostCall]:
        """The calls that tensors follow from, in order."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        needed = []
        for call in reversed(self._calls):
            if any(result.untyped_storage()._cdata in storages for result in call.results):
                needed.append(call)
                given = tensors_in(call.args, call.kwargs)
                storages.update(tensor.untyped_storage()._cdata for tensor in given)
        return needed[::-1]


class _Redrawn:
    """Tensors that follow from other draws, by the storage of those that they replace."""

    def __init__(
        self, drawn: Mapping[int, _Scores], at_first: Mapping[int, torch.Tensor], generator: torch.Generator
    ) -> None:
        self._drawn = drawn
        self._at_first = at_first
        self._generator = generator
        self._made: dict[int, torch.Tensor] = {}

    def run(self, call: _HostCall) -> None:
        args, kwargs = mapped(call.args, self._of), mapped(call.kwargs, self._of)
        if call.draws:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator.get_state())
                result = call.func(*args, **kwargs)
                self._generator.set_state(torch.get_rng_state())
        else:
            result = call.func(*args, **kwargs)
        for before, now in zip(call.results, tensors_in(result), strict=True):
            self._made[before.untyped_storage()._cdata] = now

    def number(self, number: _Number) -> list[int]:
        if number.is_size:
            return number.values(self._made[number.tensor.untyped_storage()._cdata])
        return number.values(self._of(number.tensor))

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        made = self._made.get(storage)
        if made is None:
            if storage in self._drawn:
                first = self._drawn[storage]
                made = scores(first.drawn.shape, first.chances, self._generator)
            elif storage in self._at_first:
                made = self._at_first[storage].clone()
            else:
                return tensor
            self._made[storage] = made
        if made.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            raise ChangedError
        return _whole(made, tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Draws:
    """The draws of each step; only of the last one they can be drawn again."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._numbers: dict[int, list[int]] = {}
        self.last = StepDraws()

    def now(self) -> StepDraws:
        """Those of the current step."""
        step = self._step()
        if step not in self._numbers:
            self.last = StepDraws()
            self._numbers[step] = self.last.numbers
        return self.last

    def numbers(self, step: int) -> list[int]:
        """The numbers that follow from the draws of a step."""
        return self._numbers.get(step, [])


def _whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of a tensor's storage, as a vector."""
    whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
    return whole.view(dtype or tensor.dtype)
