"""Decide which calls of optimizers complete a step, by the pattern in which optimizers alternate.

One iteration of a training loop may step several optimizers, each after its own backward: those of a
discriminator and a generator, or of an actor and a critic. That is one step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memtriage.observe.classes import instance_dict


@dataclass(frozen=True, slots=True)
class StepPatternPolicy:
    """Thresholds of the pattern.

    Attributes:
        alternating: most optimizers that alternate in one iteration, each after its own backward. If there
            are more, they never come again: a search makes one for each model, and keeps them.
        rounds: after this many steps without a new optimizer, an unknown one begins a separate iteration: it
            is of the next model of a search, and the previous model's optimizer is still alive.
    """

    alternating: int = 8
    rounds: int = 2


POLICY: Final = StepPatternPolicy()


@dataclass(frozen=True, slots=True)
class Stepped:
    """An optimizer that has stepped, recognized later without being kept alive.

    Attributes:
        ref: weak reference to the optimizer.
        trains: addresses of its first and last parameter, and how many there are: a new optimizer for the
            same parameters replaces the previous one. None if the optimizer does not say.
    """

    ref: weakref.ref[Any]
    trains: Hashable | None


def stepped(optimizer: object) -> Stepped:
    """Note an optimizer that has just stepped. No code of a subclass runs; nothing is kept alive."""
    groups = (instance_dict(optimizer) or {}).get("param_groups")
    if type(groups) is not list:
        return Stepped(weakref.ref(optimizer), None)
    lists = [group.get("params") for group in groups if type(group) is dict]
    parameters = [listed for listed in lists if type(listed) is list and listed]
    if not parameters:
        return Stepped(weakref.ref(optimizer), None)
    trains = id(parameters[0][0]), id(parameters[-1][-1]), sum(map(len, parameters))
    return Stepped(weakref.ref(optimizer), trains)


class StepPattern:
    """Decides which call of an optimizer completes a step.

    A step is complete when an optimizer steps that completed the last step, or has stepped since: a new
    iteration has begun. So the optimizer that steps most often counts. An optimizer that has not stepped
    since then belongs to the same iteration, with two exceptions: none of those that have stepped is still
    alive, or it is new and the loop has already repeated without it. When more optimizers than can alternate
    have stepped, none of them twice, each new one is a separate iteration, until one comes again. Optimizers
    that step one after another without a backward in between make at most one step. If no backward is ever
    seen (`torch.autograd.grad`), it is enough that an optimizer comes again.
    """

    def __init__(self) -> None:
        self._since: dict[int, weakref.ref[Any]] = {}  # by address, to be checked against the reference
        self._trained: set[Hashable] = set()
        self._sees_backwards = False
        self._backward_since = False  # since the last call of an optimizer
        self._alternating = 0
        self._counted = False
        self._never_again = False  # more came than can alternate, none of them twice
        self._latest: deque[Stepped] = deque(maxlen=POLICY.alternating)
        self._rounds = 0  # steps since an optimizer came for the first time, its own included

    @property
    def counted_latest(self) -> bool:
        """Whether a step was counted, and no backward has come since an optimizer last stepped."""
        return self._counted and not self._backward_since

    def backward_completes(self) -> None:
        """Note a complete backward, also of a closure."""
        self._sees_backwards = self._backward_since = True

    def step(self, group: Sequence[Stepped]) -> bool:
        """Return whether this completes a step.

        Args:
            group: the optimizers that have stepped, at once or inside one backward.
        """
        worked, self._backward_since = self._backward_since, False
        new = not any(map(self._is_known, group))
        again = any(map(self._came_before, group))
        self._never_again = not again and (self._never_again or self._alternating >= POLICY.alternating)
        begins_anew = new and (self._rounds >= POLICY.rounds or self._never_again)
        comes_round = (
            again
            or all(ref() is None for ref in self._since.values())
            or self._alternating >= POLICY.alternating
        )
        completes = (worked or not self._sees_backwards) and (comes_round or begins_anew)
        if new:
            self._rounds = 0
        if completes:
            self._counted = True
            self._alternating = 0
            self._rounds += 1
        elif worked:
            self._alternating += 1
        if completes and comes_round:
            self._since.clear()
            self._trained.clear()
        for stepped in group:
            self._since[id(stepped.ref())] = stepped.ref
            if stepped.trains is not None:
                self._trained.add(stepped.trains)
        if new:
            self._latest.extend(group)
        return completes

    def _is_known(self, stepped: Stepped) -> bool:
        optimizer = stepped.ref()
        return any(
            known.ref() is optimizer or (stepped.trains is not None and known.trains == stepped.trains)
            for known in self._latest
        )

    def _came_before(self, stepped: Stepped) -> bool:
        if stepped.trains in self._trained:
            return True
        optimizer = stepped.ref()
        known = self._since.get(id(optimizer))
        return known is not None and known() is optimizer is not None
