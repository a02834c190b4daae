"""An optimizer step without a copy of the weights: fused, or for one parameter after the other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memtriage.planning.facts import Facts, OptimizerFacts
from memtriage.planning.rungs.optimizers import OPTIMIZER_STEP
from memtriage.prediction.build import Built
from support.training_jobs import Job, last, weights

ADAMW = OptimizerFacts("AdamW", adam=True, fusable=True, foreach=True, amsgrad=False)
ADAM = replace(ADAMW, name="Adam")
PROP = replace(ADAMW, name="RMSprop", fusable=False, adam=False)
FUSED = replace(ADAMW, foreach=False)


@pytest.mark.parametrize(
    ("optimizers", "action"),
    [
        ((ADAMW, ADAMW), "AdamW(fused=True)"),
        ((ADAM,), "Adam(fused=True)"),
        ((ADAM, FUSED), "Adam/AdamW(fused=True)"),
        ((PROP,), "RMSprop(foreach=False)"),
        ((ADAM, PROP), "Adam/RMSprop(foreach=False)"),
    ],
)
def test_what_is_offered_and_written(optimizers: tuple[OptimizerFacts, ...], action: str) -> None:
    change = last(OPTIMIZER_STEP, Facts(optimizers=optimizers))
    assert (change.rung, change.action) == ("optimizer step", action)
    assert change.code["torch"].replace("(..., ", "(").endswith(action)
    assert ("trainer" in change.code) == (set(optimizers) == {ADAMW})
    assert change.maths == ("rounding" if "fused" in action else "same")


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {"fused": True, "foreach": False}),
        (torch.optim.RMSprop, {"foreach": False}),
    ],
)
def test_every_group_is_changed_and_the_result_stays(
    optimizer: type[torch.optim.Optimizer], settings: dict[str, bool], model: nn.Module
) -> None:
    plain, job = Job(model, optimizer), Job(model, optimizer)
    built = job.built()
    assert last(OPTIMIZER_STEP, job.facts()).edit(built) is built
    for group in (job.optimizer.defaults, *job.optimizer.param_groups):
        assert {name: group[name] for name in settings} == settings
        assert "fused" in settings or "fused" not in group, "nothing that the optimizer does not know"
    for _ in range(2):
        plain.built().step()
        built.step()
    torch.testing.assert_close(weights(job.model), weights(plain.model))
    assert "foreach" in OPTIMIZER_STEP.offer(job.facts())


def test_an_optimizer_in_a_wrapper_is_changed() -> None:
    inner = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    wrapper = SimpleNamespace(optimizer=inner)
    change = last(OPTIMIZER_STEP, Facts(optimizers=(ADAM,)))
    change.edit(Built(nn.Linear(1, 1), (wrapper,), lambda: None))  # type: ignore[arg-type]
    assert inner.param_groups[0]["fused"] is True
