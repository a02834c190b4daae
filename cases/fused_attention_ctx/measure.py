"""Runs the case's variants, plain and cured: `measure.py [--ranks 2] --out FILE`.

Each run is a process of its own; some run side by side, for memory is measured and not time. Without a GPU,
or without TransformerEngine, the twin's rows alone. Two minutes on a GPU, one more with `--ranks 2`.
"""

from __future__ import annotations

import argparse
import importlib.util
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

SCRIPT = HERE / "train.py"
AGAIN = ("--checkpoint-layer", "transformerlayer")
TE = ("--library", "te")
GROUPED = (*TE, "--layer-type", "groupedlinear")
PLAIN, REMEDY, PATCH = "none", "remedy", "patch"
STEPS = ("--num-iters", "3")
AT_A_TIME = {"cuda": 5, "cpu": 2}
ALL = (PLAIN, REMEDY, PATCH)
SHARDED = (PLAIN, REMEDY)


@dataclass(frozen=True, slots=True)
class Variant:
    """A row: its name, the script's arguments, and which cures are tried."""

    name: str
    arguments: tuple[str, ...]
    cures: tuple[str, ...] = ALL


def variants(with_te: bool, ranks: int) -> list[Variant]:
    if ranks > 1:
        sharded = [("twin", AGAIN)]
        if with_te:
            sharded.insert(0, ("GroupedLinear", GROUPED))
        return [
            Variant(f"{name}, FSDP {fsdp}", (*arguments, "--fsdp", str(fsdp)), SHARDED)
            for name, arguments in sharded
            for fsdp in (1, 2)
        ]
    rows = [Variant("twin, checkpointed", AGAIN), Variant("twin, 16 bits", ("--no-fp8", *AGAIN), (PLAIN,))]
    if with_te:
        rows += [
            Variant("GroupedLinear, checkpointed", (*GROUPED, "--checkpoint-layer", "groupedlinear")),
            Variant("operation fuser", (*TE, "--layer-type", "operations")),
            Variant("TransformerLayer, checkpointed", (*TE, *AGAIN), (PLAIN,)),
            Variant("TransformerLayer, 16 bits, checkpointed", (*TE, "--no-fp8", *AGAIN), (PLAIN,)),
        ]
    return rows


def told(outcome: measuring.Outcome) -> dict[str, Any]:
    """The figures of one run, and what memtriage said of it."""
    if outcome.figures is None:
        raise ValueError(f"no step was completed: {measuring.why(outcome)}")
    report = outcome.report
    return {
        **outcome.figures,
        "seconds": outcome.seconds,
        "verdict": None if report is None else report["verdict"],
        "findings": measuring.findings(report, ("residue", "leak")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--ranks", type=int, default=1, help="above 1: the rows under FSDP, with torchrun")
    parser.add_argument("--only", nargs="+", default=(), help="rows whose name contains one of these")
    parser.add_argument("--limit", type=float, default=75, help="seconds that a process may take")
    parser.add_argument("--within", type=float, default=300, help="seconds after which nothing more begins")
    parser.add_argument("--at-a-time", type=int, help="processes (with ranks: jobs) side by side")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with_te = importlib.util.find_spec("transformer_engine") is not None
    rows = variants(on_gpu and with_te, options.ranks)
    if options.only:
        rows = [row for row in rows if any(word in row.name for word in options.only)]
    results: dict[str, Any] = {
        "about": measuring.about("transformer_engine"),
        "ranks": options.ranks,
        "rows": {row.name: {"arguments": row.arguments, "runs": {}} for row in rows},
    }
    jobs = [
        measuring.Job(
            f"{cure}: {row.name}",
            SCRIPT,
            (*row.arguments, *STEPS, "--cure", cure),
            options.ranks,
        )
        for cure in ALL
        for row in rows
        if cure in row.cures
    ]
    began = time.perf_counter()
    at_a_time = options.at_a_time or AT_A_TIME["cuda" if on_gpu else "cpu"]
    for job, outcome in measuring.run_all(
        jobs, at_a_time=at_a_time, limit_s=options.limit, within_s=options.within
    ):
        cure, _, name = job.name.partition(": ")
        try:
            outcome_told: Any = outcome if isinstance(outcome, str) else told(outcome)
        except ValueError as error:
            outcome_told = str(error)
        results["rows"][name]["runs"][cure] = outcome_told
        print(f"{time.perf_counter() - began:5.0f} s  {job.name}: {page.line(outcome_told)}", flush=True)
        measuring.write(options.out, results)
    print(f"\n{page.table(results)}\n\n{page.said(results)}", flush=True)


if __name__ == "__main__":
    main()
