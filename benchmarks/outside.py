"""Measure the census from outside: how long a million objects take, and whether the job notices.

python benchmarks/outside.py million                                 # seconds for a heap of a million objects
python benchmarks/outside.py soak CENSUSES [JOBS] [SECONDS]          # jobs that train are read over and over
python benchmarks/outside.py soak-small CENSUSES [JOBS] [SECONDS]    # jobs with a small heap

`soak` reads several jobs at the same time. Beside each one the same job runs that nobody reads. Their losses
must be equal to the bit, and their steps take as long.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_MILLION = """
import sys, torch
class Point:
    def __init__(self, i):
        self.a, self.b, self.c = [i], (i + 100000, str(i)), {"k": i}
class Slotted:
    __slots__ = ("x",)
    def __init__(self, i):
        self.x = [i]
points = [Point(i) for i in range(100_000)]
slotted = {i: Slotted(i) for i in range(100_000)}
nested = [[{"a": [i]}] for i in range(50_000)]
tensors = [torch.zeros(4) for _ in range(10_000)]
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(200)])
losses = [model(torch.zeros(2, 8)).sum() for _ in range(20)]
print("ready", flush=True)
sys.stdin.readline()
"""
_TRAINING = """
REST = 0
import json, sys, threading, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
kept = []
def step():
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach() * 1.0)
    del kept[:-100]
    return loss.item()
"""
_SMALL = """
REST = 0.002  # leaves the processors to the readers
import json, sys, threading, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
weights = torch.randn(64, 64)
kept = []
def step():
    global weights
    weights = torch.tanh(weights @ torch.randn(64, 64) * 0.1)
    kept.append(weights[0] * 2)
    del kept[:-100]
    return weights.sum().item()
"""
_LOOP = """
losses, times = [], []
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
print("ready", flush=True)
while not ended.is_set():
    began = time.perf_counter()
    losses.append(step())
    times.append(time.perf_counter() - began)
    time.sleep(REST)
print(json.dumps([[loss.hex() for loss in losses], times]), flush=True)
"""


def _job(source: str) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    job.stdout.readline()
    return job


def million() -> None:
    from memtriage.outside.census import take_census

    job = _job(_MILLION)
    try:
        for _ in range(5):
            wall, cpu = time.perf_counter(), time.process_time()
            census = take_census(job.pid)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{census.objects:,} objects in {wall:.2f} s ({cpu:.2f} s of processor time)", flush=True)
    finally:
        job.kill()


@dataclass
class Soaked:
    """What came of one job that was read over and over.

    Attributes:
        censuses, failed: how many were taken; of these how many gave none.
        least, most: storages that a census listed.
        stops: seconds for which the job was stopped.
        steps: of the job and of its twin, the fewer.
        equal: whether all losses of these steps are equal to the bit.
        read_us, alone_us: median of a step's time, of the job and of its twin.
    """

    censuses: int
    failed: int
    least: int
    most: int
    stops: list[float]
    steps: int
    equal: bool
    read_us: float
    alone_us: float


def read_over_and_over(source: str, censuses: int, seconds: float) -> Soaked:
    """Read one job, every eighth time with a stop or twice, next to one that is not."""
    from memtriage.outside.census import take_census
    from memtriage.outside.memory import OutsideError

    job, twin = _job(source + _LOOP), _job(source + _LOOP)
    failed, taken, sizes, stops = 0, 0, [], []
    ends = time.monotonic() + seconds
    while taken < censuses and time.monotonic() < ends:
        taken += 1
        try:
            found = take_census(job.pid, pause=taken % 8 == 0, twice=taken % 8 == 4)
        except OutsideError as error:
            failed += 1
            print(error, flush=True)
            continue
        sizes.append(len(found.storages))
        if taken % 8 == 0:
            stops.append(found.stopped_s)
    (read, read_times), (alone, alone_times) = (
        json.loads(process.communicate("end\n")[0]) for process in (job, twin)
    )
    steps = min(len(read), len(alone))
    return Soaked(
        taken, failed, min(sizes, default=0), max(sizes, default=0), stops, steps,
        read[:steps] == alone[:steps],
        statistics.median(read_times[:steps]) * 1e6, statistics.median(alone_times[:steps]) * 1e6,
    )  # fmt: skip


def soak(source: str, count: int, jobs: int, seconds: float) -> None:
    began = time.perf_counter()
    code = (
        "import dataclasses, json, runpy; found = runpy.run_path({file!r})['read_over_and_over']"
        "({source!r}, {count}, {seconds}); print(json.dumps(dataclasses.asdict(found)))"
    )

    def one(_: int) -> Soaked:
        text = code.format(file=__file__, source=source, count=-(-count // jobs), seconds=seconds)
        answer = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True)
        *said, last = answer.stdout.splitlines()
        print("\n".join(said), end="\n" if said else "")
        return Soaked(**json.loads(last))

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, range(jobs)))
    stops = sorted(stop for part in found for stop in part.stops)
    took = time.perf_counter() - began
    print(
        f"{sum(part.censuses for part in found):,} censuses of {jobs} jobs in {took:.0f} s, "
        f"{sum(part.failed for part in found)} failed; each listed {min(part.least for part in found)} to "
        f"{max(part.most for part in found)} storages"
    )
    equal = all(part.equal for part in found)
    print(f"{sum(part.steps for part in found):,} steps, losses equal to the bit: {equal}")
    for part in found:
        ratio = part.read_us / part.alone_us
        print(f"median step: {part.read_us:.0f} us read, {part.alone_us:.0f} us alone, ratio {ratio:.3f}")
    if stops:
        middle, longest = statistics.median(stops) * 1e3, stops[-1] * 1e3
        print(f"{len(stops)} stops: median {middle:.1f} ms, longest {longest:.1f} ms")


def main() -> None:
    what, *numbers = sys.argv[1:]
    if what == "million":
        million()
        return
    count, jobs, seconds = [*map(int, numbers), *(1000, 1, 10**6)[len(numbers) :]]
    soak({"soak": _TRAINING, "soak-small": _SMALL}[what], count, jobs, seconds)


if __name__ == "__main__":
    main()
