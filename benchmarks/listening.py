"""What `memtriage run --listen` costs a job, and what each question costs it: times of a training step.

    python benchmarks/listening.py [--steps N] [--rounds N] [--every SECONDS] [--json FILE]

A small transformer trains, on a GPU where there is one, watched by memtriage, in rounds of three variants
that take turns: without `--listen`, with it, and with it while a census is asked for now and then. So another
load of the machine falls on all of them. The script itself takes the times, of its steps 6 and on (the
watch's own first census is at step 3). Told are the median, the 99th percentile and the longest step of all
rounds together, and what the answers say of themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

VARIANTS: Final = ("plain", "listening", "asked")
FIRST_STEP: Final = 6

SCRIPT: Final = """\
import json, sys, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
times = []
for step in range(int(sys.argv[1])):
    began = time.perf_counter()
    model(torch.randn(4, 32, 128, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
json.dump(times, open(sys.argv[2], "w"))
"""


def main() -> None:
    args = _arguments()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    answers: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        for _ in range(args.rounds):
            for variant in VARIANTS:
                found, said = _run(variant, script, args.steps, args.every)
                times[variant] += found[FIRST_STEP - 1 :]
                answers += said
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; load {os.getloadavg()[0]:.1f}", flush=True)
    for variant in VARIANTS:
        each = sorted(times[variant])
        late = each[int(0.99 * len(each))]
        print(
            f"{variant:<10} {len(each):5} steps  median {1e3 * statistics.median(each):7.2f} ms  "
            f"99 % {1e3 * late:7.2f} ms  longest {1e3 * each[-1]:8.2f} ms"
        )
    if answers:
        paused = [answer["paused_s"] for answer in answers]
        waited = [answer["waited_s"] for answer in answers]
        print(
            f"{len(answers)} answers, {round(statistics.median(answer['objects'] for answer in answers)):,} "
            f"objects: waited {1e3 * statistics.median(waited):.1f} ms, paused "
            f"{1e3 * statistics.median(paused):.0f} ms (medians)"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "times_s": times, "answers": answers}))


def _run(variant: str, script: Path, steps: int, every_s: float) -> tuple[list[float], list[dict[str, Any]]]:
    """The times of a job's steps, and what was answered meanwhile."""
    told = script.with_suffix(".json")
    record = script.with_name("record")
    option = [] if variant == "plain" else ["--listen"]
    command = [sys.executable, "-m", "memtriage", "run", *option, "-o", str(record), str(script)]
    job = subprocess.Popen([*command, str(steps), str(told)], stderr=subprocess.DEVNULL)
    answers = []
    while job.poll() is None:
        time.sleep(every_s)
        if variant == "asked" and job.poll() is None:
            asked = [sys.executable, "-m", "memtriage", "census", "--pid", str(job.pid), "--json"]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.returncode == 0:
                answers += json.loads(done.stdout)["answers"]
    times: list[float] = json.loads(told.read_text(encoding="utf-8"))
    told.unlink()
    return times, [answer for answer in answers if answer["step"] is not None]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What listening, and being asked, costs a job.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two questions")
    parser.add_argument("--json", type=Path, help="write every time and answer there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
