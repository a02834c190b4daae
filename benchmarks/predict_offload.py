"""Host memory of offloaded optimizers as predicted without a GPU, next to what an H200's host measured.

    python benchmarks/predict_offload.py [--most PARAMETERS]

Each job of one rank in `cases/deepspeed_zero2_offload/results/h200.json` is predicted: bytes per parameter
above the libraries at the peak, and what pinned memory takes beyond what is asked for. Measured is how
much the resident set grew at most, and the same row of the ledger. DeepSpeed has to be importable.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parents[1] / "cases" / "deepspeed_zero2_offload" / "results" / "h200.json"
ROUNDING = "pinned rounding and cached"
PROGRAM = """
import torch
import memtriage

model = torch.nn.Sequential(
    *(
        torch.nn.Linear({width}, {width}, bias=False, device="cuda", dtype=torch.bfloat16)
        for _ in range({layers})
    )
)
"""
DEEPSPEED = """
import deepspeed

if {remedy}:
    memtriage.deepspeed_exact_host_memory(share_gradient_sums={share})
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": {micro_batches},
    "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
    "zero_optimization": {{
        "stage": 2, "overlap_comm": False,
        "offload_optimizer": {{"device": "cpu", "pin_memory": {pin}}},
    }},
}})
backward, step, zero_grad = engine.backward, engine.step, lambda: None
"""
OFFLOADED = """
optimizer = memtriage.OffloadedAdamW(model.parameters(), state_dtype=torch.{state})
engine, backward, step, zero_grad = model, torch.Tensor.backward, optimizer.step, optimizer.zero_grad
"""
TRAINING = """
for _ in range(4):
    for _ in range({micro_batches}):
        backward(engine(torch.randn(4, {width}, device="cuda", dtype=torch.bfloat16)).float().square().mean())
        step()
    zero_grad()
"""


def predicted(job: dict[str, Any], folder: Path) -> dict[str, int]:
    """Bytes by class at the predicted peak."""
    way = DEEPSPEED if job["optimizer"] == "deepspeed" else OFFLOADED
    program = folder / "program.py"
    program.write_text((PROGRAM + way + TRAINING).format(**{"share": False, **job}))
    ranks = ["--world-size", "1"] if way is DEEPSPEED else []
    command = [sys.executable, "-m", "memtriage", "predict", "--host", "--json", *ranks, str(program)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    host: dict[str, int] = json.loads(run.stdout)["host"]
    return host


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=float, default=float("inf"), help="parameters of the largest model")
    most = parser.parse_args().most
    titles = f"{'peak':>8}{'measured':>9}{'':>8}{'pinned':>8}{'measured':>9}"
    print(f"{'bytes per parameter':<44}{'million':>8}{titles}")
    with tempfile.TemporaryDirectory() as folder:
        for measured, *others in json.loads(MEASURED.read_text())["jobs"].values():
            parameters = measured["parameters"]
            if others or parameters > most:
                continue
            host = predicted(measured["job"], Path(folder))
            peak = (host["peak"] - host["libraries"]) / parameters
            grew = max(measured["peak"].values()) / parameters
            pinned, beyond = (
                host.get("pinned", 0) / parameters,
                measured["rows"].get(ROUNDING, 0) / parameters,
            )
            name = measured["job"]["name"].rpartition(",")[0]
            cells = f"{peak:>8.2f}{grew:>9.2f}{peak / grew - 1:>+8.1%}{pinned:>8.2f}{beyond:>9.2f}"
            print(f"{name:<44}{parameters / 1e6:>8,.0f}{cells}", flush=True)


if __name__ == "__main__":
    main()
