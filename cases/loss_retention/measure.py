"""Runs the case's variants under `memtriage run` and prints the table of its page: `measure.py --out FILE`.

Each variant is a process of its own. FILE gets, for each, what memtriage reported and what happened.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("train.py")
MIB = 1 << 20
FIXED = ("--detach", "--free-batch")
LARGE = (
    "--hidden",
    "4096",
    "--intermediate",
    "4096",
    "--layers",
    "1",
    "--tokens",
    "10496",
    "--vocabulary",
    "8192",
)
"""Keeps 2 x 82 MiB of each micro-batch, as much as the original did."""
SMALL = (
    "--hidden",
    "4096",
    "--intermediate",
    "4096",
    "--layers",
    "1",
    "--tokens",
    "1024",
    "--vocabulary",
    "8192",
)
ON_CPU = ("--hidden", "128", "--tokens", "256")
CAP_GIB = 24
COLUMNS = (
    "", "micro-batches", "verdict", "completed", "leak a micro-batch", "named at", "after 8", "at end", "ms"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: its name, the number of micro-batches, the script's further arguments."""

    name: str
    micro_batches: int
    arguments: tuple[str, ...]


def variants(on_gpu: bool) -> list[Variant]:
    if not on_gpu:
        return [
            Variant("as it was", 64, ON_CPU),
            *(Variant("cured", n, (*ON_CPU, *FIXED)) for n in (64, 256)),
        ]
    cap = ("--memory", str(CAP_GIB))
    return [
        Variant(f"as it was, in {CAP_GIB} GiB", 1024, (*LARGE, *cap)),
        Variant("as it was", 128, LARGE),
        Variant("losses detached", 128, (*LARGE, "--detach")),
        Variant("cured", 128, (*LARGE, *FIXED)),
        Variant(f"cured, in {CAP_GIB} GiB", 1024, (*LARGE, *cap, *FIXED)),
        Variant("as it was, small", 4096, (*SMALL, *cap)),
        Variant("cured, small", 4096, (*SMALL, *FIXED)),
    ]


def measure(variant: Variant, limit_s: float) -> dict[str, Any]:
    """What memtriage reported of one variant, and what happened to it."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "memtriage", "run", "-o", folder, "--json", f"{folder}/report.json",
             "--per-microbatch", str(SCRIPT), "--micro-batches", str(variant.micro_batches),
             *variant.arguments],
            capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        report = json.loads(Path(folder, "report.json").read_text())
    lines = done.stderr.splitlines()
    counted = [line for line in lines if re.match(r"memtriage: step \d+ micro-batch", line)]
    named = next((i for i, line in enumerate(lines) if "memtriage: grows by" in line), None)
    marks = [mark for mark in report["marks"] if mark["name"] == "backward" and mark["device"] != "cpu"] or [
        mark for mark in report["marks"] if mark["name"] == "backward"
    ]
    took = re.search(r"([\d.]+) ms a micro-batch", done.stdout)
    return {
        "variant": variant.name,
        "micro_batches": variant.micro_batches,
        "arguments": variant.arguments,
        "seconds": round(time.perf_counter() - began, 1),
        "verdict": report["verdict"],
        "done": len(counted),
        "named_at": None if named is None else sum(line in counted for line in lines[:named]),
        "allocated_8": marks[7]["allocated"] if len(marks) > 7 else None,
        "allocated_last": marks[-1]["allocated"] if marks else None,
        "ms": None if took is None else float(took[1]),
        "findings": report["findings"],
        "first_lines": counted[:10],
        "exception": report["exception"],
    }


def row(result: dict[str, Any]) -> str:
    leak = next((one for one in result["findings"] if one["kind"] == "leak"), None)
    cells = [
        result["variant"],
        f"{result['micro_batches']:,}",
        result["verdict"].replace("_", " "),
        f"{result['done']:,}",
        "" if leak is None else f"{leak['bytes_per_microbatch'] / MIB:,.1f} MiB",
        "" if result["named_at"] is None else str(result["named_at"]),
        "" if result["allocated_8"] is None else f"{result['allocated_8'] / MIB:,.1f} MiB",
        "" if result["allocated_last"] is None else f"{result['allocated_last'] / MIB:,.1f} MiB",
        "" if result["ms"] is None else f"{result['ms']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a variant may take")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}, {where}, {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    results = []
    for variant in variants(on_gpu):
        try:
            results.append(measure(variant, options.limit))
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            print(
                f"| {variant.name} | {variant.micro_batches:,} | {type(error).__name__}: {error} |",
                flush=True,
            )
            continue
        print(row(results[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(
            json.dumps({"where": where, "torch": torch.__version__, "rows": results}, indent=1)
        )
    for result in results[:1]:
        for finding in result["findings"]:
            print(f"\n{finding['kind']} on {finding['device']}: {finding['holder']}")
            print(f"  {finding['fix']}\n  " + "\n  ".join(finding["evidence"]))


if __name__ == "__main__":
    main()
