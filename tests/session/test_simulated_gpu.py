"""A whole watched run of a program that uses CUDA, on a machine without it: every part meets a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.runs import MIB
from support.simulated_cuda import FOREIGN

TESTS = Path(__file__).parents[1]
CAPACITY = 2 << 30
KEPT = 6 * MIB
PROGRAM = """
import sys
import torch
from support.raw_snapshot import forward, optimizer, user
from support.simulated_cuda import SimulatedCuda

torch.manual_seed(0)
steps, kept = map(int, sys.argv[1:])
cuda = SimulatedCuda(CAPACITY)
weights = torch.nn.Linear(8, 8)
training = torch.optim.AdamW(weights.parameters())
on_device = cuda.allocate(200 << 20, user(9))
for step in range(steps):
    activations = cuda.allocate(60 << 20, forward(12))
    if kept:
        cuda.allocate(kept, user(14))
    weights(torch.ones(4, 8)).sum().backward()
    training.step()
    training.zero_grad()
    cuda.free(activations)
"""


def run(folder: Path, steps: int, kept: int) -> tuple[int, dict[str, Any]]:
    script = folder / "train.py"
    script.write_text(PROGRAM.replace("CAPACITY", str(CAPACITY)))
    command = [sys.executable, "-m", "memtriage", "run", "--json", str(folder / "report.json"), str(script)]
    done = subprocess.run(
        [*command, str(steps), str(kept)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "MEMTRIAGE_DIR": str(folder / "runs")},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert "could not" not in done.stderr, done.stderr
    return done.returncode, report


def test_a_run_that_keeps_nothing_is_clean_and_its_ledger_closes(tmp_path: Path) -> None:
    status, report = run(tmp_path, 30, 0)
    assert (status, report["verdict"], report["steps"]) == (0, "clean", 30)
    rows = {row["row"]: row["bytes"] for row in report["ledger"]["cuda:0"]}
    assert rows == {"requested": 200 * MIB, "releasable": 60 * MIB, "context": FOREIGN}


def test_growth_that_no_tensor_holds_is_a_leak_of_its_size(tmp_path: Path) -> None:
    _, report = run(tmp_path, 40, KEPT)
    assert report["verdict"] == "leak"
    (leak,) = (finding for finding in report["findings"] if finding["kind"] == "leak")
    assert (leak["device"], leak["bytes_per_step"]) == ("cuda:0", KEPT)
    assert "GPU" in leak["mechanism"] and "CPU" not in leak["fix"]
    (row,) = (row for row in report["ledger"]["cuda:0"] if row["owner"] == "c++ only")
    assert "train.py:14" in row["detail"]


def test_a_failing_allocation_is_seen_from_inside(tmp_path: Path) -> None:
    status, report = run(tmp_path, 2 * CAPACITY // KEPT, KEPT)
    assert (status, report["verdict"]) == (1, "out_of_memory")
    (death,) = (finding for finding in report["findings"] if finding["kind"] == "out_of_memory")
    segment = 20 * MIB
    fitted = (CAPACITY - FOREIGN - 260 * MIB) // segment * (segment // KEPT)
    assert (death["device"], death["bytes"], death["step"]) == ("cuda:0", KEPT, fitted)
