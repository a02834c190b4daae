"""The case's measurement on the CPU, as far as it goes without DeepSpeed, and its tables."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CASE = Path(__file__).parents[2] / "cases" / "deepspeed_zero2_offload"
MIB = 1 << 20


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(CASE.parent))
    monkeypatch.syspath_prepend(str(CASE))
    yield importlib.import_module("run")
    for name in ("run", "measure", "page", "tables"):
        sys.modules.pop(name, None)


def test_what_is_measured_closes_and_has_the_states_names() -> None:
    job = {"name": "tiny", "optimizer": "memtriage", "layers": 4, "width": 1024, "device": "cpu"}
    done = subprocess.run(
        [sys.executable, str(CASE / "measure.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    parameters = 4 * 1024 * 1024
    assert result["parameters"] == parameters
    assert sum(result["rows"].values()) == result["ledger"]
    states = {name: nbytes for name, nbytes in result["rows"].items() if "optimizer.state" in name}
    assert sorted(states.values()) == [4 * parameters] * 3
    assert abs(result["after"]["step 4"] - result["ledger"]) <= 4 * MIB
    assert result["trimmed"] >= 12 * parameters


def outcome(parameters: int, held: int, *, ranks: int = 1, **job: Any) -> list[dict[str, Any]]:
    known = {
        "name": "", "optimizer": "memtriage", "layers": 1, "width": 1, "device": "cuda", "pin": True,
        "remedy": False,
    }  # fmt: skip
    one = {
        "job": known | job,
        "parameters": parameters,
        "imported": 1,
        "baseline": 2,
        "start": {"libraries": 50_000_000, "stacks": 3},
        "after": {"initialize": 10, "step 4": held},
        "peak": {"initialize": 20, "step 1": held + 5, "step 4": held},
        "rows": {"exp_avg, pageable": held - 3, "libraries": 3},
        "ledger": held,
        "trimmed": held,
        "calls": [],
        "digest": "0",
    }
    return [one] * ranks


def test_ranks_are_summed(case: ModuleType) -> None:
    words = case.line("two ranks", outcome(1000, 6000, ranks=2)).split()
    assert words == ["two", "ranks", "0.02", "0.04", "12.00", "12.01", "12.00", "0.00"]


def test_two_sizes_tell_the_constant(case: ModuleType) -> None:
    result = {
        "ours, 1": outcome(100_000_000, 1_280_000_000),
        "ours, 2": outcome(200_000_000, 2_480_000_000),
        "rounded, 1": outcome(100_000_000, 1, optimizer="deepspeed"),
        "rounded, 2": outcome(200_000_000, 2, optimizer="deepspeed"),
        "failed, 1": "why",
    }
    assert case.page.slopes(result) == {"ours": (pytest.approx(12), pytest.approx(80_000_000))}


def test_a_table_sums_up_what_is_small(case: ModuleType) -> None:
    lines = list(case.table(outcome(1000, 12_000)))
    assert "libraries 50" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["12.00", "0.00", "12.00"]


def test_every_job_has_a_name_of_its_own(case: ModuleType) -> None:
    for jobs in (list(case.gpu_jobs(2)), list(case.cpu_jobs())):
        assert len({job.name for job in jobs}) == len(jobs)
        assert {job.device for job in jobs} in ({"cuda"}, {"cpu"})
