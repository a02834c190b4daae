"""Rungs that change one setting: when they are offered, what is written, and that the result stays."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.planning.facts import Facts, HuggingFace, huggingface_in
from memtriage.planning.rungs.settings import ATTENTION, SET_TO_NONE, allocator_rung, primed_rung
from memtriage.prediction.build import Built
from support.training_jobs import Job, facts_of, language_job, last, weights

EAGER = HuggingFace("eager", True, True, "gradient_checkpointing", False)


@pytest.mark.parametrize("conf", ["", "garbage_collection_threshold:0.8"])
def test_expandable_segments_are_added_to_the_options(conf: str) -> None:
    rung = allocator_rung(conf)
    change = last(rung, Facts())
    assert f"PYTORCH_CUDA_ALLOC_CONF={','.join(filter(None, [conf, change.conf]))}  " in change.code["torch"]
    assert change.action == f"PYTORCH_CUDA_ALLOC_CONF={change.conf}"
    assert (change.conf, rung.name) == ("expandable_segments:True", "expandable segments")
    assert rung.configures and not change.traced and change.maths == "same"


def test_primed_memory_takes_the_place_of_expandable_segments() -> None:
    rung = primed_rung("expandable_segments:False")
    primed = last(rung, Facts())
    assert primed.primed and not primed.traced and rung.configures
    assert primed.displaces == {allocator_rung("").name}
    assert (primed.rung, rung.name, primed.conf) == ("primed memory", "primed memory", "")
    assert primed.code["torch"].startswith("memtriage.prime(build)  # before the model is built")
    absent = primed_rung("expandable_segments:True").offer(Facts())
    assert absent == "segments are expandable, which have no fixed sizes"


def test_attention_is_switched_and_the_loss_stays(language_model: Any) -> None:
    plain, changed = (language_job(copy.deepcopy(language_model)) for _ in range(2))
    change = last(ATTENTION, facts_of(language_job(copy.deepcopy(language_model))))
    assert (change.rung, change.maths) == ("attention", "rounding")
    assert change.code["torch"].startswith('model.set_attn_implementation("sdpa")\n')
    assert change.edit(changed) is changed
    assert huggingface_in(changed.model).config._attn_implementation == "sdpa"
    assert changed.step() == pytest.approx(plain.step(), rel=1e-5)
    torch.testing.assert_close(weights(changed.model), weights(plain.model), atol=1e-5, rtol=1e-4)
    assert ATTENTION.offer(facts_of(changed)) == "attention is sdpa already"


def test_gradients_are_set_to_none_and_the_result_stays(model: nn.Module) -> None:
    plain, job = (Job(model, set_to_none=False) for _ in range(2))
    change = last(SET_TO_NONE, job.facts())
    made = change.edit(job.built())
    for _ in range(2):
        plain.built().step()
        made.step()
    torch.testing.assert_close(weights(job.model), weights(plain.model))
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert all(parameter.grad is not None for parameter in plain.model.parameters())
    assert (change.rung, change.action, change.maths) == (
        "set_to_none",
        "zero_grad(set_to_none=True)",
        "same",
    )
    assert SET_TO_NONE.offer(Job(model).facts()) == "gradients are set to None already (torch's default)"


def test_whoever_drops_gradients_does_so_wholly() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = last(SET_TO_NONE, Facts(keeps_gradients=True)).edit(
        Built(model, (optimizer, SimpleNamespace()), lambda: None)  # type: ignore[arg-type]
    )
    for drop in (model.zero_grad, optimizer.zero_grad):
        for arguments in ((), (False,)):
            model(torch.ones(1, 1)).backward()
            drop(*arguments)
            assert model.weight.grad is None
    assert made.model is model
