"""Which module an allocation belongs to, in forward and in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from memtriage.prediction.places import Places, module_names


class Noting(nn.Module):
    """Notes an allocation in its forward, and one in its backward."""

    def __init__(self, places: Places, block: int) -> None:
        super().__init__()
        self.places, self.block = places, block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        self.places.note(self.block)
        y.grad_fn.register_prehook(lambda grads: self.places.note(self.block + 100))  # type: ignore[union-attr]
        return y


def test_modules_are_called_by_their_paths() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    names = module_names([model])
    assert [names[module] for module in model.modules()] == ["(Sequential)", "0", "1", "1.0"]
    other = nn.Linear(1, 1)
    names = module_names([model, other])
    assert [names[module] for module in model.modules()] == [
        "(Sequential)", "Sequential.0", "Sequential.1", "Sequential.1.0",
    ]  # fmt: skip
    assert names[other] == "(Linear)"


def test_a_module_of_two_models_has_its_first_name() -> None:
    shared = nn.Linear(1, 1)
    names = module_names([nn.Sequential(shared), nn.ModuleList([shared])])
    assert names[shared] == "Sequential.0"


def test_allocations_belong_to_the_module_that_runs_or_whose_backward_does() -> None:
    places = Places()
    model = nn.Sequential(Noting(places, 1), nn.Sequential(Noting(places, 2)), Noting(places, 3))
    places.names.update(module_names([model]))
    x = torch.ones(1, requires_grad=True)
    places.note(0)
    loss = model(x)
    places.note(4)
    loss.backward()
    assert places.of == {1: "0", 2: "1.0", 3: "2", 101: "0", 102: "1.0", 103: "2"}


def test_modules_that_are_not_known_are_named_when_they_are_called() -> None:
    places = Places()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Noting(places, 1)
            self.hidden: Any = [Noting(places, 2)]  # no submodule

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](self.inner(x))

    Outer()(torch.ones(1, requires_grad=True))
    assert places.of == {1: "inner", 2: "(Outer).(Noting)"}


def test_a_module_that_fails_is_left() -> None:
    places = Places()

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    try:
        Failing()(torch.ones(1))
    except ValueError:
        places.note(1)
    assert places.of == {}


def test_the_line_is_that_of_the_program_and_in_backward_that_of_the_node() -> None:
    places = Places()
    model = nn.Sequential(Noting(places, 1), Noting(places, 2))
    model(torch.ones(1, requires_grad=True)).backward()
    source = [line.strip() for line in Path(__file__).read_text().splitlines()]
    line = 1 + source.index("self.places.note(self.block)")
    made = f"{Path(__file__).relative_to(Path.cwd())}:{line} in forward"
    assert places.sites == dict.fromkeys((1, 2, 101, 102), made)


def test_what_a_model_was_given_is_described() -> None:
    places = Places()

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            places.note(1)
            return x

    Model()(torch.ones(2, 3), mask=torch.ones(2, dtype=torch.bool), scale=2, layers=[torch.ones(())])
    assert places.inputs == {"Model": "2x3 float32, mask 2 bool, layers scalar float32"}
