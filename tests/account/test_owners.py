"""What each storage is: declared by modules and optimizers, else told by its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from memtriage.account.ownership import PRIORITY, RANK
from memtriage.model.census import Owner
from support.owner_cases import CASES, PRELUDE
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()


@pytest.fixture(scope="module")
def owners(gallery: Callable[..., Any]) -> Any:
    return gallery({case: source for case, (source, _) in CASES.items()}, PRELUDE)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=shown if CASES[case][1] == "saved for backward" else ()) for case in CASES],
)
def test_owner(owners: Any, case: str) -> None:
    assert owners.owners(case) == {CASES[case][1]}


def test_every_storage_is_counted_once(owners: Any) -> None:
    records = owners.records("parameter of a subclass")
    assert sorted(record.nbytes for record in records) == [4, 400]
    assert {record.holder for record in records} == {"train.model.packed.packed", "train.model.packed.scale"}
    places = [(record.device, record.address) for record in owners.census.storages]
    assert len(places) == len(set(places))
    assert (
        sum(len(owners.records(case)) for case in ("tied weight", "weight in a state dict")) == 2
    )  # noted twice
    assert {record.address for record in owners.records("tied weight")} == {
        record.address for record in owners.records("weight in a state dict")
    }


def test_groups_sum_to_the_storages(owners: Any) -> None:
    census = owners.census
    assert sum(group.nbytes for group in census.groups) == sum(record.nbytes for record in census.storages)
    for group in census.groups:
        assert sum(group.by_path.values()) == sum(group.owners.values()) == group.nbytes
    sizes = [group.nbytes for group in census.groups]
    assert sizes == sorted(sizes, reverse=True)


def test_quantized_objects_are_named(owners: Any) -> None:
    assert owners.holders("quantized objects") == {"train.weights[*]._data", "train.weights[*]._scale_inv"}


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_what_they_stand_for(program: Any, mesh: Any) -> None:
    program.module.mesh = mesh
    program.run(
        """
        import torch
        from torch import nn
        from torch.distributed.tensor import Shard, distribute_tensor

        def shard(case):
            tensor = distribute_tensor(torch.ones(10, 10), mesh, [Shard(0)])
            made(tensor.to_local(), case)
            return tensor

        linear = nn.Linear(10, 10, bias=False)
        linear.weight = nn.Parameter(shard('parameter'))
        linear.weight.grad = shard('gradient')
        adam = torch.optim.AdamW(linear.parameters())
        adam.step()
        made(adam.state[linear.weight]['exp_avg'].to_local(), 'optimizer state')
        kept = [shard('variable')]
        """
    )
    program.look()
    owners = ("parameter", "gradient", "optimizer state", "variable")
    assert {case: program.owners(case) for case in owners} == {case: {case} for case in owners}
    assert program.holders("parameter") == {"train.linear.weight._local_tensor"}
    assert program.holders("variable") == {"train.kept[*]._local_tensor"}


def test_garbage_is_called_garbage(program: Any) -> None:
    program.run(
        """
        import gc, torch
        class Node:
            def __init__(self):
                self.me, self.t = self, made(torch.ones(100))
        gc.disable()
        Node()
        look()
        gc.enable()
        """
    )
    assert program.owners() == {"garbage"}


def test_every_owner_has_a_rank() -> None:
    assert set(PRIORITY) == set(get_args(Owner)) == set(RANK)
