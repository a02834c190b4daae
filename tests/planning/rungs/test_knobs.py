"""Smaller micro-batches: which are offered, and what is written for each."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from memtriage.planning.changes import Change
from memtriage.planning.facts import Facts, Knob
from memtriage.planning.rungs.knobs import MICRO_BATCH
from memtriage.prediction.build import Built
from support.training_jobs import Job, weights

Where = Literal["build", "step"]


def smaller(batch: int, accumulation: int | None = None, *, of: Where = "build") -> list[Change]:
    """The smaller micro-batches of a program, the largest first."""
    facts = Facts(
        batch=Knob("micro_batch", batch, of),
        accumulation=None if accumulation is None else Knob("accumulation", accumulation, of),
    )
    (track,) = MICRO_BATCH.offer(facts)
    return list(track)


def test_micro_batches_divide_the_batch() -> None:
    assert [change.build_arguments["micro_batch"] for change in smaller(12)] == [6, 4, 3, 2, 1]
    assert [change.action for change in smaller(4)] == [
        "micro-batch 2 instead of 4, accumulated 2 times",
        "micro-batch 1 instead of 4, accumulated 4 times",
    ]


@pytest.mark.parametrize(
    ("of", "call"), [("build", "build(device, micro_batch=2)"), ("step", "step(micro_batch=2)")]
)
def test_the_keyword_is_that_of_its_function(of: Where, call: str) -> None:
    change = smaller(8, of=of)[1]
    assert (change.build_arguments, change.step_arguments) == (
        ({"micro_batch": 2}, {}) if of == "build" else ({}, {"micro_batch": 2})
    )
    assert change.code["torch"].splitlines() == [
        call, "for number in range(4):", "    (loss(micro_batch) / 4).backward()", "optimizer.step()",
        "optimizer.zero_grad()",
    ]  # fmt: skip
    assert change.code["trainer"] == (
        "TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4)"
    )
    assert change.maths == "same" and change.outermost


def test_two_micro_batches_are_simulated_and_stand_for_all() -> None:
    half, quarter, eighth = smaller(8)
    assert [change.work_factor for change in (half, quarter, eighth)] == [1, 2, 4]


def test_a_program_that_accumulates_itself_does_so_more_often() -> None:
    (half, quarter, _) = smaller(8, 3)
    assert half.build_arguments == {"micro_batch": 4, "accumulation": 6}
    assert quarter.build_arguments == {"micro_batch": 2, "accumulation": 6}
    assert (half.work_factor, quarter.work_factor) == (1, 2)
    assert quarter.action == "micro-batch 2 instead of 8, accumulated 12 times"
    built = Built(nn.Linear(1, 1), (), lambda: None)
    assert half.edit(built) is built


class Counted(torch.optim.SGD):
    """Notes its steps, and when gradients are dropped."""

    def __init__(self, model: nn.Module, log: list[str]) -> None:
        super().__init__(model.parameters(), lr=0.5)
        self.log = log

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.log.append("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.log.append("drop")


@pytest.mark.parametrize("drops_first", [True, False])
def test_optimizers_step_and_drop_gradients_once_for_all_micro_batches(drops_first: bool) -> None:
    log: list[str] = []
    model = nn.Linear(1, 1)
    optimizer = Counted(model, log)

    def step() -> None:
        if drops_first:
            optimizer.zero_grad()
        log.append("backward")
        optimizer.step()
        if not drops_first:
            optimizer.zero_grad()

    changed = smaller(8)[1].edit(Built(model, (optimizer,), step))  # a quarter: two are simulated
    for _ in range(2):
        changed.step()
    once = (
        ["drop", "backward", "backward", "step"] if drops_first else ["backward", "backward", "step", "drop"]
    )
    assert log == 2 * once


@pytest.mark.parametrize("drops_before", [False, True])
def test_accumulated_micro_batches_equal_the_whole_batch(model: nn.Module, drops_before: bool) -> None:
    whole, job = Job(model), Job(model)
    whole.built().step()
    change = MICRO_BATCH.offer(job.facts())[0][0]
    assert change.action == "micro-batch 4 instead of 8, accumulated 2 times"
    made = job.built(**change.build_arguments)
    inner = made.step

    def step() -> None:
        if drops_before:
            made.model.zero_grad()
            made.optimizers[0].zero_grad()
        inner()

    change.edit(Built(made.model, made.optimizers, step)).step()
    torch.testing.assert_close(weights(job.model), weights(whole.model))
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert len(job.optimizer.state[next(job.model.parameters())]) == 3


def test_a_model_drops_its_gradients_only_after_a_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[float] = []

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        assert model.weight.grad is not None
        seen.append(float(model.weight.grad))
        optimizer.step()
        model.zero_grad()

    changed = smaller(8)[0].edit(Built(model, (optimizer,), step))
    for _ in range(2):
        changed.step()
    assert seen == [1.0, 2.0, 1.0, 2.0]


def test_a_batch_of_the_step_and_an_accumulation_of_the_build() -> None:
    facts = Facts(batch=Knob("batch", 8, "step"), accumulation=Knob("accumulation", 3, "build"))
    change = MICRO_BATCH.offer(facts)[0][-1]
    assert (change.step_arguments, change.build_arguments) == ({"batch": 1}, {"accumulation": 6})
    assert change.action == "micro-batch 1 instead of 8, accumulated 24 times"
