"""Two ranks on two GPUs (NCCL; DDP and FSDP2): a leak on one rank is found, and that rank is named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def main():
        kind, leaking_rank = sys.argv[1], int(sys.argv[2])
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        model = nn.Sequential(*[Block(512) for _ in range(4)]).cuda()
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for block in model:
                fully_shard(block)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        history = []
        for step in range(26):
            x = torch.randn(64, 512, device="cuda")
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == leaking_rank:
                history.append(x)
        torch.cuda.synchronize()
        dist.destroy_process_group()

    main()
"""


def run(tmp_path: Path, kind: str, leaking_rank: int) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    out = tmp_path / "out.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    watch = ["-m", "memtriage", "run", "-o", str(tmp_path / "runs"), "--json", str(out)]
    done = subprocess.run(
        [*launcher, *watch, str(script), kind, str(leaking_rank)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    print(done.stderr[-8000:])
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_leak_on_one_rank_names_it(tmp_path: Path, kind: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    report = run(tmp_path, kind, leaking_rank=1)
    assert report["ranks"] == {"seen": 2, "of": 2}
    assert report["verdict"] == "leak"
    leaks = [finding for finding in report["findings"] if finding["kind"] == "leak"]
    assert {finding["rank"] for finding in leaks} == {1}
    assert leaks[0]["holder"] == "frame main(): history[*]"
    assert leaks[0]["device"] == "cuda:1"
    assert leaks[0]["bytes_per_step"] == 64 * 512 * 4
    rows = report["ledger"]["cuda:0"]
    total = sum(row["bytes"] for row in rows)
    assert sum(abs(row["bytes"]) for row in rows if row["row"] == "unexplained") <= 0.005 * total


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_without_a_leak_both_ranks_are_clean(tmp_path: Path, kind: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    report = run(tmp_path, kind, leaking_rank=-1)
    assert report["ranks"] == {"seen": 2, "of": 2}
    assert report["verdict"] == "clean", report["findings"]
