"""`memtriage.park` and `memtriage.unpark`: what moves, what comes back, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memtriage
from memtriage.treat.parking.api import parked_by_device
from memtriage.treat.parking.handle import Parked, ParkError, ParkRefused
from memtriage.treat.parking.registry import PARKED
from memtriage.treat.parking.transfer import ARENAS


def device_bytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [tensor for part in optimizer.state.values() for tensor in part.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *gradients, *model.buffers(), *state]


def test_values_leave_and_come_back_bit_for_bit() -> None:
    model, optimizer = trained()
    tensors = everything(model, optimizer)
    before = [tensor.detach().clone() for tensor in tensors]
    nbytes = device_bytes(*tensors)
    parked = memtriage.park(model, optimizer)
    assert parked.nbytes == nbytes
    assert parked.storages == len(tensors)
    assert parked.owners.keys() == {"parameter", "gradient", "buffer", "optimizer state"}
    assert sum(parked.owners.values()) == nbytes
    assert device_bytes(*tensors) == 0
    assert memtriage.unpark().nbytes == nbytes
    assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_training_is_the_same_with_and_without(every: int) -> None:
    def losses(parking: bool) -> list[float]:
        model, optimizer = trained()
        found = []
        for step in range(4):
            loss = model(torch.full((4, 8), float(step)).cumsum(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            found.append(loss.item())
            if parking and step % every == 0:
                memtriage.park(optimizer)
                memtriage.park(model)
                memtriage.unpark(optimizer)
                memtriage.unpark(model)
        return found

    assert losses(parking=True) == losses(parking=False)


def test_views_and_aliases_stay_valid() -> None:
    base = torch.arange(24.0)
    matrix, part = base.view(4, 6), base[5:9]
    alias = torch.empty(0).set_(base.untyped_storage(), 2, (3,))
    with memtriage.park(matrix) as parked:
        assert parked.nbytes == 96
    matrix.mul_(2)
    assert torch.equal(part, torch.arange(5.0, 9.0) * 2)
    assert torch.equal(alias, torch.tensor([4.0, 6.0, 8.0]))


def test_tied_weights_count_once() -> None:
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    parked = memtriage.park(embedding, head, head.weight.detach()[3:])
    assert (parked.storages, parked.nbytes) == (1, 50 * 8 * 4)


def test_names_restrict_models_and_optimizers() -> None:
    model, optimizer = trained()
    sizes = {
        "parameters": device_bytes(*model.parameters()),
        "gradients": device_bytes(
            *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        ),
        "buffers": device_bytes(*model.buffers()),
        "optimizer_state": device_bytes(*(v for s in optimizer.state.values() for v in s.values())),
    }
    for name, nbytes in sizes.items():
        parked = memtriage.park(name, model, optimizer)
        assert parked.nbytes == nbytes
        assert memtriage.unpark(name, model, optimizer).nbytes == nbytes
    assert memtriage.park(model, optimizer).nbytes == sum(sizes.values())


def test_megatrons_gradient_buffer_goes_as_one_storage() -> None:
    model = nn.Linear(4, 4)
    buffer = torch.ones(20)
    model.weight.main_grad = buffer[:16].view(4, 4)
    model.bias.main_grad = buffer[16:]
    parked = memtriage.park("gradients", model)
    assert (parked.storages, parked.nbytes, buffer.untyped_storage().nbytes()) == (1, 80, 0)


class Wrapper:
    """Holds an optimizer and float32 masters as Megatron's mixed-precision optimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: list[Tensor]) -> None:
        self.optimizer = optimizer
        self.shard_fp32_from_float16_groups = [masters]
        self.model_float16_groups = [[p for group in optimizer.param_groups for p in group["params"]]]


class Chain:
    def __init__(self, *optimizers: Any) -> None:
        self.chained_optimizers = list(optimizers)


def test_state_and_masters_inside_wrapped_optimizers() -> None:
    model, optimizer = trained()
    masters = [torch.ones(7), torch.ones(9)]
    parked = memtriage.park(Chain(Wrapper(optimizer, masters)))
    state = [v for s in optimizer.state.values() for v in s.values()]
    assert device_bytes(*masters, *state) == 0
    assert parked.owners.keys() == {"optimizer state"}
    assert device_bytes(*model.parameters()) > 0


def test_bringing_back_twice_is_an_error() -> None:
    model, _ = trained()
    with pytest.raises(ParkError, match="nothing is parked"):
        memtriage.unpark()
    memtriage.park(model).unpark()
    with pytest.raises(ParkError, match="nothing of what was given is parked"):
        memtriage.unpark(model)


def test_memory_of_somebody_else_stays_and_is_told() -> None:
    ours, theirs = torch.ones(3), torch.frombuffer(bytearray(8), dtype=torch.uint8)
    with pytest.warns(ParkRefused, match="1 storages .* stay where they are, e.g. tensor"):
        parked = memtriage.park(ours, theirs)
    assert parked.storages == 1
    assert [(storage.nbytes, storage.name) for storage in parked.refused] == [(8, "tensor")]
    assert theirs.sum() == 0


def test_gradients_can_be_dropped_while_they_are_parked() -> None:
    model, optimizer = trained()
    memtriage.park(model, optimizer)
    optimizer.zero_grad(set_to_none=True)
    assert "gradient" not in memtriage.unpark().owners


def test_host_memory_is_kept_for_the_next_cycle_until_released() -> None:
    tensor = torch.ones(1 << 18)
    memtriage.release_parking()
    memtriage.park(tensor)
    owned = ARENAS[False].owned
    assert 1 << 20 <= owned <= (1 << 20) + 4096
    assert memtriage.release_parking() == 0
    memtriage.unpark()
    memtriage.park(tensor)
    assert ARENAS[False].owned == owned
    memtriage.unpark()
    assert memtriage.release_parking() == owned
    assert ARENAS[False].owned == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_parking_and_bringing_back(data: st.DataObject) -> None:
    bases = [torch.arange(float(data.draw(st.integers(1, 200)))) for _ in range(4)]
    views = [base[base.numel() // 2 :] for base in bases]
    before = [base.clone() for base in bases]
    handles: dict[int, Parked] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        index = data.draw(st.integers(0, 3))
        if index in handles:
            memtriage.unpark(data.draw(st.sampled_from([handles.pop(index), views[index]])))
            handles.pop(index, None)
        else:
            handles[index] = memtriage.park(data.draw(st.sampled_from([bases, views]))[index])
        assert [not base.untyped_storage().nbytes() for base in bases] == [n in handles for n in range(4)]
    if handles:
        memtriage.unpark()
    assert all(torch.equal(base, then) for base, then in zip(bases, before, strict=True))


def test_what_is_parked_is_counted_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parked_by_device(nn.Linear(2, 2)) == {}
    first, second = nn.Linear(2, 2), nn.Linear(3, 3)
    memtriage.park(first, second)
    assert parked_by_device(first) == {}  # of CUDA devices only
    with monkeypatch.context() as patch:
        for parameter, device in ((first.weight, "cuda:0"), (second.weight, "cuda:1")):
            entry = PARKED[parameter.untyped_storage()._cdata]
            patch.setattr(entry, "device", torch.device(device))
        assert parked_by_device(first) == {0: 16}
        assert parked_by_device(second, first) == {0: 16, 1: 36}
