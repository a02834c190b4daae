"""Runs one part of the case and writes its figures: `measure.py PART --out FILE`.

simulate   without a GPU: what is allocated and reserved after each refit; losses under each treatment
peaks      without a GPU: what each step reserves at its peak, with several seeds (twenty minutes)
segments   what expandable segments cost (a GPU, a minute)
who        which owner keeps how much after the refit (a GPU, TransformerEngine, two minutes)
trials     `memtriage compare trials.toml`, or `trials_two_gpus.toml` with two GPUs (half an hour and more)
turns      plain FP8 and memtriage in turns within one process, on one GPU or two (five minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import measuring  # noqa: E402

SMALL = ("--layers", "6", "--micro-batches", "4", "--steps", "2")
ON_CPU = ("--device", "cpu", "--tiny", "--library", "standin", "--engine", "inside", "--steps", "2")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SIMULATED: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "bf16": (("--precision", "bf16"), {}),
    "fp8": (("--precision", "fp8"), {}),
    "fp8, cleared": (("--treatment", "clear"), {}),
    "fp8, cleared, expandable segments": (("--treatment", "clear"), EXPANDABLE),
}
TREATMENTS = ("none", "clear", "memtriage")
PEAKS: dict[str, tuple[str, ...]] = {
    "fp8": ("--treatment", "none"),
    "fp8, cleared": ("--treatment", "clear"),
    "fp8, cleared, copies in memory of their own": ("--treatment", "clear", "--apart"),
    "memtriage without priming": ("--treatment", "memtriage-unprimed"),
    "memtriage": ("--treatment", "memtriage"),
}
SEEDS = (1, 2, 3, 4)
AS_MEASURED = ("--steps", "4", "--first-step", "4")
"""As the trials: the first step is short."""
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WHO = ("--micro-batches", "10", "--steps", "2")
FIRST_TIMES = 3
"""Steps of a process in which something happens for the first time: pages locked, kernels tuned, a census."""
FIGURES = ("time_per_step", "allocated", "reserved", "peak_reserved")


def output(script: str, *arguments: str, limit_s: float, extra: dict[str, str] | None = None) -> str:
    """What a script of the case prints.

    Raises:
        RuntimeError: it failed; the text ends as its stderr does.
    """
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True, timeout=limit_s,
        env={**os.environ, **(extra or {})},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip()[-measuring.LAST_WORDS :]}")
    return done.stdout


def simulate(limit_s: float) -> dict[str, Any]:
    def row(name: str) -> dict[str, Any]:
        arguments, extra = SIMULATED[name]
        printed = output("simulate.py", *SMALL, *arguments, limit_s=limit_s, extra=extra)
        sizes = re.findall(r"step \d+: ([\d.]+) (\w+) allocated, ([\d.]+) (\w+) reserved", printed)
        steps = [
            {"allocated": round(float(a) * UNITS[of_a]), "reserved": round(float(r) * UNITS[of_r])}
            for a, of_a, r, of_r in sizes
        ]
        return {"row": name, "steps": steps}

    def losses(one: str) -> list[str]:
        return re.findall(
            r"loss ([\d.e+-]+)", output("loop.py", *ON_CPU, "--treatment", one, limit_s=limit_s)
        )

    with ThreadPoolExecutor(2) as pool:
        rows, told = pool.map(row, SIMULATED), pool.map(losses, TREATMENTS)
        return {
            "arguments": SMALL, "rows": list(rows), "losses": dict(zip(TREATMENTS, told, strict=True))
        }  # fmt: skip


def peaks(limit_s: float) -> dict[str, Any]:
    def steps(arguments: tuple[str, ...], seed: int) -> list[int]:
        told = output(
            "simulate.py", *AS_MEASURED, *arguments, "--seed", str(seed), limit_s=limit_s, extra={}
        )  # fmt: skip
        sizes = re.findall(r"after refit, ([\d.]+) (\w+) reserved at the peak", told)
        return [round(float(number) * UNITS[unit]) for number, unit in sizes]

    rows = [
        {"row": name, "seeds": {str(seed): steps(arguments, seed) for seed in SEEDS}}
        for name, arguments in PEAKS.items()
    ]
    return {"arguments": AS_MEASURED, "rows": rows}


def segments(limit_s: float) -> dict[str, Any]:
    rounds, gib, bucket = 4, 24, 1024
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "cost.json")
        output(
            "segment_cost.py", "--rounds", str(rounds), "--gib", str(gib), "--bucket", str(bucket),
            "--out", str(out), limit_s=limit_s,
        )  # fmt: skip
        settings = json.loads(out.read_text())
    return {"gib": gib, "bucket": bucket, "rounds": rounds, "settings": settings}


def who(limit_s: float) -> dict[str, Any]:
    figures = {}
    for row, arguments in (
        ("bf16-none", ("--precision", "bf16")), ("fp8-none", ()), ("fp8-clear", ("--treatment", "clear")),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            output("loop.py", *WHO, *arguments, "--who", f"{folder}/who", limit_s=limit_s)
            table = json.loads(Path(folder, f"who.{row}.after-refit.0.json").read_text())
        del table["worst"]
        figures[row] = table
    return {"arguments": WHO, "after refit": figures}


def trials(limit_s: float) -> dict[str, Any]:
    import torch

    file = "trials_two_gpus.toml" if torch.cuda.device_count() > 1 else "trials.toml"
    with tempfile.TemporaryDirectory() as folder:
        return compared(file, Path(folder), limit_s)


def compared(file: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """What `memtriage compare` finds; and again, with more of each trial's steps left out as warming up."""
    script = f"script = {json.dumps(str(HERE / 'loop.py'))}"
    known = re.sub('^script = ".*"$', script, (HERE / file).read_text(), flags=re.M)

    def result(text: str, *more: str) -> dict[str, Any]:
        (folder / file).write_text(text)
        done = subprocess.run(
            [
                sys.executable, "-m", "memtriage", "compare", str(folder / file),
                "-o", str(folder / "trials"), "--json", *more,
            ],
            stdout=subprocess.PIPE, text=True, timeout=limit_s,
        )  # fmt: skip
        return slim(json.loads(done.stdout))

    later = re.sub(r"^warmup = \d+$", f"warmup = {FIRST_TIMES}", known, flags=re.M)
    first, rest = result(known), result(later, "--report")
    return {"compare": first, "later": {part: rest[part] for part in ("warmup", "repeats", "targets")}}


