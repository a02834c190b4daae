"""Runs the case's variants and prints the table of its page: `measure.py --out FILE`.

Each run is a process of its own. Without a GPU, or without TransformerEngine, the twin's rows alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("train.py")
MIB = 1 << 20
COLUMNS = ("", "stays after backward", "with the cure", "peak", "with the cure", "losses", "memtriage says")
LARGE = ("--layers", "12", "--batch", "2", "--sequence", "2048", "--heads", "16", "--head-size", "128")
TE = (
    "--library",
    "te",
    "--batch",
    "2",
    "--sequence",
    "2048",
    "--heads",
    "16",
    "--head-size",
    "128",
    "--layers",
    "12",
)


def variants(on_gpu: bool, with_te: bool) -> dict[str, tuple[str, ...]]:
    """The script's arguments, by the row's name."""
    rows = {"twin, checkpointed": LARGE if on_gpu else (), "twin, 16 bits": ("--no-fp8",)}
    if on_gpu and with_te:
        rows |= {
            "TransformerLayer, FP8 attention, checkpointed": TE,
            "GroupedLinear, checkpointed": (*TE, "--layer-type", "grouped"),
            "GroupedLinear, current scaling": (
                *TE, "--layer-type", "grouped", "--recipe", "current", "--checkpointed", "0"
            ),
            "operation fuser": (*TE, "--layer-type", "operations", "--checkpointed", "0"),
        }  # fmt: skip
    return rows


def run(arguments: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """The last step's figures, and memtriage's report."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "memtriage", "run", "-o", folder, "--json", f"{folder}/report.json",
             str(SCRIPT), *arguments],
            capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        report = json.loads(Path(folder, "report.json").read_text())
    steps = re.findall(r"step \d+: loss ([\d.]+), ([-\d,]+) bytes stay(?:, peak ([\d,]+))?", done.stdout)
    if not steps:
        raise ValueError(f"no step was completed: {done.stderr[-500:]}")
    _, stays, peak = steps[-1]
    return {
        "losses": [loss for loss, _, _ in steps],
        "stays": int(stays.replace(",", "")),
        "peak": int(peak.replace(",", "")) if peak else None,
        "verdict": report["verdict"],
        "findings": report["findings"],
    }


def row(name: str, plain: dict[str, Any], cured: dict[str, Any]) -> str:
    holder = next((one["holder"] for one in plain["findings"] if one["kind"] == "residue"), None)
    said = plain["verdict"] if holder is None else f"{plain['verdict']}: `{holder.rpartition('-> ')[2]}`"
    cells = [
        name,
        f"{plain['stays'] / MIB:,.1f} MiB",
        f"{cured['stays'] / MIB:,.1f} MiB",
        "" if plain["peak"] is None else f"{plain['peak'] / MIB:,.0f} MiB",
        "" if cured["peak"] is None else f"{cured['peak'] / MIB:,.0f} MiB",
        "equal" if plain["losses"] == cured["losses"] else "DIFFERENT",
        said,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a process may take")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with_te = importlib.util.find_spec("transformer_engine") is not None
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}, {where}, {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = {}
    for name, arguments in variants(on_gpu, with_te).items():
        try:
            plain, cured = (run((*arguments, *more), options.limit) for more in ((), ("--cure",)))
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            print(f"| {name} | {type(error).__name__}: {error} |", flush=True)
            continue
        found[name] = {"arguments": arguments, "plain": plain, "cured": cured}
        print(row(name, plain, cured), flush=True)
    if options.out is not None:
        written = {"where": where, "versions": versions, "rows": found}
        options.out.write_text(json.dumps(written, indent=1))
    for name, one in found.items():
        for finding in one["plain"]["findings"]:
            print(f"\n{name}: {finding['kind']} on {finding['device']}, {finding['bytes'] / MIB:,.1f} MiB")
            print(f"  {finding['holder']}")


if __name__ == "__main__":
    main()
