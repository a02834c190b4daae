"""When optimizers make their states: the context is there for that, once, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from memtriage.observe.states import Around, StateMaking, parameter_bytes


class Watched:
    """Notes when contexts are entered, left and over."""

    def __init__(self, optimizers: int) -> None:
        self.seen: list[str] = []
        self.left = optimizers
        self.making = StateMaking(self.begins, self.ends)

    def begins(self, optimizer: Any) -> Around | None:
        self.seen.append("begins")
        return self.around

    def around(self) -> AbstractContextManager[None]:
        @contextmanager
        def context() -> Iterator[None]:
            self.seen.append("in")
            yield
            self.seen.append("out")

        return context()

    def ends(self) -> None:
        self.seen.append("ends")
        self.left -= 1
        if not self.left:
            self.making.remove()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched(1)
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    watched.making.install()
    yield watched
    watched.making.remove()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def weights(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def test_each_group_is_made_inside_and_then_all_is_as_before(watched: Watched) -> None:
    first, second = weights(3, 5)
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second]}])
    step(optimizer)
    assert watched.seen == ["begins", "in", "out", "in", "out", "ends"]
    assert "_init_group" not in vars(optimizer)
    assert optimizer.state[second]["exp_avg"].shape == (5,)
    step(optimizer)
    step(torch.optim.AdamW(weights(2)))  # the hook is gone
    assert watched.seen.count("begins") == 1


def test_nothing_else_of_the_step_is_inside(watched: Watched) -> None:
    class Noted(torch.optim.AdamW):
        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            watched.seen.append("states")
            return super()._init_group(*args, **kwargs)

        def zero_grad(self, set_to_none: bool = True) -> None:
            watched.seen.append("zeroed")

    optimizer = Noted(weights(3))
    step(optimizer)
    optimizer.zero_grad()
    assert watched.seen == ["begins", "in", "states", "out", "ends", "zeroed"]


def test_states_that_are_there_are_not_made_again(watched: Watched) -> None:
    made = torch.optim.AdamW(parameters := weights(3))
    watched.making.remove()
    step(made)
    watched.making.install()
    loaded = torch.optim.AdamW(parameters)
    loaded.load_state_dict(made.state_dict())
    step(loaded)
    assert watched.seen == []


def test_a_step_that_fails_is_made_again(watched: Watched) -> None:
    class Fails(torch.optim.AdamW):
        fails = True

        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails:
                raise RuntimeError("no memory")
            return super()._init_group(*args, **kwargs)

    watched.left = 2
    optimizer = Fails(weights(3))
    with pytest.raises(RuntimeError, match="no memory"):
        step(optimizer)
    optimizer.fails = False
    step(optimizer)
    assert watched.seen == ["begins", "in", "ends", "begins", "in", "out", "ends"]
    assert "_init_group" not in vars(optimizer)


def test_an_optimizer_without_such_a_method_is_left_alone(watched: Watched) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(weights(3), {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    step(Own())
    assert watched.seen == []


def test_bytes_of_parameters() -> None:
    parameters = [*weights(3, 5), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    assert parameter_bytes(torch.optim.AdamW(parameters)) == 4 * 8 + 2 * 4
