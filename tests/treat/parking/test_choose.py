"""What is chosen to be parked: storages once, by owner; wrappers stand for the tensors inside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtriage.treat.parking.choose import choose, inner_tensors, is_optimizer
from memtriage.treat.parking.handle import ParkError
from support.parking import Declared, Hollow


class Tagged(Tensor):
    """A subclass with bytes of its own, which has another tensor as an attribute."""


def same(found: list[Tensor], *expected: Tensor) -> bool:
    return [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_a_tensor_with_bytes_of_its_own_stands_for_itself() -> None:
    plain, parameter = torch.ones(3), nn.Parameter(torch.ones(3))
    tagged = torch.ones(3).as_subclass(Tagged)
    tagged.scale = torch.ones(1)  # type: ignore[attr-defined]
    empty = torch.ones(0).as_subclass(Tagged)
    empty.scale = torch.ones(1)  # type: ignore[attr-defined]
    for tensor in (plain, parameter, tagged, empty):
        assert same(inner_tensors(tensor), tensor)


def test_a_wrapper_stands_for_the_tensors_inside() -> None:
    part, scale, other = torch.ones(3), torch.ones(1), torch.ones(1)
    assert same(inner_tensors(Hollow(part, scale)), part, scale)
    assert same(inner_tensors(Declared(part, scale)), part, scale)
    assert same(inner_tensors(Declared(Hollow(part, scale), other)), part, scale, other)


def test_storages_come_once_with_their_owner() -> None:
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    chosen = choose([model, model, model.weight, model.weight.view(-1)])
    assert len(chosen.storages) == 4  # two parameters, two gradients
    assert choose([model, "parameters"]).leaves == []
    assert len(choose([model, "parameters"]).storages) == 2
    assert len(choose([model, "gradients"]).leaves) == 2
    assert len(choose([optimizer]).storages) == 6  # two averages and a step each


def test_modules_are_those_whose_parameters_or_buffers_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert choose([model]).modules == [model, model[0]]
    assert choose([model, "buffers"]).modules == [model, model[0]]
    assert choose([model, "gradients"]).modules == []


def test_names_need_an_owner_and_must_be_known() -> None:
    with pytest.raises(ParkError, match="no owner is called 'weights'"):
        choose([nn.Linear(1, 1), "weights"])
    with pytest.raises(ParkError, match="parameters: which model or optimizer"):
        choose([torch.ones(1), "parameters"])


def test_optimizers_and_what_wraps_one() -> None:
    class Wrapped:
        param_groups: list[Any] = []

    assert is_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert is_optimizer(Wrapped()) and not is_optimizer(Wrapped) and not is_optimizer(torch.ones(1))


class Trainer:
    """What Megatron's optimizer is: one that keeps masters in lists of lists."""

    def __init__(self, masters: Any) -> None:
        self.param_groups: list[Any] = []
        self.shard_fp32_from_float16_groups = masters


def test_masters_are_found_in_nested_containers() -> None:
    masters = [[torch.ones(3), torch.ones(4)], ({"a": torch.ones(5)},)]
    assert len(choose([Trainer(masters)]).storages) == 3


def test_containers_that_hold_themselves_are_looked_through_once() -> None:
    masters: list[Any] = [torch.ones(3)]
    masters.append(masters)
    assert len(choose([Trainer(masters)]).storages) == 1


def test_what_cannot_be_parked_is_refused_by_name() -> None:
    with pytest.raises(ParkError, match=r"cannot park 3 \(int\)"):
        choose([3])
    assert choose([[3, torch.ones(2)]]).storages[0].owner == "tensor"  # in a container it is passed over


def test_every_kind_of_container_is_looked_through() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert len(choose([{"a": one}, (two,), iter([three])]).storages) == 3
    assert len(choose([one.untyped_storage(), one]).storages) == 1
    assert choose([one.untyped_storage()]).storages[0].owner == "storage"


def test_owners_and_names_of_what_was_found() -> None:
    model = nn.BatchNorm1d(2)
    model(torch.ones(3, 2)).sum().backward()
    model.weight.main_grad = torch.ones(2)  # type: ignore[assignment]
    titles = [chosen.title for chosen in choose([model]).storages]
    assert titles == [
        "parameter 'weight'", "gradient 'weight'", "gradient 'weight'", "parameter 'bias'", "gradient 'bias'",
        "buffer 'running_mean'", "buffer 'running_var'", "buffer 'num_batches_tracked'",
    ]  # fmt: skip
    assert [chosen.title for chosen in choose([torch.ones(1)]).storages] == ["tensor"]
    assert choose([model]).leaves == [model.weight, model.bias]


def test_parameters_of_an_optimizer_are_its_own_only_when_asked_for() -> None:
    weight = nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.Adam([weight, frozen])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert {chosen.owner for chosen in choose([optimizer]).storages} == {"optimizer state"}
    assert [chosen.title for chosen in choose([optimizer, "parameters"]).storages] == [
        "parameter 'group 0, 0'", "parameter 'group 0, 1'",
    ]  # fmt: skip
    assert choose([optimizer, "gradients"]).leaves == [weight]
    assert choose([optimizer]).leaves == [] and choose([optimizer, "parameters"]).modules == []


def test_tensors_without_storage_are_passed_over() -> None:
    assert choose([torch.ones(2, device="meta"), torch.eye(2).to_sparse()]).storages == []
