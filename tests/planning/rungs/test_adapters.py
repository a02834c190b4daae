"""LoRA: which layers get adapters, and that they alone are trained."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.planning.facts import Facts
from memtriage.planning.rungs import adapters
from memtriage.planning.rungs.adapters import LORA, add_adapters, linear_layers
from memtriage.prediction.build import Built
from support.training_jobs import facts_of, language_job, last


def test_adapters_alone_are_trained(language_model: Any) -> None:
    pytest.importorskip("peft")
    before = {name: each.clone() for name, each in language_model.named_parameters()}
    change = last(LORA, facts_of(language_job(copy.deepcopy(language_model))))
    assert (change.maths, change.counts_work, LORA.on_request) == ("different", True, "it changes the task")
    assert change.displaces == {"8-bit optimizer", "offloaded optimizer"}
    job = change.edit(language_job(language_model))
    for _ in range(2):
        job.step()
    trained = {name for name, each in language_model.named_parameters() if each.requires_grad}
    assert trained and all("lora" in name for name in trained)
    now = {name.replace(".base_layer", ""): each for name, each in language_model.named_parameters()}
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert any(now[name].abs().sum() > 0 for name in trained if "lora_B" in name)
    (group,) = job.optimizers[0].param_groups
    assert len(group["params"]) == len(trained)
    assert LORA.offer(facts_of(job)) == "a part of the parameters is frozen already"


def test_the_first_group_gets_the_adapters_and_states_are_made_anew() -> None:
    pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    optimizer = torch.optim.Adam([{"params": layer.parameters()} for layer in model])
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    built = Built(model, (SimpleNamespace(optimizer=optimizer),), lambda: None)  # type: ignore[arg-type]
    assert add_adapters(built) is built
    first, second = (group["params"] for group in optimizer.param_groups)
    one = [((16, 4), torch.float32), ((4, 16), torch.float32)]
    assert [(tuple(each.shape), each.dtype) for each in first] == 2 * one
    assert second == [] and not optimizer.state
    assert [name for name, each in model.named_parameters() if each.requires_grad] == [
        f"{layer}.lora_{part}.default.weight" for layer in "01" for part in "AB"
    ]


def test_linear_layers_are_all_but_the_output_of_a_language_model(language_model: Any) -> None:
    names = linear_layers(language_model)
    per_layer = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert [name.rpartition(".")[2] for name in names] == [*per_layer] * 4
    plain = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.Bilinear(1, 1, 1), nn.Linear(2, 2))
    assert linear_layers(plain) == ["0", "3"]


def test_linear_layers_of_gpt_2_have_a_class_of_their_own() -> None:
    from transformers.pytorch_utils import Conv1D

    assert linear_layers(nn.Sequential(Conv1D(2, 2), nn.Linear(2, 2))) == ["0", "1"]


def test_why_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    assert LORA.offer(Facts()) == "it is simulated with peft, which is not installed: pip install peft"
