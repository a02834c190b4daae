"""Runs the case's variants under `memtriage run`, then times them: `measure.py --out FILE`.

Each variant is a process of its own. On a GPU those whose memory is measured run side by side; then the
speeds, alone. Two minutes on an H200, three on two CPU cores.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import measuring  # noqa: E402

import page  # noqa: E402

FIXED = ("--detach", "--free-batch")
LIKE_THE_REPORT = (
    "--hidden", "4096", "--intermediate", "4096", "--layers", "1", "--tokens", "10496",
    "--vocabulary", "8192",
)  # fmt: skip
"""Keeps 2 x 82 MiB of each micro-batch, as much as the report's."""
QUICK = ("--hidden", "4096", "--layers", "0", "--tokens", "10496", "--vocabulary", "256")
"""The same bytes of each micro-batch, with next to nothing to compute: for the long steps."""
ON_CPU = ("--hidden", "128", "--tokens", "256")
CAP_GIB = 24
FIRST = 8
"""Micro-batch by which growth shall be found."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: its name, the number of micro-batches, the script's further arguments."""

    name: str
    micro_batches: int
    arguments: tuple[str, ...]

    def job(self, number: int) -> measuring.Job:
        arguments = ("--micro-batches", str(self.micro_batches), *self.arguments)
        return measuring.Job(str(number), HERE / "train.py", arguments, per_microbatch=True)


def variants(on_gpu: bool) -> list[Variant]:
    if not on_gpu:
        return [
            Variant("as it was", 64, ON_CPU),
            Variant("losses detached", 64, (*ON_CPU, "--detach")),
            *(Variant("cured", count, (*ON_CPU, *FIXED)) for count in (64, 256)),
        ]
    cap = ("--memory", str(CAP_GIB))
    within = f"in {CAP_GIB} GiB"
    return [
        Variant(f"as it was, {within}", 1024, (*LIKE_THE_REPORT, *cap)),
        Variant("as it was", 128, LIKE_THE_REPORT),
        Variant("cured", 128, (*LIKE_THE_REPORT, *FIXED)),
        Variant(f"cured, {within}, quick", 4096, (*QUICK, *cap, *FIXED)),
        Variant(f"losses detached, {within}, quick", 4096, (*QUICK, *cap, "--detach")),
        Variant(f"cured, {within}, quick", 1024, (*QUICK, *cap, *FIXED)),
        Variant(f"as it was, {within}, quick", 1024, (*QUICK, *cap)),
        Variant(f"as it was, {within}, quick", 4096, (*QUICK, *cap)),
    ]


def speeds(on_gpu: bool) -> dict[str, tuple[str, ...]]:
    """Arguments of `speed.py` by the name of the row."""
    if not on_gpu:
        return {"": (*ON_CPU, "--micro-batches", "8", "--rounds", "6")}
    return {
        "like the report's": (*LIKE_THE_REPORT, "--micro-batches", "16", "--rounds", "6"),
        "quick": (*QUICK, "--micro-batches", "96", "--rounds", "7"),
    }


def told(variant: Variant, outcome: measuring.Outcome) -> dict[str, Any]:
    """What memtriage reported of one variant, and what happened to it."""
    report = outcome.report
    if report is None:
        raise ValueError(f"no report: {measuring.why(outcome)}")
    lines = outcome.said.splitlines()
    counted = [line for line in lines if re.match(r"memtriage: step \d+ micro-batch", line)]
    named = next((at for at, line in enumerate(lines) if "memtriage: grows by" in line), None)
    before = [] if named is None else [line for line in lines[:named] if line in set(counted)]
    projected = None if named is None else re.search(r"is full ([\d,]+) micro-batches into", lines[named])
    marks = [mark for mark in report["marks"] if mark["name"] == "backward"]
    marks = [mark for mark in marks if mark["device"] != "cpu"] or marks
    first = next((mark["allocated"] for mark in marks if mark["microbatch"] == FIRST), None)
    named_at = None if not before else int(re.findall(r"micro-batch (\d+):", before[-1])[0])
    return {
        "variant": variant.name,
        "micro_batches": variant.micro_batches,
        "arguments": variant.arguments,
        "seconds": outcome.seconds,
        "verdict": report["verdict"],
        "completed": variant.micro_batches if outcome.figures else marks[-1]["microbatch"] if marks else 0,
        "named_at": named_at,
        "said": None if named is None else lines[named],
        "projected": None if projected is None else int(projected[1].replace(",", "")),
        "allocated_8": first,
        "allocated_last": marks[-1]["allocated"] if marks else None,
        "losses": None if outcome.figures is None else outcome.figures["losses"],
        "findings": measuring.findings(report, ("leak", "out_of_memory")),
        "first_lines": counted[:10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a process may take")
    parser.add_argument("--within", type=float, default=300, help="seconds after which nothing more begins")
    parser.add_argument("--at-a-time", type=int, help="processes side by side, where nothing is timed")
    parser.add_argument("--no-speed", action="store_true", help="leave the speeds out")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows = variants(on_gpu)
    began = time.monotonic()
    results: dict[str, Any] = {
        "about": measuring.about("transformers"), "rows": [None for _ in rows], "speed": {}
    }  # fmt: skip

    def keep(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)
        measuring.write(options.out, results)

    for job, outcome in measuring.run_all(
        [row.job(number) for number, row in enumerate(rows)], limit_s=options.limit, within_s=options.within,
        at_a_time=options.at_a_time or (6 if on_gpu else 1),
    ):  # fmt: skip
        variant = rows[int(job.name)]
        why = None
        try:
            result = None if isinstance(outcome, str) else told(variant, outcome)
        except ValueError as error:
            result, why = None, str(error)
        if result is None:
            result = {
                "variant": variant.name,
                "micro_batches": variant.micro_batches,
                "failed": why or outcome,
            }
        results["rows"][int(job.name)] = result
        keep(page.line(result))
    left = options.within - (time.monotonic() - began)
    timings = [] if options.no_speed else [
        measuring.Job(name, HERE / "speed.py", arguments, watched=False)
        for name, arguments in speeds(on_gpu).items()
    ]  # fmt: skip
    for job, outcome in measuring.run_all(timings, at_a_time=1, limit_s=options.limit, within_s=left):
        results["speed"][job.name] = outcome if isinstance(outcome, str) else outcome.figures
        keep(f"speed {job.name}: {outcome if isinstance(outcome, str) else outcome.figures}")
    print(f"\n{page.table(results)}\n\n{page.speed(results)}\n\n{page.said(results)}", flush=True)


if __name__ == "__main__":
    main()
