"""What a GPU says of the workloads of `families.py`: `python record_families.py --out FILE.json [NAME...]`,
with `tests` on PYTHONPATH.

Each runs three steps in a process of its own, some of them at once. FILE has the form of
`families_h200.json`: by step, the peaks and what stays allocated. Names of `specs.json` are understood too.

With `--events FOLDER` the sizes of all allocations and frees are written to NAME.json.gz there, in order, to
be compared with a prediction's: [number of the allocation, bytes asked for; 0 where it is freed], a list for
the build and one for each step. With `--compiled` the model is compiled, as in `compiled_h200.json`; with
`--graphs` it has CUDA graphs, as in `graphs_h100.json`. Programs of `graph_programs.py` compile themselves.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from support.groundtruth import families, workload

STEPS = 3
MODE = "reduce-overhead"
DEADLINE_S = 400
AT_ONCE = 10
"""So many have room on one device together."""
ERROR_LENGTH = 600


class Events:
    """Allocations and frees, numbered as they come."""

    def __init__(self) -> None:
        self.phases: list[list[tuple[int, int]]] = []
        self._numbers: dict[int, int] = {}
        self._count = 0

    def begin(self) -> None:
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)

    def end(self) -> None:
        """Closes a phase."""
        found = []
        for event in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
            if event["action"] == "alloc":
                self._numbers[event["addr"]] = self._count
                found.append((self._count, event["size"]))
                self._count += 1
            elif event["action"] == "free_requested":
                found.append((self._numbers.pop(event["addr"], -1), 0))
        self.phases.append(found)
        self.begin()


def measure(name: str, folder: Path | None, steps_wanted: int, **how: Any) -> list[dict[str, int]]:
    """By step, what was measured; `how` as for `workload`."""
    torch.manual_seed(0)
    torch.cuda.init()
    events = Events() if folder else None
    if events:
        events.begin()
    parts = workload(name, **how)(torch.device("cuda"))  # kept alive whole, as by a program
    if events:
        events.end()
    steps = []
    for _ in range(steps_wanted):
        torch.cuda.reset_peak_memory_stats()
        parts[2]()
        torch.cuda.synchronize()
        steps.append(
            {
                "peak_alloc": torch.cuda.max_memory_allocated(),
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "end_alloc": torch.cuda.memory_allocated(),
            }
        )
        if events:
            events.end()
    if events and folder:
        with gzip.open(folder / f"{name}.json.gz", "wt") as file:
            json.dump({"steps": steps, "events": events.phases}, file)
    return steps


def measured(name: str, arguments: list[str]) -> list[dict[str, int]] | str:
    """What another process measured, or its error."""
    command = [sys.executable, __file__, "--one", name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"not done within {DEADLINE_S} s"
    if done.returncode:
        return done.stderr[-ERROR_LENGTH:]
    steps: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--events", type=Path, metavar="FOLDER")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="workloads that run at the same time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        how = {"compiled": options.compiled or options.graphs, "mode": MODE if options.graphs else None}
        print(json.dumps(measure(options.one, options.events, options.steps, **how)), flush=True)
        return
    names = options.names or families()
    arguments = ["--steps", str(options.steps)]
    arguments += ["--compiled"] * options.compiled + ["--graphs"] * options.graphs
    if options.events:
        options.events.mkdir(parents=True, exist_ok=True)
        arguments += ["--events", str(options.events)]
    found = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for name, result in zip(names, pool.map(lambda each: measured(each, arguments), names), strict=True):
            print(name, json.dumps(result), flush=True)
            if not isinstance(result, str):
                found.append({"name": name, "steps": result})
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
