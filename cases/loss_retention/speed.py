"""Time of a micro-batch: leaking, cured, and cured under memtriage's watch, in turns within one process.

A round runs a step in each way, in an order that rotates. A step of the same length, untimed, comes before
the first round, so that the allocator has its memory: what a leak costs in calls to the driver is left out.
Ways are compared within a round; of these ratios the median is given, and an interval that encloses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import memtriage
from memtriage.prove.statistics import ratio
from train import Schedule, build, drawer, sized

SETTLING = 4
"""Micro-batches before each timed step: a watch that begins has its own cost."""
LEAKING, CURED, WATCHED = "leaking", "cured", "cured, watched"


def timed(schedule: Schedule, way: str, options: argparse.Namespace) -> float:
    """Seconds of a micro-batch, in the mean of a step."""
    schedule.head.detach = schedule.free_batch = way != LEAKING
    draw = drawer(options)

    def done() -> float:
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    with (
        tempfile.TemporaryDirectory() as folder,
        memtriage.watch(folder, quiet=True) if way == WATCHED else nullcontext(),
    ):
        schedule.run_step(SETTLING, draw)
        began = done()
        schedule.run_step(options.micro_batches, draw)
        took = done() - began
    return took / options.micro_batches


def compared(times: dict[str, list[float]], one: str, other: str) -> dict[str, Any] | None:
    estimate = ratio([[each] for each in times[one]], [[each] for each in times[other]])
    if estimate is None or estimate[1] is None:
        return None
    median, interval = estimate
    return {"ratio": median, "low": interval.low, "high": interval.high, "confidence": interval.confidence}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=32, help="of a timed step")
    parser.add_argument("--rounds", type=int, default=9)
    sized(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    schedule = build(options, detach=False, free_batch=False)
    ways = [LEAKING, CURED, WATCHED]
    schedule.run_step(options.micro_batches, drawer(options))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways[number % 3 :] + ways[: number % 3]:
            times[way].append(timed(schedule, way, options))
    results = {
        "rounds": options.rounds,
        "micro_batches": options.micro_batches,
        "ms": {way: round(1e3 * statistics.median(each), 4) for way, each in times.items()},
        "all_ms": {way: [round(1e3 * seconds, 4) for seconds in each] for way, each in times.items()},
        "leaking to cured": compared(times, LEAKING, CURED),
        "watched to unwatched": compared(times, WATCHED, CURED),
    }
    print(json.dumps({name: value for name, value in results.items() if name != "all_ms"}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
