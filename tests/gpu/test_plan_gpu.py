"""Plans kept on a GPU: with the process capped to the budget, the choice trains and what is cheaper does not.

Every workload is planned, then trained with the plan's changes and with the next cheaper ones, each in a
process of its own; all workloads at once. What was planned, predicted and measured is printed, and written to
`$MEMTRIAGE_GPU_OUT/plan.json` where that folder is named, whatever comes of the tests.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("planned.py")
DEADLINE_S = 110
CLEARLY_OVER = 0.05
"""Share of the budget by which the next cheaper changes are predicted to exceed it."""
ERROR_LENGTH = 2000
WAYS = ("chosen", "cheaper")

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


def run(arguments: list[str], conf: str = "") -> str:
    """What the script printed last.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = conf
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{arguments}: not done within {DEADLINE_S} s") from late
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-ERROR_LENGTH:]}")
    lines = done.stdout.splitlines()
    return lines[-1] if lines else ""


def planned_and_trained(name: str, file: Path) -> dict[str, Any]:
    """The plan of a workload, and what came of training by it."""
    begun = time.monotonic()
    budget, _ = PAIRS[name]
    run(["plan", name, budget, str(file)])
    plan = pickle.loads(file.read_bytes())
    del plan["facts"]
    plan["planned_s"] = time.monotonic() - begun
    with ThreadPoolExecutor(len(WAYS)) as pool:
        futures = {
            which: pool.submit(run, ["train", str(file), which], plan["conf"][which]) for which in WAYS
        }
    plan["trained"], plan["errors"] = {}, {}
    for which, future in futures.items():
        try:
            plan["trained"][which] = json.loads(future.result())
        except (RuntimeError, ValueError) as error:
            plan["errors"][which] = str(error)
    plan["all_s"] = time.monotonic() - begun
    return plan


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, keep: Callable[[str, Any], None]
) -> dict[str, dict[str, Any]]:
    """By workload the plan, and what came of training by it; or `error`."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("plans")
    with ThreadPoolExecutor(len(PAIRS)) as pool:
        futures = {name: pool.submit(planned_and_trained, name, folder / f"{name}.pickle") for name in PAIRS}
    found: dict[str, dict[str, Any]] = {}
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except (RuntimeError, pickle.UnpicklingError) as error:
            found[name] = {"error": str(error)}
    keep("plan", found)
    return found


def one(results: dict[str, dict[str, Any]], name: str, which: str) -> dict[str, Any]:
    """The result of a workload, if it was planned and trained so."""
    result = results[name]
    assert "error" not in result, result["error"]
    assert which not in result["errors"], result["errors"][which]
    return result


@pytest.mark.parametrize("name", PAIRS)
def test_the_choice_trains_within_the_budget(name: str, results: dict[str, Any]) -> None:
    result = one(results, name, "chosen")
    assert result["fits"]
    assert PAIRS[name][1] in result["chosen"][-1]
    assert result["trained"]["chosen"]["steps"] == 3
    assert result["trained"]["chosen"]["reserved"] <= result["limit"]


@pytest.mark.parametrize("name", PAIRS)
def test_the_next_cheaper_changes_run_out_of_memory(name: str, results: dict[str, Any]) -> None:
    result = one(results, name, "cheaper")
    assert result["cheaper_needs"] >= (1 + CLEARLY_OVER) * result["budget"]
    assert result["trained"]["cheaper"]["steps"] < 3
