"""Measure the census from outside: how long a million objects take, and whether the job notices.

python benchmarks/outside.py million          # seconds for a heap of a million objects
python benchmarks/outside.py soak [CENSUSES]  # losses and step times of a job that is read over and over
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

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
import json, sys, threading, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
kept, losses, times = [], [], []
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
print("ready", flush=True)
while not ended.is_set() or len(losses) < 200:
    began = time.perf_counter()
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach() * 1.0)
    del kept[:-100]
    losses.append(loss.item().hex())
    times.append(time.perf_counter() - began)
print(json.dumps([losses, times]), flush=True)
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


def soak(count: int) -> None:
    from memtriage.outside.census import take_census
    from memtriage.outside.memory import OutsideError

    job, failed, began = _job(_TRAINING), 0, time.perf_counter()
    for number in range(count):
        try:
            take_census(job.pid, pause=number % 2 == 1)
        except OutsideError as error:
            failed += 1
            print(error, flush=True)
    read_s = time.perf_counter() - began
    read, read_times = json.loads(job.communicate("end\n")[0])
    plain_job = _job(_TRAINING)
    alone, alone_times = json.loads(plain_job.communicate("end\n")[0])
    common = min(len(read), len(alone))
    equal = read[:common] == alone[:common]
    while len(alone) < len(read):  # the same job alone, for as many steps as were read
        source = _TRAINING.replace("len(losses) < 200", f"len(losses) < {len(read)}")
        alone, alone_times = json.loads(_job(source).communicate("end\n")[0])
        equal = equal and alone[: len(read)] == read
    print(f"{count} censuses in {read_s:.0f} s, {failed} failed; {len(read):,} steps, losses equal: {equal}")
    print(
        f"median step: {statistics.median(read_times) * 1e6:.0f} us read, "
        f"{statistics.median(alone_times) * 1e6:.0f} us alone"
    )


if __name__ == "__main__":
    if sys.argv[1] == "million":
        million()
    else:
        soak(int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
