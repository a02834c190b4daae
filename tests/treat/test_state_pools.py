"""Pools for the states of optimizers: which optimizer gets one, and that nothing of it is left."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from memtriage.model.priming import StatePool
from memtriage.treat.state_pools import StatePools

MIB = 1 << 20


class Pool:
    """A pool that is only a size."""

    def __init__(self, size: int) -> None:
        self.size = size


class StandIn:
    """Makes pools, and notes which."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.made: list[int] = []
        self.entered: list[int] = []

    def make(self, size: int) -> Any:
        if size > self.capacity:
            return None
        self.made.append(size)
        return Pool(size)

    def inside(self, pool: Any) -> AbstractContextManager[object]:
        @contextmanager
        def context() -> Iterator[None]:
            self.entered.append(pool.size)
            yield

        return context()


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    yield
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def trained(width: int, steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, width)).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pool(width: int, size: int) -> StatePool:
    return StatePool(size=size, parameters=4 * width * width)


def test_the_states_of_an_optimizer_that_was_predicted_are_made_in_its_pool() -> None:
    plain = trained(8)
    source = StandIn()
    pools = StatePools([pool(8, 20 * MIB)], source)
    pools.install()
    assert trained(8) == plain
    assert (source.made, source.entered) == ([20 * MIB], [20 * MIB])
    trained(8)
    assert source.made == [20 * MIB]


def test_each_optimizer_has_its_own_whatever_their_order() -> None:
    source = StandIn()
    StatePools([pool(8, 20 * MIB), pool(16, 30 * MIB)], source).install()
    trained(16)
    trained(8)
    assert source.made == source.entered == [30 * MIB, 20 * MIB]


def test_another_optimizer_gets_none() -> None:
    source = StandIn()
    pools = StatePools([pool(8, 20 * MIB)], source)
    pools.install()
    trained(4)
    assert source.made == []
    pools.remove()


def test_without_memory_for_a_pool_states_are_made_as_ever() -> None:
    source = StandIn(capacity=10 * MIB)
    StatePools([pool(8, 20 * MIB)], source).install()
    assert trained(8) == trained(8)
    assert (source.made, source.entered) == ([], [])


def test_a_pool_is_dropped_when_the_states_are_made() -> None:
    alive: list[weakref.ref[Pool]] = []

    class Weak(StandIn):
        def make(self, size: int) -> Any:
            made = super().make(size)
            alive.append(weakref.ref(made))
            return made

    StatePools([pool(8, 20 * MIB)], Weak()).install()
    trained(8, steps=1)
    assert [reference() for reference in alive] == [None]
