"""Predictions of a billion parameters under DDP and FSDP2 against two GPUs, at the first three steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtriage
from memtriage.predict.build import load

RANKED = Path(__file__).parent / "ranked.py"
RANKS = 2
CLOSE = 0.03


@pytest.mark.parametrize("kind", ["ddp", "views", "fsdp2"])
def test_the_first_three_steps_are_predicted_within_three_per_cent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setenv("RANKED_KIND", kind)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, str(RANKED), str(tmp_path)],
        capture_output=True, text=True, timeout=240, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    build = load(f"{RANKED}:build")
    far = []
    for rank in range(RANKS):
        prediction = memtriage.predict(build, steps=3, world_size=RANKS, rank=rank)
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        for number, (step, real) in enumerate(zip(prediction.steps, measured, strict=True)):
            for name in ("peak_allocated", "peak_reserved", "end_allocated"):
                error = getattr(step, name) / real[name] - 1
                print(f"{kind} rank {rank} step {number} {name}: {real[name]} {error:+.2%}")
                if abs(error) > CLOSE:
                    far.append((rank, number, name, error))
        print(f"{kind} rank {rank} outside: {measured[-1]['outside']}, {prediction.outside_allocator}")
    assert not far
