"""What reading a snapshot costs beside a bare `pickle.load`, for each shape of file.

    python benchmarks/snapshot_shapes.py [--events N] [--rounds N]

The shapes are those of `stacks=` (all, python), `context=` (alloc, None), each with and
without frames on frees. Seconds are those of a process on its cores, the least of the rounds:
loading and making columns, no judgment.
"""

from __future__ import annotations

import argparse
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BARE = """
import pickle, sys, time
begun = time.process_time()
with open(sys.argv[1], "rb") as file:
    pickle.load(file)
print(time.process_time() - begun)
"""
READ = """
import sys, time
from pathlib import Path
from memtriage.allocator.trace_columns import StackTable, trace_columns
from memtriage.snapshots.file import loaded
begun = time.process_time()
with loaded(Path(sys.argv[1])) as raw:
    table = StackTable()
    for trace in raw["device_traces"]:
        trace_columns(trace, table)
print(time.process_time() - begun)
"""
FRAMES = {"all": (30, 12), "python": (0, 12), "alloc": (0, 8), "none": (0, 0)}
"""Native and Python frames of a stack, by shape."""
BEGIN = 0x7F00_0000_0000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'stacks':<9}{'on frees':<10}{'MB':>6}{'pickle.load':>13}{'read':>8}{'times':>7}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.pickle"
        for stacks in FRAMES:
            for on_frees in (True, False) if stacks != "none" else (False,):
                path.write_bytes(pickle.dumps(snapshot(stacks, on_frees, args.events), 4))
                bare, read = (min(seconds(code, path) for _ in range(args.rounds)) for code in (BARE, READ))
                print(
                    f"{stacks:<9}{'yes' if on_frees else 'no':<10}{path.stat().st_size / 1e6:>6.0f}"
                    f"{bare:>13.2f}{read:>8.2f}{read / bare:>7.2f}",
                    flush=True,
                )


def snapshot(stacks: str, on_frees: bool, events: int) -> dict[str, Any]:
    """A snapshot whose frames are shared as torch shares them, and whose empty lists are not."""
    chance = random.Random(1)
    native = [{"name": f"at::native::k{i}(long)", "filename": "??", "line": 0} for i in range(300)]
    python = [{"name": f"f{i}", "filename": "/src/train.py", "line": i} for i in range(300)]
    natives, pythons = FRAMES[stacks]
    distinct = [chance.sample(native, natives) + chance.sample(python, pythons) for _ in range(2000)]
    trace = []
    for number in range(events // 3):
        frames = list(chance.choice(distinct))
        common = {
            "addr": BEGIN + 512 * (number % 5000),
            "size": 512 * (1 + number % 7),
            "stream": 0,
            "compile_context": "N/A",
            "user_metadata": "",
        }
        for order, action in enumerate(("alloc", "free_requested", "free_completed")):
            kept = frames if action == "alloc" or on_frees else []
            trace.append({"action": action, **common, "time_us": 3 * number + order, "frames": kept})
    return {"segments": [], "device_traces": [trace]}


def seconds(code: str, path: Path) -> float:
    """Seconds that a process prints."""
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(run.stdout)


if __name__ == "__main__":
    main()