def turns(limit_s: float, micro_batches: int = 44, turns: int = 14) -> dict[str, Any]:
    import torch

    from treatment import InTurns

    gpus = min(2, torch.cuda.device_count())
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    )
    arguments = ["--treatment", "none", "--against", "memtriage", "--steps", str(turns + 1)]
    arguments += ["--micro-batches", str(micro_batches), "--first-step", "4"]
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / "loop.py"), *arguments],
        capture_output=True, text=True, timeout=limit_s, check=True,
    )  # fmt: skip
    run = {"gpus": gpus, "micro_batches": micro_batches, "turns": turns_in(done.stdout)}
    return {"warm_up": InTurns.WARM_UP, "runs": [run]}


def turns_in(printed: str) -> list[dict[str, Any]]:
    """The turns that rank 0 tells of, in order."""
    timed = re.findall(r"\[rank 0\] turn \d+: (\S+) ([\d.]+) s", printed)
    return [{"treatment": name, "seconds": float(seconds)} for name, seconds in timed]


def slim(compared: dict[str, Any]) -> dict[str, Any]:
    """Of what `memtriage compare --json` prints, what the page shows, without this machine's folders."""
    kept = (
        "schema",
        "verdict",
        "name",
        "baseline",
        "mark",
        "step",
        "warmup",
        "repeats",
        "ranks",
        "complete",
        "notes",
    )
    figure = ("value", "lowest", "highest", "spread", "by_rank", "against_baseline")
    return {
        **{name: compared.get(name) for name in kept},
        "variants": [
            {
                "name": variant["name"],
                "finished": variant["finished"],
                "figures": {
                    name: {part: variant["figures"][name][part] for part in figure}
                    for name in FIGURES
                    if name in variant["figures"]
                },
                "values": variant["values"],
                "failures": [
                    {"kind": failure["kind"], "error": failure["error"]} for failure in variant["failures"]
                ],
            }
            for variant in compared["variants"]
        ],
        "targets": compared["targets"],
    }


PARTS = {
    "simulate": simulate,
    "peaks": peaks,
    "segments": segments,
    "who": who,
    "trials": trials,
    "turns": turns,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--limit", type=float, default=7200, help="seconds that a process may take")
    options = parser.parse_args()
    results = {
        "about": measuring.about("transformer_engine", "torchao"),
        **PARTS[options.part](options.limit),
    }
    measuring.write(options.out, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
