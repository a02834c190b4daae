"""What each storage is: declared by modules and optimizers, else told by its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from memtriage.account.ownership import PRIORITY, RANK
from memtriage.model.census import Owner
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()

PRELUDE = """
import functools
import torch
from torch import nn

def T(n=100):
    return made(torch.ones(n))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 10, bias=False)
        self.out = nn.Linear(10, 10, bias=False)
        self.out.weight = self.fc.weight
    def forward(self, x):
        return self.out(self.fc(x))

model = Net()
adam = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 10)).sum().backward()
adam.step()

class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
    def __init__(self, data, scale):
        self.packed, self.scale = data, scale
    def __tensor_flatten__(self):
        return ['packed', 'scale'], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(func)

class ShardedFooOptimizer:
    '''Shaped like DeepSpeed's: flat master weights in lists, a torch optimizer inside, properties.'''
    def __init__(self, model_parameters):
        self.bit16_groups = [list(model_parameters)]
        self.fp32_groups = [T(), T()]
        self.averaged_gradients = {0: [T()]}
        self.optimizer = torch.optim.AdamW(self.fp32_groups)
    @property
    def param_groups(self):
        raise RuntimeError('not now')
    state = param_groups
    def step(self): pass
    def zero_grad(self): pass

class Quantized:
    '''Only duck-types as a tensor.'''
    def __init__(self):
        self._data, self._scale_inv = T(), T(1)

class Stash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = T()
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g
"""

CASES: dict[str, tuple[str, Owner]] = {
    "tied weight": ("made(model.fc.weight)", "parameter"),
    "weight in a state dict": ("checkpoint = made(model.fc.weight.detach())", "parameter"),
    "gradient": ("made(model.fc.weight.grad)", "gradient"),
    "Adam's moments": (
        "made(adam.state[model.fc.weight]['exp_avg']); made(adam.state[model.fc.weight]['exp_avg_sq'])",
        "optimizer state",
    ),
    "parameter outside of a module": (
        "loose = nn.Parameter(T()); sgd = torch.optim.SGD([loose], momentum=0.9)",
        "parameter",
    ),
    "momentum": (
        "loose.sum().backward(); sgd.step(); made(sgd.state[loose]['momentum_buffer'])",
        "optimizer state",
    ),
    "flat parameters": (
        "flat = T(200); flattened = nn.Module()\n"
        "flattened.a, flattened.b = nn.Parameter(flat[:100]), nn.Parameter(flat[100:])",
        "parameter",
    ),
    "flat gradients": (
        "flat_grad = T(200); flattened.a.grad, flattened.b.grad = flat_grad[:100], flat_grad[100:]",
        "gradient",
    ),
    "buffer": ("model.register_buffer('mask', T())", "buffer"),
    "buffer that is not saved": ("model.register_buffer('tmp', T(), persistent=False)", "buffer"),
    "plain attribute of a module": ("model.plain = T()", "variable"),
    "master weights of a wrapper": (
        "sharded = ShardedFooOptimizer(flattened.parameters())",
        "optimizer state",
    ),
    "retained gradient": (
        "out = torch.ones(100, requires_grad=True) * 2; out.retain_grad()\n"
        "out.sum().backward(); made(out.grad)",
        "gradient",
    ),
    "sparse gradient": (
        "embedding = nn.Embedding(9, 9, sparse=True); embedding(torch.tensor([1])).sum().backward()\n"
        "made(embedding.weight.grad._values())",
        "gradient",
    ),
    "saved and a variable": (
        "act = made(torch.ones(100, requires_grad=True).exp()); loss = act.sum()",
        "saved for backward",
    ),
    "context": ("stashed = Stash.apply(torch.ones(9, requires_grad=True))", "autograd context"),
    "cache": ("@functools.lru_cache\ndef table(n): return T()\ntable(1)", "known cache"),
    "variable": ("var = T()", "variable"),
    "average copy": ("ema = [made(t.detach().clone()) for t in model.parameters()]", "variable"),
    "parameter of a subclass": (
        "model.packed = nn.Parameter(Wrapped(T(), T(1)), requires_grad=False)",
        "parameter",
    ),
    "buffer of a subclass": ("model.register_buffer('wrapped', Wrapped(T(), T(1)))", "buffer"),
    "quantized objects": ("weights = [Quantized() for _ in range(2)]", "variable"),
}


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
