"""How fast the allocator simulator is: events (allocations and frees) a second on one core.

    python benchmarks/simulator.py [--events N] [--rounds N] [--recording FILE.pickle.gz …]

churn      A made-up program: blocks of 40 sizes from 512 bytes to 50 MiB, 300 of them alive, freed in any
           order. That is harder than training, where blocks come and go in order.
recording  Allocations and frees of recorded histories, as often as it takes to reach the number of events.

Every line is the median of the rounds; the slowest and the fastest are next to it. Seconds are those of this
process on a core, so that neighbors count as little as can be. Choosing what to allocate is not counted.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.trace_columns import StackTable, trace_columns
from memtriage.model.recording import ALLOC, FREE_REQUESTED
from memtriage.snapshots.file import loaded

TORCH: Final = "2.11"
CONFS: Final = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:256",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
)
DEVICE_MEMORY: Final = 80 << 30
LIVE: Final = 300
SIZES: Final = 40


def churn(conf: str, events: int) -> float:
    """Events a second of the made-up program."""
    chance = random.Random(1)
    sizes = [
        chance.choice([512, 4 << 10, 64 << 10, 1 << 20, 3 << 20, 12 << 20, 50 << 20]) for _ in range(SIZES)
    ]
    plan = [(chance.choice(sizes), chance.randrange(LIVE)) for _ in range(events // 2)]
    simulator = Simulator(parse_conf(conf, TORCH), device_memory=DEVICE_MEMORY)
    malloc, free = simulator.malloc, simulator.free
    held = [malloc(512) for _ in range(LIVE)]
    began = time.process_time()
    for size, slot in plan:
        free(held[slot])
        held[slot] = malloc(size)
    return 2 * len(plan) / (time.process_time() - began)


def recorded(path: Path, conf: str, events: int) -> float:
    """Events a second of a recording, played again and again; what it leaves alive is freed in between."""
    with loaded(path) as raw:
        trace = trace_columns(raw["device_traces"][0], StackTable())
    steps = [
        (kind == ALLOC, address, size, stream)
        for kind, address, size, stream in zip(
            trace.kind.tolist(),
            trace.address.tolist(),
            trace.size.tolist(),
            trace.stream.tolist(),
            strict=True,
        )
        if kind in (ALLOC, FREE_REQUESTED)
    ]
    simulator = Simulator(parse_conf(conf, TORCH), device_memory=DEVICE_MEMORY)
    malloc, free = simulator.malloc, simulator.free
    done = 0
    began = time.process_time()
    while done < events:
        live = {}
        for is_alloc, address, size, stream in steps:
            if is_alloc:
                live[address] = malloc(size, stream)
            else:
                free(live.pop(address))
        for block in live.values():
            free(block)
        done += len(steps) + len(live)
    return done / (time.process_time() - began)


def show(name: str, conf: str, rounds: int, measure: Callable[[], float]) -> None:
    """Print one line."""
    rates = [measure() for _ in range(rounds)]
    print(
        f"{name:<26} {conf or 'default settings':<66} {statistics.median(rates):>11,.0f} events/s "
        f"({min(rates):,.0f} to {max(rates):,.0f})",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recording", type=Path, nargs="*", default=[])
    options = parser.parse_args(arguments)
    print(f"Python {platform.python_version()} on {platform.processor() or platform.machine()}")
    for conf in CONFS:
        show("churn", conf, options.rounds, lambda conf=conf: churn(conf, options.events))
    for path in options.recording:
        for conf in CONFS[:2]:
            show(
                path.name.partition(".")[0],
                conf,
                options.rounds,
                lambda path=path, conf=conf: recorded(path, conf, options.events),
            )


if __name__ == "__main__":
    main()
