"""A parked tensor that is used says so; its description can still be read, and nothing of the guard stays."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memtriage
from memtriage.treat.parking.handle import ParkedError
from support.offload import group_of_one
from support.parking import Declared, Hollow

USES: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda t: t + 1,
    "of another tensor": lambda t: torch.ones(4, 4).mul_(t),
    "matrix product": lambda t: nn.functional.linear(torch.ones(2, 4), t),
    "a list": lambda t: torch._foreach_add_([torch.ones(4, 4), t], 1),
    "copy from": lambda t: torch.zeros(4, 4).copy_(t),
    "copy to": lambda t: t.copy_(torch.zeros(4, 4)),
    "in place": lambda t: t.zero_(),
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(-1),
    "index": lambda t: t[0],
    "data": lambda t: t.data,
    "setting data": lambda t: setattr(t, "data", torch.ones(4, 4)),
    "transpose": lambda t: t.T,
    "to": lambda t: t.to("cpu", torch.float64),
    "cpu": lambda t: t.cpu().clone(),
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "data_ptr": lambda t: t.data_ptr(),
    "truth": lambda t: bool(t),
    "iteration": lambda t: list(t),
    "stack": lambda t: torch.stack([t, t]),
    "out": lambda t: torch.add(torch.ones(4, 4), 1, out=t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "in a graph": lambda t: (t * 2).sum().backward(),
    "dlpack": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
@pytest.mark.parametrize("use", USES)
def test_a_use_raises(use: str, kind: type[Tensor]) -> None:
    tensor = torch.ones(4, 4) if kind is Tensor else nn.Parameter(torch.ones(4, 4))
    with memtriage.park(tensor), pytest.raises(ParkedError, match=r"tensor, which is parked: .*unpark\(\)"):
        USES[use](tensor)
    assert type(tensor) is kind
    assert torch.equal(tensor, torch.ones(4, 4))


def test_the_error_names_the_call_and_the_tensor() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with (
        memtriage.park(model),
        pytest.raises(ParkedError, match=r"^mul was called with parameter '0\.weight'"),
    ):
        model[0].weight * 2


def test_its_description_can_be_read() -> None:
    tensor = nn.Parameter(torch.ones(4, 6))
    tensor.grad = torch.zeros(4, 6)
    tensor.note = "kept"
    with memtriage.park(tensor):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((4, 6), torch.float32, "cpu")
        assert (tensor.numel(), tensor.stride(), tensor.dim(), len(tensor)) == (24, (6, 1), 2, 4)
        assert tensor.requires_grad and tensor.is_leaf and tensor.grad_fn is None
        assert torch.equal(tensor.grad, torch.zeros(4, 6))
        assert tensor.untyped_storage().nbytes() == 0
        assert isinstance(tensor, nn.Parameter) and isinstance(tensor, Tensor)
        assert {tensor: tensor.note} == {tensor: "kept"}
        assert "parked on the host: tensor" in repr(tensor)
        assert "parked" in f"{tensor}"
        tensor.grad = None
    assert tensor.grad is None


def test_forward_fails_before_it_has_begun() -> None:
    ran: list[int] = []

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.same = [self.weight.detach()]  # another object for the same bytes, that nobody was told of

        def forward(self, x: Tensor) -> Tensor:
            ran.append(1)
            return x * self.same[0]

    model = nn.Sequential(Custom())
    with memtriage.park(model), pytest.raises(ParkedError, match=r"the forward of Custom .*'0\.weight'"):
        model(torch.ones(3))
    assert not ran
    assert torch.equal(model(torch.ones(3)), torch.ones(3))
    assert not model[0]._forward_pre_hooks


def test_hooks_go_when_the_modules_own_tensors_are_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    memtriage.park(model)
    memtriage.unpark(model[0])
    assert [len(layer._forward_pre_hooks) for layer in model] == [0, 1]
    model[0](torch.ones(1, 2))
    memtriage.unpark(model)
    assert [len(layer._forward_pre_hooks) for layer in model] == [0, 0]


def test_parking_gradients_leaves_forward_alone() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with memtriage.park("gradients", model):
        model(torch.ones(1, 2))
        with pytest.raises(ParkedError, match=r"^backward was called with gradient '(weight|bias)'"):
            model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


def test_an_optimizer_with_parked_state_does_not_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weight = model.weight.detach().clone()
    with memtriage.park(optimizer), pytest.raises(ParkedError, match="optimizer state"):
        optimizer.step()
    assert torch.equal(model.weight, weight)


def test_object_kept_only_by_autograd_is_restored_when_seen() -> None:
    leaf = torch.ones(3, requires_grad=True)
    product = leaf.exp()
    memtriage.park(leaf)
    del leaf  # the graph's accumulation node has the tensor, and its Python object, for itself
    gc.collect()
    memtriage.unpark()
    product.sum().backward()
    node = product.grad_fn
    assert node is not None
    found = node.next_functions[0][0].variable
    assert torch.equal(found.grad, torch.ones(3).exp())
    assert type(found) is Tensor


def test_a_model_with_a_parked_part_can_be_looked_at() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with memtriage.park(model[0]):
        assert sum(parameter.numel() for parameter in model.parameters()) == 12
        assert next(name for name, _ in model.named_parameters()) == "0.weight"
        with pytest.raises(ParkedError):
            model.state_dict()


def test_a_compiled_model_is_not_compiled_again() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    expected = compiled(torch.ones(2, 4))
    counters.clear()
    memtriage.park(model)
    # Dynamo meets the parked weights when it tries to trace again, and wraps what they raise.
    with pytest.raises(Exception, match="which is parked"):
        compiled(torch.ones(2, 4))
    memtriage.unpark()
    assert torch.equal(compiled(torch.ones(2, 4)), expected)
    assert counters["frames"]["ok"] == 0


@pytest.mark.parametrize("kind", [Hollow, Declared])
def test_the_tensors_inside_a_subclass_are_parked(kind: type[Hollow]) -> None:
    tensor = kind(torch.full((4,), 3.0), torch.full((1,), 2.0))
    inner = tensor.inner
    parked = memtriage.park(tensor)
    assert (parked.storages, parked.nbytes) == (2, 20)
    assert inner.untyped_storage().nbytes() == 0
    with pytest.raises(ParkedError, match="add"):
        tensor + 1
    with pytest.raises(ParkedError):
        inner + 1
    memtriage.unpark(tensor)
    assert type(tensor) is kind
    assert torch.equal(tensor + 1, torch.full((4,), 7.0))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_fsdp_goes_on_with_the_same_bits() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def losses(parking: bool) -> list[float]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if parking:
                with memtriage.park(model, optimizer) as parked:
                    assert parked.owners.keys() == {"parameter", "optimizer state"}
                    with pytest.raises(ParkedError):
                        model(torch.ones(4, 8))
                    with pytest.raises(ParkedError):
                        model[0].weight.full_tensor()
        return found

    with group_of_one():
        assert losses(parking=True) == losses(parking=False)
