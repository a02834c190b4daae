"""What a watch costs in a long run: its memory, its record, and a mark, at 1,000, 10,000 and 100,000 steps.

    python benchmarks/soak.py [--steps N] [--short] [--json FILE]

A tiny model trains in two processes, in the same way: one is watched, one is not. Both stop at each tenth of
the steps, at a hundredth and so on, collect garbage and read their own counters. All columns should stay as
they are from line to line.

memory    what the watched process has in use above the other one: malloc's bytes (`mallinfo2`), and the
          arenas of Python's own allocator, which hold the small objects
resident  the same of the resident set, which depends on what malloc kept as well
record    bytes of the run's directory
mark      the median of the last 500 marks of a step; and the processor time of all marks since the line
          before, per mark: in that are the censuses, of which a healthy run has few
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

STEPS: Final = 100_000
SHORT: Final = 1_000
LINES: Final = 3
LAST_MARKS: Final = 500


@dataclass(frozen=True)
class Reading:
    """One process after so many steps. Sizes in bytes, times in microseconds; no mark without a watch."""

    steps: int
    malloc: int
    arenas: int
    resident: int
    record: int = 0
    mark: float = 0.0
    processor: float = 0.0


class Marks:
    """How long the marks of a session take."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []
        self.count = 0
        self.cpu_s = 0.0

    def timed(self, mark: Callable[[str], None]) -> Callable[[str], None]:
        """The same function, whose calls are timed."""

        def measured(name: str) -> None:
            started, started_cpu = time.perf_counter(), time.thread_time()
            mark(name)
            self.cpu_s += time.thread_time() - started_cpu
            self.count += 1
            if name == "step":
                self.of_steps.append((time.perf_counter() - started) * 1e6)
                del self.of_steps[:-LAST_MARKS]

        return measured

    def since(self) -> tuple[float, float]:
        """Microseconds: the median of the last marks of a step, and each mark's processor time since."""
        mean_us = self.cpu_s * 1e6 / max(1, self.count)
        self.count, self.cpu_s = 0, 0.0
        return statistics.median(self.of_steps or [0.0]), mean_us


def soak(steps: int, watched: bool, folder: Path) -> Iterator[Reading]:
    """Train; yield a reading at each of the last powers of ten."""
    import torch

    import memtriage
    from memtriage.process import active

    stops = [steps // 10**back for back in reversed(range(LINES))]
    with memtriage.watch(folder, quiet=True) if watched else nullcontext():
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        inputs = torch.randn(4, 16)
        marks = Marks()
        session: Any = active.session
        if session is not None:
            session.mark = marks.timed(session.mark)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if step in stops:
                yield reading(step, folder, marks)


def reading(step: int, folder: Path, marks: Marks) -> Reading:
    """What this process has in use now."""
    from memtriage.observe.host import rss
    from memtriage.observe.malloc import malloc_info, python_arenas

    gc.collect()
    malloc = malloc_info()
    assert malloc is not None, "malloc is not glibc's"
    record = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Reading(step, malloc.in_use, python_arenas() or 0, rss() or 0, record, *marks.since())


def in_a_process(steps: int, watched: bool) -> list[Reading]:
    """The readings of a fresh process."""
    command = [sys.executable, __file__, "--steps", str(steps), "--alone", "watched" if watched else "bare"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [Reading(**load) for load in json.loads(done.stdout)]


def lines(watched: Sequence[Reading], bare: Sequence[Reading]) -> Iterator[str]:
    """The table as text."""
    yield "  steps   memory: malloc   + arenas   resident     record   mark, median   processor"
    for one, other in zip(watched, bare, strict=True):
        sizes = (
            one.malloc - other.malloc,
            one.arenas - other.arenas,
            one.resident - other.resident,
            one.record,
        )
        malloc, arenas, resident, record = (f"{size / 1024:,.0f} KiB" for size in sizes)
        yield (
            f"{one.steps:7,} {malloc:>16} {arenas:>10} {resident:>10} {record:>10} "
            f"{one.mark:11.1f} us {one.processor:8.1f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a watch costs in a long run.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--short", action="store_true", help=f"{SHORT:,} steps, to see that it works")
    parser.add_argument("--json", type=Path, help="write the readings there")
    parser.add_argument("--alone", choices=("watched", "bare"), help="one of both, in this process, as JSON")
    asked = parser.parse_args()
    steps = SHORT if asked.short else asked.steps
    if asked.alone:
        with tempfile.TemporaryDirectory() as folder:
            readings = list(soak(steps, asked.alone == "watched", Path(folder)))
        print(json.dumps([asdict(sample) for sample in readings]))
        return
    bare, watched = in_a_process(steps, False), in_a_process(steps, True)
    print("\n".join(lines(watched, bare)))
    if asked.json is not None:
        result = {
            "watched": [asdict(sample) for sample in watched],
            "bare": [asdict(sample) for sample in bare],
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
