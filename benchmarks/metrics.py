"""What metrics cost: a mark with and without what it leaves for them, a scrape, and the values for a logger.

    python benchmarks/metrics.py [--device cuda|cpu] [--rounds N] [--json FILE]

A small model trains for some steps under a watch, so that there is growth to judge and a ledger to tell of.

mark      One `memtriage.mark()`: as it is; without what it leaves for metrics; and while another thread
          scrapes ten times a second, 150 times as often as Prometheus does. Blocks of the three take
          turns in this one process, and the ratio is taken within a round.
scrape    `GET /metrics` from this process, as the client sees it: those in which the classes of host memory
          are read, and those between.
values    `memtriage.metrics()`, for loggers, between such readings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

import memtriage
from memtriage.session.live_state import LiveState

STEPS: Final = 200
MARKS: Final = 200
SCRAPES: Final = 50
SCRAPE_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    repeats: int
    unit: str
    median: float
    low_quartile: float
    high_quartile: float
    note: str = ""


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder, memtriage.watch(folder, quiet=True):
        train(options.device)
        server = memtriage.serve_metrics(0)
        if server is None:
            raise SystemExit("no endpoint: no figures")
        with server:
            rows = [*mark_rows(server.url, options.rounds), *scrape_rows(server.url)]
    machine = describe_machine(options.device)
    print_table(machine, rows)
    if options.json is not None:
        figures = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def train(device: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(32, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- marks -----------------------------------------------------------------------------------------------


def mark_rows(url: str, rounds: int) -> Iterator[Row]:
    conditions: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "nothing left for metrics": without_live_state,
        "as it is": nullcontext,
        "while scraped": lambda: scraped(url),
    }
    times: dict[str, list[float]] = {name: [] for name in conditions}
    for number in range(rounds):
        names = list(conditions)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with conditions[name]():
                times[name].append(marks())
    base = times["nothing left for metrics"]
    for name, values in times.items():
        more = statistics.median(value - other for value, other in zip(values, base, strict=True))
        note = "" if values is base else f"{more:+.2f} us in the median round"
        yield row(f"mark, {name}", values, "us", note, repeats=rounds * MARKS)


def marks() -> float:
    """Microseconds of one mark: the median of many."""
    times = []
    for _ in range(MARKS):
        started = time.perf_counter()
        memtriage.mark("benchmark")
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


@contextmanager
def without_live_state() -> Iterator[None]:
    kept = LiveState.at_mark
    LiveState.at_mark = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        LiveState.at_mark = kept  # type: ignore[method-assign]


@contextmanager
def scraped(url: str) -> Iterator[None]:
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_EVERY_S):
            fetch(url)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# --- scrapes ---------------------------------------------------------------------------------------------


def scrape_rows(url: str) -> Iterator[Row]:
    session = memtriage.process.active.session
    assert session is not None
    with_classes, between, values = [], [], []
    for _ in range(SCRAPES):
        session._live._classes_due_s = 0.0
        with_classes.append(milliseconds(lambda: fetch(url)))
        between.append(milliseconds(lambda: fetch(url)))
        values.append(milliseconds(memtriage.metrics))
    size = f"{len(fetch(url)):,} bytes"
    yield row("scrape, classes of host memory read", with_classes, "ms", size)
    yield row("scrape, between such readings", between, "ms")
    yield row("values for a logger", values, "ms", f"{len(memtriage.metrics())} scalars")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        page: bytes = answer.read()
    return page


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


# --- output ----------------------------------------------------------------------------------------------


def row(what: str, values: Sequence[float], unit: str, note: str = "", repeats: int | None = None) -> Row:
    low, median, high = statistics.quantiles(values, n=4)
    return Row(what, repeats or len(values), unit, median, low, high, note)


def describe_machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "load_1_min": round(os.getloadavg()[0], 1),
    }


def print_table(machine: dict[str, Any], rows: Sequence[Row]) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    width = max(len(reading.what) for reading in rows)
    for reading in rows:
        spread = f"{reading.low_quartile:.2f} to {reading.high_quartile:.2f}"
        figures = f"{reading.median:8.2f} {reading.unit}  {spread:18}  n {reading.repeats:5}"
        print(f"{reading.what:{width}}  {figures}  {reading.note}")


if __name__ == "__main__":
    main()
