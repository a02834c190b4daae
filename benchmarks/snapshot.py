"""What reading a snapshot of a million events costs, beside a bare `pickle.load` of the same file.

    python benchmarks/snapshot.py [--events N] [--depth N] [--rounds N] [--json FILE]

The file is made of a recording from an H200: one steady training step of it is repeated, with the times of
its events moved on and with stacks that share their frames, as torch writes them. All ways run in turns, each
in a process of its own; seconds are wall time and memory is the peak resident set, the interpreter included.

pickle.load         the floor: `pickle.load` of the file, and nothing else
snapshot --html     `memtriage snapshot FILE --html OUT`: load, replay, owners, findings, page, report
snapshot --json     `memtriage snapshot FILE --json`: the same without the page
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

RECORDING: Final = Path(__file__).parents[1] / "tests" / "data" / "snapshots" / "healthy.pickle.gz"
STEADY: Final = 3
"""The step that is repeated: from the second on, one leaves memory as the other does."""
BARE: Final = "pickle.load"

BARE_CODE: Final = "import pickle, sys\nwith open(sys.argv[1], 'rb') as file:\n    pickle.load(file)"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians over the rounds, and their ratios to the bare load."""

    way: str
    seconds: float
    peak_bytes: int
    times: float
    memory: float


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        # In a process of its own: on Linux the peak of a process counts what its parent had when it forked.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            count = pool.submit(tile, path, args.events, args.depth).result()
        page = Path(folder) / "page.html"
        ways = {
            BARE: ["-c", BARE_CODE, str(path)],
            "snapshot --html": ["-m", "memtriage", "snapshot", str(path), "--html", str(page)],
            "snapshot --json": ["-m", "memtriage", "snapshot", str(path), "--json"],
        }
        measured: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, command in ways.items():
                measured[name].append(run(command))
        rows = table(measured)
        sizes = {"file": path.stat().st_size, "page": page.stat().st_size}
    show(rows, count, sizes)
    if args.json:
        result = {
            "events": count,
            "depth": args.depth,
            "bytes": sizes,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="at least so many")
    parser.add_argument(
        "--depth", type=int, default=0, help="frames of a stack, at least (outer ones are added)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def tile(path: Path, events: int, depth: int) -> int:
    """Write a snapshot of at least so many events; returns how many it has."""
    with gzip.open(RECORDING, "rb") as file:
        # our own file, from the tests' data
        raw: dict[str, Any] = pickle.load(file)
    trace, spans = raw["device_traces"][0], raw["external_annotations"]
    ends = [span["time_us"] for span in spans if span["stage"] == "END" and "zero_grad" in span["name"]]
    begin, end = ends[STEADY - 1], ends[STEADY]
    times = [one["time_us"] for one in trace]
    first, behind = bisect_right(times, begin), bisect_right(times, end)
    body, period = trace[first:behind], end - begin
    repeats = max(1, -(-(events - (len(trace) - len(body))) // len(body)))
    deepen(trace, depth)
    tiled = [*trace[:first]]
    for number in range(repeats):
        tiled += moved(body, number * period)
    tiled += moved(trace[behind:], (repeats - 1) * period)
    raw["device_traces"][0] = tiled
    step = [span for span in spans if begin < span["time_us"] <= end]
    raw["external_annotations"] = [
        *(span for span in spans if span["time_us"] <= begin),
        *({**one, "time_us": one["time_us"] + n * period} for n in range(repeats) for one in step),
        *(
            {**span, "time_us": span["time_us"] + (repeats - 1) * period}
            for span in spans
            if span["time_us"] > end
        ),
    ]
    with path.open("wb") as file:
        pickle.dump(raw, file, protocol=4)
    return len(tiled)


def deepen(trace: Sequence[dict[str, Any]], depth: int) -> None:
    """Add outer frames, the same objects to each stack, where stacks are shallower."""
    outer = [{"filename": "launcher.py", "line": line, "name": "run"} for line in range(depth)]
    done: set[int] = set()
    for one in trace:
        frames = one["frames"]
        if frames and id(frames) not in done:
            done.add(id(frames))
            frames.extend(outer[: max(0, depth - len(frames))])


def moved(events: Sequence[dict[str, Any]], by: int) -> list[dict[str, Any]]:
    """The events later, with numbers and lists of their own; two events that shared a list still do."""
    lists: dict[int, list[Any]] = {}
    return [
        {
            **event,
            "time_us": event["time_us"] + by,
            # sums make new integers: a pickle would otherwise refer to the first one
            "addr": event["addr"] + by - by,
            "size": event["size"] + by - by,
            "frames": lists.setdefault(id(event["frames"]), list(event["frames"])),
        }
        for event in events
    ]


def run(command: Sequence[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of a Python process."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return seconds, usage.ru_maxrss * 1024


def table(measured: dict[str, list[tuple[float, int]]]) -> list[Row]:
    middle = {
        name: (statistics.median(s for s, _ in pairs), int(statistics.median(b for _, b in pairs)))
        for name, pairs in measured.items()
    }
    floor_seconds, floor_bytes = middle[BARE]
    return [
        Row(name, seconds, peak, seconds / floor_seconds, peak / floor_bytes)
        for name, (seconds, peak) in middle.items()
    ]


def show(rows: Sequence[Row], events: int, sizes: dict[str, int]) -> None:
    print(f"{events:,} events, {sizes['file'] / 1e6:.1f} MB; page {sizes['page'] / 1e6:.2f} MB\n")
    print(f"{'way':<18}{'seconds':>9}{'peak MB':>9}{'x time':>8}{'x memory':>10}")
    for row in rows:
        ratios = f"{row.times:>8.2f}{row.memory:>10.2f}"
        print(f"{row.way:<18}{row.seconds:>9.2f}{row.peak_bytes / 1e6:>9.0f}{ratios}")


if __name__ == "__main__":
    main()
