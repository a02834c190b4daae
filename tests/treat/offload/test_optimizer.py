"""What training loops do with an optimizer: groups, schedules, clipping, scaling, accumulation, closures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

import memtriage
from support.offload import (
    Pair,
    give_gradients,
    make,
    masters_of,
    parameters,
    reference,
    same_bits,
)


def test_groups_and_a_schedule() -> None:
    def groups(of: list[Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": of[:3], "lr": 1e-2, "weight_decay": 0.0},
            {"params": of[3:], "betas": (0.5, 0.6), "maximize": True},
        ]

    pair = Pair(groups=groups, both={"lr": 3e-3})
    optimizers = (pair.optimizer, pair.expected)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in optimizers]
    for step in range(4):
        pair.train(step)
        for schedule in schedules:
            schedule.step()
    first, second = (each.param_groups[0]["lr"] for each in optimizers)
    assert first == second != 1e-2
    pair.assert_same()


def test_a_learning_rate_that_is_a_tensor_changed_in_place() -> None:
    rate = torch.tensor(0.013)
    pair = Pair(both={"lr": rate})
    for step in range(2):
        pair.train(step)
        rate.mul_(0.3)
    pair.assert_same()


def test_a_group_added_later() -> None:
    pair = Pair(groups=lambda of: of[:2])
    pair.train(0)
    before = pair.optimizer.host_bytes
    pair.optimizer.add_param_group({"params": pair.weights[2:], "lr": 0.1})
    pair.expected.add_param_group({"params": pair.masters[2:], "lr": 0.1})
    assert pair.optimizer.host_bytes - before >= 12 * sum(weight.numel() for weight in pair.weights[2:])
    pair.train(1, 2)
    pair.assert_same()


def test_parameters_without_gradient_are_left_alone() -> None:
    weights = parameters()
    weights[4].requires_grad_(False)
    pair = Pair(weights)
    for step in range(2):
        pair.give(step)
        for of in (weights, pair.masters):
            of[step].grad = of[4].grad = None
        pair.step()
    pair.assert_same()
    assert weights[4] not in pair.optimizer.state


def test_a_step_without_any_gradient_does_nothing() -> None:
    weights = parameters()
    make(weights, max_norm=1.0).step()
    assert all(same_bits(weight, other) for weight, other in zip(weights, parameters(), strict=True))


def test_closure_runs_with_gradients_and_its_result_is_returned() -> None:
    weight = Parameter(torch.ones(4))
    optimizer = make([weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.0
    assert weight.detach()[0] < 1.0


def test_step_hooks_run_its_own_and_those_of_all_optimizers() -> None:
    weight = Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = make([weight])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    optimizer.step()
    everywhere.remove()
    assert sorted(seen) == ["after", "any", "before"]


def test_global_norm_clipping_in_float32_is_that_of_torch() -> None:
    pair = Pair(parameters(dtype=torch.float32), max_norm=0.7)
    for step, scale in enumerate((10.0, 1e-4)):
        pair.give(step, scale)
        norm = torch.nn.utils.clip_grad_norm_(pair.masters, 0.7)
        pair.step()
        assert torch.equal(pair.optimizer.grad_norm, norm)
    pair.assert_same()


def test_clipping_bfloat16_gradients_rounds_nothing() -> None:
    pair = Pair(max_norm=0.7)
    pair.give(0)
    norm = torch.nn.utils.clip_grad_norm_(pair.masters, 0.7)
    pair.step()
    assert pair.optimizer.grad_norm is not None
    torch.testing.assert_close(pair.optimizer.grad_norm, norm)
    for weight, master in zip(pair.weights, pair.masters, strict=True):
        ours, theirs = pair.optimizer.state[weight]["exp_avg"], pair.expected.state[master]["exp_avg"]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [65536.0, 3.7])
def test_scaled_gradients_are_divided_as_torchs_kernel_does(scale: float) -> None:
    pair = Pair(parameters(dtype=torch.float32))
    for step in range(2):
        pair.give(step, scale)
        for each in (pair.optimizer, pair.expected):
            each.grad_scale, each.found_inf = torch.tensor(scale), torch.tensor(0.0)
            each.step()
            del each.grad_scale, each.found_inf
    pair.assert_same()


@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_grad_scaler_skips_infinite_steps(unscaled_first: bool) -> None:
    pair = Pair(parameters([(100,), (7,)], dtype=torch.float32))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    for step in range(4):
        pair.give(step)
        if step == 2:
            for group in (pair.weights, pair.masters):
                assert group[1].grad is not None
                group[1].grad[0] = float("inf")
        for scaler, one in zip(scalers, (pair.optimizer, pair.expected), strict=True):
            scaler.scale(torch.ones(()))
            if unscaled_first:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert float(pair.optimizer.state[pair.weights[0]]["step"]) == 3
    pair.assert_same()


def test_clipping_of_scaled_gradients_clips_what_they_stand_for() -> None:
    scaled, plain = (parameters(dtype=torch.float32) for _ in range(2))
    first, second = make(scaled, max_norm=0.5), make(plain, max_norm=0.5)
    give_gradients(plain, scaled, seed=0)
    for tensor in scaled:
        assert tensor.grad is not None
        tensor.grad.mul_(1024.0)
    first.grad_scale, first.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    first.step()
    second.step()
    assert torch.equal(first.grad_norm, second.grad_norm)
    assert all(same_bits(one, other) for one, other in zip(scaled, plain, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_added_up_on_the_host_in_float32(overlap: bool, by_hand: bool) -> None:
    pair = Pair(gradients="host", overlap_backward=overlap, max_norm=1e9)
    weights = pair.weights
    for step in range(2):
        for micro_batch in range(3):
            factors = parameters(seed=10 * step + micro_batch)
            sum((w * f).sum() for w, f in zip(weights, factors, strict=True)).backward()
            sum((m * f.detach().float()).sum() for m, f in zip(pair.masters, factors, strict=True)).backward()
            if overlap:
                assert all(weight.grad is None for weight in weights)
            if by_hand:
                pair.optimizer.offload_gradients()
            if by_hand or overlap:
                assert all(weight.grad is None for weight in weights)
            else:
                # Left on the device they would add up there, in bfloat16: one micro-batch is enough.
                break
        pair.step()
        pair.optimizer.zero_grad()
        pair.expected.zero_grad()
    pair.assert_same()


def test_zero_grad_drops_gradients_on_the_host() -> None:
    weights = parameters()
    optimizer = make(weights, gradients="host")
    give_gradients(weights, masters_of(weights), seed=0)
    optimizer.offload_gradients()
    optimizer.zero_grad()
    optimizer.step()
    assert all(same_bits(weight, other) for weight, other in zip(weights, parameters(), strict=True))


@pytest.mark.parametrize("arguments", [{"gradients": "host"}, {"overlap_backward": True}])
def test_a_grad_scaler_without_gradients_on_the_device_is_refused(arguments: dict[str, Any]) -> None:
    weight = Parameter(torch.ones(100))
    optimizer = make([weight], **arguments)
    (weight * 2).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step()


def test_offload_gradients_needs_the_room() -> None:
    with pytest.raises(RuntimeError, match='gradients="host"'):
        make(parameters()).offload_gradients()


@pytest.mark.parametrize(
    ("parameter", "error", "words"),
    [
        (Parameter(torch.zeros(2, dtype=torch.float64)), TypeError, "float64"),
        (Parameter(torch.zeros(2, dtype=torch.complex64)), TypeError, "complex64"),
        (Parameter(torch.zeros(2, device="meta")), ValueError, "meta"),
        (Parameter(torch.zeros(4, 4)[:, ::2]), ValueError, "not dense"),
    ],
)
def test_parameters_that_cannot_be_are_named(
    parameter: Parameter, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make([("layer.weight", parameter)])
    optimizer = make(parameters())
    with pytest.raises(error, match=f"parameter 0 of group 1 .*{words}"):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    other = Parameter(torch.ones(5))
    optimizer = make([("other", other), ("tokens", embedding.weight)])
    (embedding(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(RuntimeError, match="gradient of tokens is sparse"):
        optimizer.step()
    assert same_bits(other.detach(), torch.ones(5))
    assert not optimizer.state


def test_weights_written_by_others_are_taken_over() -> None:
    pair = Pair()
    pair.train(0, 1)
    with torch.no_grad():
        # All of one parameter, some elements of another; the others keep their low bits.
        for of in (pair.weights, pair.masters):
            of[5].copy_(torch.arange(1000.0).bfloat16())
            of[0][1, 2:5] = 0.5
    pair.train(2)
    pair.assert_same()


def test_moments_put_into_state_by_the_user_count() -> None:
    pair = Pair(parameters(dtype=torch.float32))
    for step in range(2):
        pair.train(step)
        for of, one in ((pair.weights, pair.optimizer), (pair.masters, pair.expected)):
            one.state[of[0]]["exp_avg"] = torch.full_like(of[0], 0.25)
    pair.train(9)
    pair.assert_same()


def test_it_is_not_copied() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(make(parameters()))


class Counter(torch.nn.Module):
    """Learns to count in threes, with one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(32, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.layer = torch.nn.Linear(24, 24)
        self.bfloat16()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        logits = (hidden + self.layer(hidden).tanh()) @ self.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits.float(), (tokens + 3) % 32)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loss_curve_is_that_of_float32_masters_bit_for_bit(overlap: bool) -> None:
    ours, theirs = Counter(), Counter()
    optimizer = make(ours.parameters(), lr=0.01, overlap_backward=overlap)
    masters = masters_of(list(theirs.parameters()))
    expected = reference(masters, lr=0.01)
    losses = []
    for step in range(60):
        tokens = torch.randint(0, 32, (16,), generator=torch.Generator().manual_seed(step))
        loss = ours(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        other = theirs(tokens)
        other.backward()
        for weight, master in zip(theirs.parameters(), masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        theirs.zero_grad()
        expected.step()
        with torch.no_grad():
            for weight, master in zip(theirs.parameters(), masters, strict=True):
                weight.copy_(master)
        assert loss.item() == other.item()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_census_says_that_its_state_is_optimizer_state() -> None:
    weights = parameters()
    optimizer = make(weights)
    give_gradients(weights, masters_of(weights), seed=0)
    optimizer.step()
    owners = {storage.address: storage.owner for storage in memtriage.census().storages}
    for key in ("master", "exp_avg", "exp_avg_sq"):
        address = optimizer.state[weights[0]][key].untyped_storage().data_ptr()
        assert owners[address] == "optimizer state"
    assert owners[weights[0].untyped_storage().data_ptr()] == "parameter"
