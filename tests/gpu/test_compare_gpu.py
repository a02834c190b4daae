"""Trials on a GPU: allocator settings reach the process, figures are CUDA's, dying of memory is a row."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MIB = 1024**2
JOB = """
    import os, sys, torch
    import memtriage

    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    if "--die" in sys.argv:
        torch.cuda.set_per_process_memory_fraction(0.01)
    held = torch.empty((64 + 512 * rank) << 20, dtype=torch.uint8, device="cuda")
    big = torch.empty(2 << 30, dtype=torch.uint8, device="cuda") if "--die" in sys.argv else None
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(7):
        loss = model(torch.randn(4096, 1024, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.9e}")
        peak = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del peak
        memtriage.mark("after refit")
    expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    print("segments", "expandable" if expandable else "fixed")
"""
HEAD = """
    [trials]
    script = "job.py"
    warmup = 4
    mark = "after refit"
    repeats = 1
    ranks = RANKS
    timeout = "120 s"
    [values]
    loss = 'loss (\\S+)'
    segments = 'segments (\\w+)'
"""
VARIANTS = """
    [[variant]]
    name = "plain"
    allocator = ""
    [[variant]]
    name = "expandable"
    allocator = { expandable_segments = true }
    [[variant]]
    name = "dies"
    args = ["--die"]
    [[target]]
    metric = "loss"
    variant = "expandable"
    equals = "plain"
    [[target]]
    metric = "reserved"
    variant = "plain"
    at_most = "1.1 x allocated + 1 GiB"
"""


def compare(folder: Path, text: str) -> dict[str, Any]:
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    (folder / "trials.toml").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "memtriage", "compare", "trials.toml", "-o", "out", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_variants_on_a_gpu(tmp_path: Path, keep: Callable[[str, Any], None]) -> None:
    report = compare(tmp_path, HEAD.replace("RANKS", "1") + VARIANTS)
    keep("compare", report)
    plain, expandable, dies = report["variants"]
    assert report["device"] == "cuda"
    assert plain["finished"] == expandable["finished"] == 1, report
    assert plain["values"]["segments"]["last"] == "fixed"
    assert expandable["values"]["segments"]["last"] == "expandable"
    figures = plain["figures"]
    assert figures["allocated"]["value"] >= 64 * MIB
    assert figures["peak_allocated"]["value"] >= figures["allocated"]["value"] + 256 * MIB
    assert figures["peak_reserved"]["value"] >= figures["reserved"]["value"]
    assert figures["outside"]["value"] > 0
    assert dies["failures"][0]["kind"] == "out_of_memory"
    assert [target["verdict"] for target in report["targets"]] == ["met", "met"]


def test_ranks_that_differ(tmp_path: Path, keep: Callable[[str, Any], None]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    report = compare(tmp_path, HEAD.replace("RANKS", "2") + '\n    [[variant]]\n    name = "two"\n')
    keep("compare_ranks", report)
    (row,) = report["variants"]
    assert row["finished"] == 1, report
    ranks = row["figures"]["allocated"]["by_rank"]
    assert ranks["1"] - ranks["0"] == 512 * MIB
    assert row["figures"]["allocated"]["differing_ranks"] == [1]
