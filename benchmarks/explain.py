"""How long `memtriage explain` takes over a large log, against `grep -c -i` over the same file.

    python benchmarks/explain.py [--megabytes N] [--rounds N] [--json FILE]

Both are whole commands, in turns, start of the interpreter included. Three logs of eight interleaved ranks,
each with the failure of rank 5 and what follows it at the end:

plain     progress lines only, as a training run prints them
reports   a report of memory by DeepSpeed every eight lines: messages to read, and no failures
failures  every line is an out-of-memory error: the most that there can be to read
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

RANKS: Final = 8
MEGABYTE: Final = 10**6

ERROR: Final = (
    "[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU {rank} "
    "has a total capacity of 79.18 GiB of which 1.08 GiB is free. Including non-PyTorch memory, this process "
    "has 78.09 GiB memory in use. Of the allocated memory 75.31 GiB is allocated by PyTorch, and 1.83 GiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)
REPORT: Final = (
    "[2024-11-20 12:33:09,477] [INFO] [utils.py:828:see_memory_usage] MA 11.02 GB         Max_MA 17.08 GB  "
    "       CA 20.08 GB         Max_CA 20 GB \n"
)
END: Final = (
    '[rank5]: Traceback (most recent call last):\n[rank5]:   File "train.py", line 12, in main\n'
    "[rank2]: step done\n" + ERROR.format(rank=5, asked=1.96)
) + "".join(
    f"[rank{rank}]:[E1120 12:33:44.1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=12)\n"
    for rank in range(RANKS)
    if rank != 5
)


def progress(line: int, rng: random.Random) -> str:
    return (
        f"2024-11-20 12:{line // 60 % 60:02d}:{line % 60:02d},{line % 1000:03d} INFO [rank{line % RANKS}]: "
        f"train.py:88 step {line // RANKS} loss={rng.random():.4f} tokens/s={rng.randint(1000, 90000)} "
        f"allocated {rng.random() * 80:.1f} GiB grad_norm={rng.random():.5f}\n"
    )


def plain(line: int, rng: random.Random) -> str:
    return progress(line, rng)


def reports(line: int, rng: random.Random) -> str:
    return progress(line, rng) + (REPORT if line % RANKS == 0 else "")


def failures(line: int, rng: random.Random) -> str:
    return ERROR.format(rank=line % RANKS, asked=rng.uniform(1.1, 9))


LOGS: Final[dict[str, Callable[[int, random.Random], str]]] = {
    "plain": plain,
    "reports": reports,
    "failures": failures,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: seconds, and bytes of the largest resident set."""

    log: str
    command: str
    megabytes: float
    rounds: int
    median_s: float
    fastest_s: float
    slowest_s: float
    peak_rss: int
    said: str


def write_log(path: Path, kind: str, nbytes: int) -> None:
    """Write a log of about so many bytes."""
    rng = random.Random(1)
    with path.open("w", encoding="ascii") as stream:
        written, line = 0, 0
        while written < nbytes:
            written += stream.write(LOGS[kind](line, rng))
            line += 1
        stream.write(END)


def timed(command: Sequence[str]) -> tuple[float, int, str]:
    """Seconds, the peak of resident memory in bytes, and the standard output of a command."""
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out)
        _, _, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        out.seek(0)
        said = out.read().decode()
    return took, usage.ru_maxrss * 1024, said


def measure(folder: Path, megabytes: int, rounds: int) -> Iterator[Row]:
    for kind in LOGS:
        path = folder / f"{kind}.log"
        write_log(path, kind, megabytes * MEGABYTE)
        commands = {
            "grep -c -i": ["grep", "-c", "-i", "out of memory", str(path)],
            "memtriage explain": [sys.executable, "-m", "memtriage", "explain", "--json", str(path)],
        }
        runs: dict[str, list[tuple[float, int, str]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                runs[name].append(timed(command))
        for name, took in runs.items():
            seconds = [reading[0] for reading in took]
            yield Row(
                log=kind,
                command=name,
                megabytes=path.stat().st_size / MEGABYTE,
                rounds=rounds,
                median_s=statistics.median(seconds),
                fastest_s=min(seconds),
                slowest_s=max(seconds),
                peak_rss=max(reading[1] for reading in took),
                said=told(name, took[0][2]),
            )
        path.unlink()


def told(command: str, output: str) -> str:
    """What a command answered, in short."""
    if command.startswith("grep"):
        return f"{int(output):,} lines"
    report = json.loads(output)
    first = next(event for event in report["events"] if event["role"] == "cause")
    return f"{report['diagnosis']}, line {first['line']:,}, rank {first['ranks'][0]}"


def print_table(rows: Sequence[Row]) -> None:
    head = ("log", "command", "MB", "median", "fastest", "slowest", "MB/s", "peak RSS", "answer")
    lines = [head, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def cells(row: Row) -> tuple[str, ...]:
    times = tuple(f"{seconds:.2f} s" for seconds in (row.median_s, row.fastest_s, row.slowest_s))
    rate = f"{row.megabytes / row.median_s:,.0f}"
    return (
        row.log,
        row.command,
        f"{row.megabytes:.0f}",
        *times,
        rate,
        f"{row.peak_rss / 2**20:.0f} MiB",
        row.said,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(Path(folder), args.megabytes, args.rounds))
    machine = f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    print(f"{machine}; whole commands, in turns\n")
    print_table(rows)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
