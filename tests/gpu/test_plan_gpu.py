"""Plans kept on a GPU: with the process capped to the budget, the choice trains and what is cheaper does not.

Every workload is planned, then trained with the plan's changes and with the next cheaper ones, each in a
process of its own; all run at once.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("planned.py")
DEADLINE_S = 110
CLEARLY_OVER = 0.05
"""Share of the budget by which the next cheaper changes are predicted to exceed it."""

PAIRS = {
    "micro_batch": ("6GiB", "micro-batch"),
    "narrow_blocks": ("3.3GiB", "checkpoint"),
    "wide_layers": ("7.4GiB", "fused"),
    "kept_gradients": ("8.8GiB", "set_to_none"),
    "single_precision": ("9GiB", "autocast"),
    "eager_attention": ("8GiB", "scaled_dot_product_attention"),
    "large_vocabulary": ("8GiB", "chunks"),
    "two_changes": ("2.6GiB", "micro-batch"),
}
"""By workload the budget, and what the dearest change of the plan is to be."""


def run_all(commands: dict[Any, tuple[list[str], dict[str, str]]]) -> dict[Any, str]:
    """What each command printed; all run at once."""
    running = {
        key: subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for key, (arguments, environment) in commands.items()
    }
    try:
        printed = {}
        for key, process in running.items():
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"{key}: {errors[-2000:]}"
            printed[key] = out
        return printed
    finally:
        for process in running.values():
            process.kill()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Plans, and what came of training by them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("plans")
    files = {name: folder / f"{name}.pickle" for name in PAIRS}
    run_all({name: (["plan", name, budget, str(files[name])], {}) for name, (budget, _) in PAIRS.items()})
    plans = {name: pickle.loads(file.read_bytes()) for name, file in files.items()}
    trained = run_all(
        {
            (name, which): (
                ["train", str(files[name]), which],
                {"PYTORCH_CUDA_ALLOC_CONF": plan["conf"][which]},
            )
            for name, plan in plans.items()
            for which in ("chosen", "cheaper")
        }
    )
    yield {
        name: {
            **plan,
            "trained": {
                which: json.loads(trained[name, which].splitlines()[-1]) for which in ("chosen", "cheaper")
            },
        }
        for name, plan in plans.items()
    }


@pytest.mark.parametrize("name", PAIRS)
def test_the_choice_trains_within_the_budget(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, result["chosen"], result["chosen_needs"], result["limit"], result["trained"]["chosen"])
    assert result["fits"]
    assert PAIRS[name][1] in result["chosen"][-1]
    assert result["trained"]["chosen"]["steps"] == 3


@pytest.mark.parametrize("name", PAIRS)
def test_the_next_cheaper_changes_run_out_of_memory(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, result["cheaper"], result["cheaper_needs"], result["budget"], result["trained"]["cheaper"])
    assert result["cheaper_needs"] >= (1 + CLEARLY_OVER) * result["budget"]
    assert result["trained"]["cheaper"]["steps"] < 3
