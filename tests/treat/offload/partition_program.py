"""What `test_partition.py` runs as each of several ranks: every scenario, its outcome as a line of JSON.

RANK=0 WORLD_SIZE=2 python partition_program.py INIT_FILE
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from memtriage import OffloadedAdamW
from memtriage.treat.offload.tiles import Share
from support.offload import (
    give_gradients,
    masters_of,
    reference,
    same_bits,
)
from support.offload import parameters as parameters_on

SCENARIOS: list[Callable[[], None]] = []
DEVICE_TYPE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
DEVICE = f"cuda:{os.environ['RANK']}" if DEVICE_TYPE == "cuda" else "cpu"


def parameters(*arguments: Any, **settings: Any) -> list[Parameter]:
    return parameters_on(*arguments, **settings, device=DEVICE)


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS.append(function)
    return function


def make(weights: Any, **settings: Any) -> OffloadedAdamW:
    assert dist.group.WORLD is not None
    return OffloadedAdamW(
        weights, **{"tile_elements": 128, "ring_depth": 2, "process_group": dist.group.WORLD} | settings
    )


def sums_of_own_gradients(
    weights: list[Parameter], masters: list[Parameter], seed: int
) -> list[torch.Tensor]:
    """Each rank gets gradients of its own; returns their sums over the ranks, in float32 on the CPU.

    They are multiples of an eighth, so that sums are exact in every type, whatever the order of the ranks.
    """
    give_gradients(weights, masters, seed=1000 * dist.get_rank() + seed)
    sums = []
    for weight in weights:
        assert weight.grad is not None
        weight.grad.mul_(8).round_().div_(8)
        total = weight.grad.clone()
        dist.all_reduce(total)
        sums.append(total.float().cpu())
    return sums


def averaged_gradients(weights: list[Parameter], masters: list[Parameter], seed: int) -> None:
    """Each rank gets gradients of its own; the reference their mean."""
    for master, total in zip(masters, sums_of_own_gradients(weights, masters, seed), strict=True):
        master.grad = total / dist.get_world_size()


def assert_shares(
    optimizer: OffloadedAdamW, weights: list[Parameter], expected: Any, masters: list[Parameter]
) -> None:
    """Weights are the reference's on every rank, and so is this rank's share of the state."""
    whole = optimizer.full_state_dict(to=None)
    for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        assert same_bits(weight.detach(), master.detach().to(weight.dtype)), f"weight {index}"
        for key, value in expected.state[master].items():
            assert same_bits(whole["state"][index][key], value), f"{key} of {index}"


@scenario
def gradients_are_averaged_and_weights_come_back() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        weights = parameters(dtype=dtype)
        masters = masters_of(weights)
        optimizer, expected = make(weights), reference(masters)
        for step in range(3):
            averaged_gradients(weights, masters, step)
            optimizer.step()
            expected.step()
        assert_shares(optimizer, weights, expected, masters)
        optimizer.close()


@scenario
def the_norm_is_that_of_the_averaged_gradients() -> None:
    weights = parameters(dtype=torch.float32)
    masters = masters_of(weights)
    optimizer, expected = make(weights, max_norm=0.5), reference(masters)
    averaged_gradients(weights, masters, 0)
    norm = torch.nn.utils.clip_grad_norm_(masters, 0.5)
    optimizer.step()
    expected.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.cpu(), norm)
    for weight, master in zip(weights, masters, strict=True):
        torch.testing.assert_close(weight.cpu(), master, rtol=1e-6, atol=1e-6)
    replicas = [torch.empty_like(weights[0].detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, weights[0].detach())
    assert all(same_bits(replica, replicas[0]) for replica in replicas)


@scenario
def wide_gradients_of_narrow_weights_travel_in_the_type_of_their_sum() -> None:
    for max_norm in (None, 1e6):
        weights = parameters()
        masters = masters_of(weights)
        optimizer, expected = make(weights, max_norm=max_norm), reference(masters)
        for step in range(2):
            averaged_gradients(weights, masters, step)
            for index, weight in enumerate(weights):
                # One rank has them in float32, the others as they were.
                if index % dist.get_world_size() == dist.get_rank():
                    assert weight.grad is not None
                    weight.grad_dtype = None
                    weight.grad = weight.grad.float()
            optimizer.step()
            expected.step()
        assert_shares(optimizer, weights, expected, masters)
        optimizer.close()


@scenario
def a_ddp_model_with_either_setting() -> None:
    for reduce_gradients in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.GELU(), torch.nn.Linear(30, 3))
        model.to(DEVICE)
        weights = list(model.parameters())
        masters = masters_of(weights)
        parallel = DistributedDataParallel(model)
        optimizer = make(weights, reduce_gradients=reduce_gradients)
        expected = reference(masters)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            parallel(torch.randn(4, 40, generator=generator).to(DEVICE)).square().mean().backward()
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.cpu().clone()
            optimizer.step()
            optimizer.zero_grad()
            expected.step()
        assert_shares(optimizer, weights, expected, masters)
        optimizer.close()


@scenario
def a_gradient_that_only_one_rank_has() -> None:
    weights = parameters()
    masters = masters_of(weights)
    optimizer, expected = make(weights), reference(masters)
    give_gradients(weights, masters, seed=4)
    for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        assert master.grad is not None
        master.grad /= dist.get_world_size()
        if index == 3:
            weight.grad = master.grad = None
        elif index % dist.get_world_size() != dist.get_rank():
            weight.grad = None
    optimizer.step()
    expected.step()
    assert weights[3] not in optimizer.state
    assert_shares(optimizer, weights, expected, masters)


@scenario
def gradients_added_up_on_the_host() -> None:
    weights = parameters()
    masters = masters_of(weights)
    optimizer, expected = make(weights, gradients="host"), reference(masters)
    for step in range(2):
        sums = [torch.zeros_like(master) for master in masters]
        for micro_batch in range(2):
            added = sums_of_own_gradients(weights, masters, seed=10 * step + micro_batch)
            torch._foreach_add_(sums, added)
            optimizer.offload_gradients()
            assert all(weight.grad is None for weight in weights)
        for total, master in zip(sums, masters, strict=True):
            master.grad = total / dist.get_world_size()
        optimizer.step()
        expected.step()
    assert_shares(optimizer, weights, expected, masters)


@scenario
def infinities_on_one_rank_skip_the_step_on_all() -> None:
    weights = parameters([(200,)], dtype=torch.float32)
    optimizer = make(weights)
    give_gradients(weights, masters_of(weights), seed=0)
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.found_inf = torch.tensor(float(dist.get_rank()))
    optimizer.step()
    assert same_bits(weights[0].detach(), parameters([(200,)], dtype=torch.float32)[0].detach())


@scenario
def the_state_is_dealt_out_saved_and_loaded() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shapes = ((1000, 40), (64,), (7,))
    weights = parameters(shapes)
    optimizer = make(weights)
    held = torch.tensor(float(optimizer.host_bytes), device=DEVICE)
    dist.all_reduce(held)
    ring = ranks * (2 * 2 * 128 * 2 + 128 * 4)
    count = sum(weight.numel() for weight in weights)
    assert 12 * count + ring <= held <= 12 * (count + ranks * len(shapes) * 64) + ring

    masters = masters_of(weights)
    averaged_gradients(weights, masters, 0)
    optimizer.step()
    mine = optimizer.state_dict()
    assert mine["partition"] == {"rank": rank, "ranks": ranks}
    assert mine["state"][0]["exp_avg"].shape == (Share(40_000, ranks, rank).length,)

    other_rank = {**mine, "partition": {"rank": (rank + 1) % ranks, "ranks": ranks}}
    whole = optimizer.full_state_dict(to=None)
    for state in (other_rank, mine, whole):
        again_weights = [Parameter(weight.detach().clone()) for weight in weights]
        again = make(again_weights)
        try:
            again.load_state_dict(state)
        except ValueError as error:
            assert state is other_rank and "share" in str(error), error
            continue
        assert state is not other_rank
        before = [Parameter(weight.detach().clone()) for weight in weights]
        there = make(before)
        there.load_state_dict(optimizer.state_dict())
        for of, one in ((again_weights, again), (before, there)):
            averaged_gradients(of, masters_of(of), 1)
            one.step()
        assert all(
            same_bits(weight.detach(), two.detach())
            for weight, two in zip(again_weights, before, strict=True)
        )

    only_last = optimizer.full_state_dict(to=ranks - 1)
    assert bool(only_last) == (rank == ranks - 1)

    # The whole state serves an optimizer without partition, and torch's own.
    alone = [Parameter(weight.detach().clone()) for weight in weights]
    single = OffloadedAdamW(alone, tile_elements=128)
    single.load_state_dict(whole)
    torchs = [Parameter(whole["state"][index]["master"].clone()) for index in range(len(weights))]
    theirs = reference(torchs)
    theirs.load_state_dict(whole)
    give_gradients(alone, torchs, seed=5)
    single.step()
    theirs.step()
    for one, two in zip(alone, torchs, strict=True):
        assert same_bits(one.detach(), two.detach().bfloat16())


@scenario
def overlap_with_backward_is_refused_where_gradients_are_not_averaged_yet() -> None:
    try:
        make(parameters(), overlap_backward=True)
    except ValueError as error:
        assert "process_group" in str(error)
    else:
        raise AssertionError("not refused")
    weight = Parameter(torch.ones(8, device=DEVICE))
    optimizer = OffloadedAdamW([weight], overlap_backward=True)
    try:
        weight.sum().backward()
    except RuntimeError as error:
        assert "several ranks" in str(error)
    else:
        raise AssertionError("not refused")
    assert same_bits(weight.detach(), torch.ones(8))
    optimizer.close()


def sharded_model() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    # 41 rows do not divide evenly.
    model = torch.nn.Sequential(torch.nn.Linear(24, 41), torch.nn.GELU(), torch.nn.Linear(41, 6)).bfloat16()
    model.to(DEVICE)
    mesh = init_device_mesh(DEVICE_TYPE, (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    model(
        torch.randn(5, 24, generator=generator).to(DEVICE, torch.bfloat16)
    ).float().square().mean().backward()


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().detach() for parameter in model.parameters()]


@scenario
def fsdp2_shards() -> None:
    for overlap in (False, True):
        model = sharded_model()
        masters = [Parameter(shard.float().cpu().clone()) for shard in shards(model)]
        optimizer = OffloadedAdamW(
            model.parameters(), tile_elements=64, ring_depth=2, overlap_backward=overlap
        )
        expected = reference(masters)
        twin = sharded_model()
        for step in range(3):
            with torch.no_grad():
                for parameter, two in zip(twin.parameters(), model.parameters(), strict=True):
                    parameter.copy_(two)
            backward(model, step)
            backward(twin, step)
            for parameter, master in zip(twin.parameters(), masters, strict=True):
                assert isinstance(parameter.grad, DTensor)
                master.grad = parameter.grad.to_local().float().cpu()
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            expected.step()
            for shard, master in zip(shards(model), masters, strict=True):
                assert same_bits(shard, master.detach().bfloat16())
        for parameter, master in zip(model.parameters(), masters, strict=True):
            state = optimizer.state[parameter]
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].shape == parameter.shape
            assert state["exp_avg"].placements == parameter.placements
            assert same_bits(state["exp_avg"].to_local(), expected.state[master]["exp_avg"])
            assert state["exp_avg"].device.type == "cpu"
            whole = state["exp_avg"].to(DEVICE_TYPE).full_tensor()
            assert whole.shape == parameter.shape
        optimizer.close()


@scenario
def fsdp2_clipping_counts_every_shard_once() -> None:
    model, twin = sharded_model(), sharded_model()
    optimizer = OffloadedAdamW(model.parameters(), tile_elements=64, max_norm=0.01)
    backward(model, 0)
    backward(twin, 0)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01).full_tensor()
    optimizer.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, norm.float(), rtol=1e-2, atol=0)
    total = sum(parameter.grad.full_tensor().float().square().sum() for parameter in model.parameters())
    torch.testing.assert_close(optimizer.grad_norm, total.sqrt())


@scenario
def fsdp2_through_distributed_checkpoint_state_dicts() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = sharded_model()
    optimizer = OffloadedAdamW(model.parameters(), tile_elements=64)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    local = get_optimizer_state_dict(model, optimizer)
    other = sharded_model()
    with torch.no_grad():
        for parameter, two in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(two)
    again = OffloadedAdamW(other.parameters(), tile_elements=64)
    set_optimizer_state_dict(other, again, local)
    if dist.get_rank() == 0:
        assert whole["state"]["0.weight"]["exp_avg"].shape == (41, 24)
    for of, one in ((model, optimizer), (other, again)):
        backward(of, 1)
        one.step()
    for shard, two in zip(shards(model), shards(other), strict=True):
        assert same_bits(shard, two)


@scenario
def shards_partitioned_over_their_replicas() -> None:
    """Hybrid sharding: replicas of a shard deal its state out among themselves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh(DEVICE_TYPE, (dist.get_world_size(),))
    whole = parameters([(50, 9)])[0].detach()
    weight = Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    master = Parameter(whole.float().cpu().clone())
    optimizer, expected = make([weight], reduce_gradients=False, max_norm=1.0), reference([master])
    gradient = parameters([(50, 9)], seed=5)[0].detach()
    weight.grad = distribute_tensor(gradient, mesh, [Replicate()])
    master.grad = gradient.float().cpu()
    norm = torch.nn.utils.clip_grad_norm_([master], 1.0)
    optimizer.step()
    expected.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.cpu(), norm)
    torch.testing.assert_close(weight.to_local().float().cpu(), master.bfloat16().float())
    assert optimizer.state[weight]["exp_avg"].numel() <= 256


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE_TYPE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{sys.argv[1]}", rank=rank, world_size=ranks)
    for case in SCENARIOS:
        try:
            case()
            outcome = "passed"
        except Exception:
            outcome = traceback.format_exc()
        print(json.dumps([case.__name__, outcome]), flush=True)
        if outcome != "passed":
            # The other ranks may wait for this one now: no scenario after this would tell anything.
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
