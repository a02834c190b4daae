"""What the commands call in the traced child process: targets and options as JSON, on small real programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.prediction import RankPrediction
from memtriage.planning import traced_commands

WIDTH = 64
WEIGHT = 4 * WIDTH * WIDTH
PROGRAM = f"""
import sys
import torch
from torch import nn
from support.training import training


def build(device):
    model = nn.Linear({WIDTH}, {WIDTH}, bias=False).to(device)
    return training(model, lambda: model(torch.ones(8, {WIDTH}, device=device)).sum(), torch.optim.AdamW)


def of_length(device):
    model, optimizer, step = build(device)

    def of(length):
        model(torch.ones(length, {WIDTH}, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, of


if __name__ == "__main__":
    model, optimizer, step = build("cuda")
    for _ in range(int(sys.argv[1])):
        step()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with build functions, which is a script too, and a module."""
    file = tmp_path / "train_small.py"
    file.write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return file


def predict(target: dict[str, Any], **options: Any) -> RankPrediction:
    return traced_commands.predict(target, {"steps": 2, **options})


def test_a_build_function_is_predicted(program: Path) -> None:
    result = predict({"name": f"{program}:build"}, world_size=None)
    assert result.prediction.by_owner["optimizer state"] == 2 * WEIGHT
    assert len(result.prediction.steps) == 2
    assert (result.host, result.sent, result.missed) == (None, {}, False)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("named", ["script", "module"])
def test_a_script_and_a_module_run_with_their_arguments(program: Path, named: str) -> None:
    target = {"name": str(program)} if named == "script" else {"module": program.stem}
    result = predict({**target, "arguments": ["2"]}, host=False)
    assert result.prediction.by_owner["optimizer state"] == 2 * WEIGHT
    assert result.host is None


def test_the_host_s_memory_is_followed_where_asked_for(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What libraries take is measured in processes of their own, which take their time.
    monkeypatch.setattr("memtriage.prediction.trace.measure", lambda *_: None)
    host = predict({"name": str(program), "arguments": ["1"]}, host=True, steps=1).host
    assert host is not None and host.stretches[0]["peak"] > 0


def test_a_module_named_like_a_build_function_is_none(program: Path) -> None:
    with pytest.raises(ValueError, match="no module named"):
        predict({"module": "nowhere:build"})


def test_a_job_of_several_processes_knows_its_size(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    predict({"name": f"{program}:build"}, world_size=2, rank=1, host=False)
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_configuration_is_trained_as_asked(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 32,
        "vocab_size": 96, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    owners = {
        optimizer: predict(
            {"hf_config": str(file), "training": {"batch": 1, "seq": 8, "optimizer": optimizer}}
        ).prediction.by_owner
        for optimizer in ("sgd", "adamw")
    }
    assert owners["adamw"]["optimizer state"] > owners["sgd"].get("optimizer state", 0)
    with pytest.raises(ValueError, match="--horizon needs batches that differ"):
        predict({"hf_config": str(file), "training": {"ddp": 1}}, horizon=9)


@pytest.mark.parametrize(("lengths", "shapes"), [([8, 16, 8], 2), ([[8], [16]], 2), ({"8": 3}, 1), (None, 1)])
def test_a_horizon_takes_an_input_for_each_step(
    program: Path, tmp_path: Path, lengths: Any, shapes: int
) -> None:
    options: dict[str, Any] = {"horizon": 6, "lengths": None, "limit": 1 << 30}
    if lengths is not None:
        options["lengths"] = str(tmp_path / "lengths.json")
        Path(options["lengths"]).write_text(json.dumps(lengths))
    name = "build" if lengths is None else "of_length"
    horizon = predict({"name": f"{program}:{name}"}, **options).prediction.horizon
    assert horizon is not None
    assert (horizon.steps, horizon.shapes) == (6, shapes)


def test_a_horizon_of_a_script(program: Path) -> None:
    result = predict({"name": str(program), "arguments": ["6"]}, horizon=6)
    assert result.prediction.horizon is not None and result.prediction.horizon.steps == 6


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ({}, {}, "nothing to trace; expected a build function, a script, a module or a configuration"),
        (
            {"name": "{program}"},
            {"horizon": 6, "lengths": "lengths.json"},
            "--lengths needs a build function whose step takes a length; the lengths of {program} are",
        ),
        (
            {"name": "{program}:of_length"},
            {"horizon": 6, "lengths": "nowhere.json"},
            "--lengths nowhere.json: ",
        ),
        (
            {"name": "{program}:of_length"},
            {"horizon": 6, "lengths": "{program}"},
            "expected JSON: a list such",
        ),
    ],
)
def test_what_cannot_be_used_is_said(
    program: Path, target: dict[str, str], options: dict[str, Any], said: str
) -> None:
    def named(value: Any) -> Any:
        return value.format(program=program) if isinstance(value, str) else value

    with pytest.raises(ValueError) as raised:
        predict(
            {key: named(value) for key, value in target.items()},
            **{key: named(value) for key, value in options.items()},
        )
    assert said.format(program=program) in str(raised.value)


def test_a_plan_and_blocks_for_a_target(program: Path) -> None:
    target = {"name": f"{program}:build"}
    plan = traced_commands.plan(target, {"budget": "2GiB"})
    assert plan.fits and plan.budget == 2 << 30 and plan.steps == []
    priming = traced_commands.prime(target, {"allocator_conf": "expandable_segments:True"})
    assert priming.allocated >= 4 * WEIGHT and priming.blocks == []
    assert priming.reason is not None and "expandable" in priming.reason


def test_progress_is_told_step_by_step(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(traced_commands, "report_progress", told.append)
    predict({"name": f"{program}:build"})
    assert told == ["in step 1 of 2", "in step 2 of 2"]
