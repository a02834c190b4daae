"""Adam with smaller states: their sizes are those of the real ones, and what is written."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memtriage.planning.facts import Facts, OptimizerFacts
from memtriage.planning.rungs.optimizers import EIGHT_BIT, OFFLOAD
from memtriage.prediction.build import Built
from support.training_jobs import Job, last

ADAMW = OptimizerFacts("AdamW", adam=True, fusable=True, foreach=True, amsgrad=False)
SGD = replace(ADAMW, name="SGD", adam=False)
FACTS = Facts(optimizers=(ADAMW,), trained=2**20)


def states(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, int]]:
    return {name: (state.dtype, state.numel()) for name, state in optimizer.state[parameter].items()}


def test_states_of_8_bits_have_the_sizes_of_the_real_ones() -> None:
    sizes = {"small": 4095, "least": 4096, "uneven": 4097, "frozen": 9000}
    parameters = {name: nn.Parameter(torch.ones(count)) for name, count in sizes.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    for name, parameter in parameters.items():
        if name != "frozen":
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # states of the old step, which go
    last(EIGHT_BIT, FACTS).edit(Built(nn.Linear(1, 1), (optimizer,), lambda: None))
    before = [parameter.detach().clone() for parameter in parameters.values()]
    optimizer.step()
    assert states(optimizer, parameters["small"]) == {
        "state1": (torch.float32, 4095),
        "state2": (torch.float32, 4095),
    }
    assert states(optimizer, parameters["least"]) == {
        "state1": (torch.uint8, 4096),
        "state2": (torch.uint8, 4096),
        "absmax1": (torch.float32, 16),
        "absmax2": (torch.float32, 16),
    }
    assert states(optimizer, parameters["uneven"])["absmax1"] == (torch.float32, 17)
    assert states(optimizer, parameters["frozen"]) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, parameters.values(), strict=True))
    made = optimizer.state[parameters["least"]]["state1"]
    optimizer.step()
    assert optimizer.state[parameters["least"]]["state1"] is made, "once, and not in every step"


def test_of_a_sharded_parameter_the_states_are_those_of_this_rank_s_part() -> None:
    part = torch.ones(4096)
    parameter = nn.Parameter(torch.ones(4 * 4096))
    parameter.grad = torch.ones_like(parameter)
    parameter.to_local = lambda: part  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW([parameter])
    last(EIGHT_BIT, FACTS).edit(Built(nn.Linear(1, 1), (optimizer,), lambda: None))
    optimizer.step()
    assert states(optimizer, parameter)["state1"] == (torch.uint8, 4096)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    last(OFFLOAD, FACTS).edit(Built(nn.Linear(1, 1), (optimizer,), lambda: None))

    def closure() -> torch.Tensor:
        loss = (parameter * 2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 6  # type: ignore[attr-defined]
    assert parameter.grad is not None
    assert optimizer.step() is None  # type: ignore[func-returns-value]


def test_offloaded_optimizer_keeps_nothing_on_the_device(model: nn.Module) -> None:
    job = Job(model)
    seen: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        scheduler = torch.optim.lr_scheduler.ConstantLR(job.optimizer)
        last(OFFLOAD, job.facts()).edit(job.built()).step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    finally:
        handle.remove()
    assert not any(job.optimizer.state.values())
    # Of the two: the steps of the copy that was looked at, and of the job.
    assert len(seen) == 2


def test_an_optimizer_in_a_wrapper_is_changed_and_one_of_no_library_is_left() -> None:
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    other = SimpleNamespace(param_groups=[])
    last(OFFLOAD, FACTS).edit(
        Built(nn.Linear(1, 1), (SimpleNamespace(optimizer=inner), other), lambda: None)  # type: ignore[arg-type]
    )
    assert type(inner).__name__ == "StandIn" and isinstance(inner, torch.optim.AdamW)
    assert vars(other) == {"param_groups": []}


def test_what_is_written_and_what_each_takes_the_place_of() -> None:
    eight = last(EIGHT_BIT, replace(FACTS, optimizers=(replace(ADAMW, name="Adam"),)))
    assert eight.displaces == {"optimizer step"} and "Adam8bit" in eight.code["torch"]
    offload = last(OFFLOAD, FACTS)
    assert offload.displaces == {"optimizer step", "8-bit optimizer"}
    assert "# 12.0 MiB of host memory" in offload.code["torch"]  # of three numbers each
