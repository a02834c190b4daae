"""A job on a GPU is asked for a census while it trains: who holds its device memory, and nothing changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_JOB = """
import os, sys
import torch

def train():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [torch.zeros(300_011, device="cuda") for _ in range(3)]
    levels = []
    step = 0
    while not os.path.exists(sys.argv[1]):
        model(torch.ones(256, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated())
        if step == 20:
            print("ready", file=sys.stderr, flush=True)
    assert len(set(levels[5:])) == 1, sorted(set(levels[5:]))

train()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(_JOB)
    command = [sys.executable, "-m", "memtriage", "run", "--listen", "-o", "record", "train.py", "stop"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = []
    while said[-1:] != ["ready\n"]:
        said.append(process.stderr.readline())
        assert said[-1], "".join(said)
    yield process, folder
    process.kill()
    process.wait()
    process.stderr.close()


def ask(pid: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "memtriage", "census", "--pid", str(pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)["answers"]
    print({key: answers[0][key] for key in ("step", "doing", "waited_s", "paused_s", "objects", "nodes")})
    return answers[0]


def test_who_holds_device_memory(job: tuple[subprocess.Popen[str], Path]) -> None:
    answer = ask(job[0].pid)
    kept = next(row for row in answer["holders"] if row["holder"] == "frame train(): kept[*]")
    assert (kept["count"], kept["bytes"], kept["device"]) == (3, 3 * 4 * 300_011, "cuda:0")
    rows = answer["ledger"]["cuda:0"]
    assert {"parameter", "optimizer state"} <= {row["owner"] for row in rows}


def test_asking_ten_times_changes_no_level_and_ends_nothing(
    job: tuple[subprocess.Popen[str], Path],
) -> None:
    process, folder = job
    steps = [ask(process.pid)["step"] for _ in range(10)]
    assert steps == sorted(steps) and steps[-1] > steps[0]
    (folder / "stop").touch()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait() == 0, said  # the script itself compares its levels
    assert "CLEAN" in said
