"""The case `fused_attention_ctx`: the twin in pure torch, its residue named, and the cure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "cases" / "fused_attention_ctx" / "train.py"
LAYERS = 8
KEPT = LAYERS * 4 * (2 * 256 * 4 * 64 + 4)
"""Of each layer q, k, v and the output: batch 2, sequence 256, 4 heads of 64, a byte each; and a scale."""


def steps(out: str) -> list[tuple[str, int]]:
    found = re.findall(r"loss ([\d.]+), ([-\d,]+) bytes stay", out)
    return [(loss, int(stays.replace(",", ""))) for loss, stays in found]


def run(folder: Path, *arguments: str, watched: bool = False) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    watch = ["-m", "memtriage", "run", "-o", "run", "--json", "report.json"] if watched else []
    done = subprocess.run(
        [sys.executable, *watch, str(SCRIPT), "--device", "cpu", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text()) if watched else {}
    return steps(done.stdout), report


def test_what_stays_after_backward_is_named_and_the_cure_lets_it_go_with_the_same_losses(
    tmp_path: Path,
) -> None:
    plain, report = run(tmp_path, watched=True)
    assert report["verdict"] == "residue"
    (finding,) = report["findings"]
    assert "FusedAttnFuncBackward -> ctx.tensor_objects[" in finding["holder"]
    assert finding["bytes"] == KEPT
    cured, _ = run(tmp_path, "--cure", "--steps", "2")
    assert len(cured) == 2
    for (loss, stays), (same, fewer) in zip(plain, cured, strict=False):
        assert same == loss
        assert stays - fewer == KEPT  # the loss itself stays in both


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--library", "te", "--device", "cpu"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--library te needs a CUDA device" in done.stderr
