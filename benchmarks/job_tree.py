"""What reading the sizes of a job's other processes costs per sample, by their number.

    python benchmarks/job_tree.py [--samples N]

Each of the processes is a Python that waits, as a worker does between two batches. Printed are the median and
the 95th percentile of the processor time of one sample, which is what a loaded machine does not change much.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Final

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.position import TrainingPosition
from memtriage.session.job_watch import JobWatch

WORKERS: Final = (2, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=200)
    samples = parser.parse_args().samples
    for count in WORKERS:
        times = sample_times(count, samples)
        print(
            f"{count:3} workers: median {1e3 * statistics.median(times):.2f} ms, "
            f"95th percentile {1e3 * statistics.quantiles(times, n=20)[-1]:.2f} ms"
        )


def sample_times(count: int, samples: int) -> list[float]:
    """Return the processor seconds of samples of so many processes, all of which are named by then."""
    position = TrainingPosition()
    watch = JobWatch(Evidence(), lambda: position, None, lambda line: None)
    times = []
    with ExitStack() as processes:
        for _ in range(count):
            waits = [sys.executable, "-c", "print(flush=True); input()"]
            process = processes.enter_context(subprocess.Popen(waits, stdin=-1, stdout=-1))
            assert process.stdout is not None
            process.stdout.readline()
            processes.callback(process.kill)
        for sample in range(samples + 2):
            position = TrainingPosition(time_s=10.0 * sample, step=sample)
            began = time.thread_time()
            watch.at_wake()
            times.append(time.thread_time() - began)
    return times[2:]


if __name__ == "__main__":
    main()
