"""Compiled models: when they are offered, with which budgets, and what is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch._functorch import config

from memtriage.planning.changes import Rung
from memtriage.planning.facts import UNKNOWN
from memtriage.planning.rungs.compiling import ACTIVATION_BUDGET, COMPILE
from memtriage.prediction.build import Built
from memtriage.prediction.compiled import inductor
from support.training_jobs import last

FORWARD = "model.forward = torch.compile(model.forward)"


@pytest.fixture(autouse=True)
def inductor_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed: nothing is compiled here."""
    monkeypatch.setattr(inductor, "missing", lambda: None)


@pytest.mark.parametrize("rung", [COMPILE, ACTIVATION_BUDGET])
def test_why_it_is_not_offered(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = rung.offer(replace(UNKNOWN, parallel="FSDP2"))
    assert parallel.absent == "the program is one of several ranks (FSDP2)" and parallel.tracks == ()
    monkeypatch.setattr(inductor, "missing", lambda: "triton is not installed")
    missing = rung.offer(replace(UNKNOWN, parallel="FSDP2"))
    assert missing.absent == "it cannot be predicted here: triton is not installed"
    assert missing.tracks == ()
    assert rung.on_request == "each candidate is compiled, which takes a minute"


def test_a_compiled_program_is_not_compiled_again() -> None:
    offer = COMPILE.offer(replace(UNKNOWN, compiled=True, parallel="FSDP2"))
    assert (offer.absent, offer.tracks) == ("the program is compiled already", ())


def test_the_model_s_forward_is_compiled() -> None:
    change = last(COMPILE, UNKNOWN)
    model = nn.Linear(2, 2)
    built = Built(model, (), lambda: None)
    assert change.edit(built) is built
    assert hasattr(vars(model)["forward"], "_torchdynamo_orig_callable")
    assert change.code == {"torch": FORWARD, "trainer": "TrainingArguments(torch_compile=True)"}
    assert (change.rung, change.maths, change.counts_work) == ("torch.compile", "rounding", False)


@pytest.mark.parametrize("compiled", [False, True])
def test_budgets_go_from_the_mildest_and_compile_what_is_not_compiled(compiled: bool) -> None:
    (track,) = ACTIVATION_BUDGET.offer(replace(UNKNOWN, compiled=compiled)).tracks
    words = "" if compiled else "compiled, with "
    assert [change.action for change in track] == [
        f"{words}activation_memory_budget={share}" for share in (0.8, 0.6, 0.4, 0.2)
    ]
    code = "import torch._functorch.config\ntorch._functorch.config.activation_memory_budget = 0.8"
    assert track[0].code == {"torch": code if compiled else f"{code}\n{FORWARD}"}
    for change in track:
        assert (change.rung, change.maths, change.counts_work) == ("activation budget", "rounding", True)
        assert change.displaces == {"torch.compile"}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_budget_holds_while_a_step_runs(compiled: bool) -> None:
    model, optimizer = nn.Linear(2, 2), object()
    seen: list[Any] = []

    def step() -> str:
        seen.append(config.activation_memory_budget)
        return "the loss"

    before = config.activation_memory_budget
    change = ACTIVATION_BUDGET.offer(replace(UNKNOWN, compiled=compiled)).tracks[0][1]
    made = change.edit(Built(model, (optimizer,), step))  # type: ignore[arg-type]
    assert (made.model, made.optimizers) == (model, (optimizer,))
    assert ("forward" in vars(model)) is not compiled
    assert made.step() == "the loss"
    assert (seen, config.activation_memory_budget) == ([0.6], before)
