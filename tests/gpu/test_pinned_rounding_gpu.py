"""The finding about rounded page-locked memory: the waste that it predicts is what the resident set shows."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
NOISE = 8 * MIB
"""Bytes by which the resident set of a process with CUDA moves by itself."""

SCRIPT = """
    import json
    import psutil
    import torch

    def resident():
        return psutil.Process().memory_info().rss

    def train(model, optimizer):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def main():
        torch.empty(1, pin_memory=True)
        model = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):  # with the first census, which takes memory of its own
            train(model, optimizer)
        before = resident()
        buffers = {
            "masters": torch.empty(300_000_000, dtype=torch.float32, pin_memory=True),
            "staging": torch.ones(150_000_000, dtype=torch.bfloat16).pin_memory(),
            "power of two": torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True),
        }
        asked = sum(buffer.nbytes for buffer in buffers.values())
        for step in range(20):
            train(model, optimizer)
        print("FIGURES" + json.dumps({"asked": asked, "grown": resident() - before}), flush=True)

    main()
"""


def test_the_predicted_waste_is_what_the_resident_set_shows(
    tmp_path: Path, keep: Callable[[str, Any], None]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "memtriage", "run", "-o", str(tmp_path / "runs"), "--json", str(out)]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.partition("FIGURES")[2].splitlines()[0])
    findings = [load for load in json.loads(out.read_text())["findings"] if load["kind"] == "pinned_rounding"]
    assert len(findings) == 1, done.stderr[-3000:]
    predicted, shown = findings[0]["bytes"], figures["grown"] - figures["asked"]
    keep(
        "pinned_rounding",
        figures | {"predicted": predicted, "shown": shown, "evidence": findings[0]["evidence"]},
    )
    # 1.2 GB take 2 GiB, 300 MB take 512 MiB, 64 MiB take themselves.
    assert predicted == (2 << 30) - 1_200_000_000 + (512 << 20) - 300_000_000
    # Besides tensors, the process grows by what twenty steps, their marks and a census need.
    assert abs(shown - predicted) <= 4 * NOISE
    assert "masters" in findings[0]["holder"]
