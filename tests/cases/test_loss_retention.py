"""The case `loss_retention`, as its page has it, at a size that a CPU runs in seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASE = Path(__file__).parents[2] / "cases" / "loss_retention"
KEPT = 2 * 256 * 128 * 4 + 4
"""Of each micro-batch: the head's input and its gradient, 256 tokens of 128 floats each, and the loss."""


def watched(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "memtriage", "run", "-o", str(tmp_path / "run"), "--json", "result.json",
         "--per-microbatch", str(CASE / "train.py"), "--device", "cpu", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "result.json").read_text()), done.stderr


def test_kept_losses_are_named_by_micro_batch_8_and_the_fix_is_clean(tmp_path: Path) -> None:
    leaking, printed = watched(tmp_path, "--micro-batches", "16")
    assert leaking["verdict"] == "leak"
    finding = leaking["findings"][0]
    assert "context.losses['lm_loss'][*] -> grad_fn WrapBackward -> ctx.context[" in finding["holder"]
    assert KEPT <= finding["bytes_per_microbatch"] <= 1.5 * KEPT  # with the nodes of its graph
    assert "detach" in finding["fix"]
    assert finding["allocated_at"].startswith("train.py:")
    lines = [line for line in printed.splitlines() if "micro-batch" in line]
    assert len(re.findall(r"step 0 micro-batch \d+: cpu .* allocated \(\+", printed)) >= 12
    named = next(number for number, line in enumerate(lines) if "grows by" in line)
    at = re.search(r"micro-batch (\d+):", lines[named - 1])
    assert at is not None and int(at[1]) <= 8
    # Nobody knows of steps before the first one has ended.
    assert re.search(r"; at this rate cpu \(limit .*\) is full at backward [\d,]+$", lines[named])

    cured, printed = watched(tmp_path, "--micro-batches", "32", "--detach", "--free-batch")
    assert cured["verdict"] == "clean"
    assert "grows by" not in printed


@pytest.mark.long
def test_the_speeds_compare_the_three_ways_within_rounds(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    done = subprocess.run(
        [sys.executable, str(CASE / "speed.py"), "--device", "cpu", "--hidden", "128", "--tokens", "16",
         "--layers", "0", "--micro-batches", "2", "--rounds", "2", "--out", str(out)],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {way: len(times) for way, times in result["all_ms"].items()} == {
        "leaking": 2, "cured": 2, "cured, watched": 2
    }  # fmt: skip
    for pair in ("leaking to cured", "watched to unwatched"):
        assert 0 < result[pair]["low"] <= result[pair]["ratio"] <= result[pair]["high"]
    ratios = [
        watched / cured
        for watched, cured in zip(result["all_ms"]["cured, watched"], result["all_ms"]["cured"], strict=True)
    ]
    assert result["watched to unwatched"]["ratio"] == pytest.approx(sum(ratios) / 2, rel=0.02)
