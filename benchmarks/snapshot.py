"""What reading a recorded snapshot of a million events costs, beside a bare `pickle.load` of the same file.

    python benchmarks/record_snapshot.py recording.pickle      (on a GPU; once)
    python benchmarks/snapshot.py recording.pickle [--rounds N] [--json FILE]

All ways run in turns, each in a process of its own. Seconds are those of the process on its cores, so that
neighbors count as little as can be; memory is the peak resident set. Both include the interpreter.

pickle.load         the floor: `pickle.load` of the file, and nothing else
snapshot --html     `memtriage snapshot FILE --html OUT`: load, replay, owners, findings, page, report
snapshot --json     `memtriage snapshot FILE --json`: the same without the page
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

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
        path = unpacked(args.recording, Path(folder))
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
    show(rows, sizes)
    if args.json:
        result = {
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
    parser.add_argument("recording", type=Path, help="of record_snapshot.py; also as .xz")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def unpacked(path: Path, folder: Path) -> Path:
    """The recording without compression: both ways are to read the same bytes."""
    if path.suffix != ".xz":
        return path
    plain = folder / path.stem
    with lzma.open(path) as source, plain.open("wb") as file:
        shutil.copyfileobj(source, file)
    return plain


def run(command: Sequence[str]) -> tuple[float, int]:
    """Seconds on cores and peak resident bytes of a Python process."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


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


def show(rows: Sequence[Row], sizes: dict[str, int]) -> None:
    print(f"{sizes['file'] / 1e6:.1f} MB; page {sizes['page'] / 1e6:.2f} MB\n")
    print(f"{'way':<18}{'seconds':>9}{'peak MB':>9}{'x time':>8}{'x memory':>10}")
    for row in rows:
        ratios = f"{row.times:>8.2f}{row.memory:>10.2f}"
        print(f"{row.way:<18}{row.seconds:>9.2f}{row.peak_bytes / 1e6:>9.0f}{ratios}")


if __name__ == "__main__":
    main()
