"""Reading another process again and again, and counting its steps by the numbers in its variables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from memtriage.outside.census import JobReader
from memtriage.session.outside_helper import ReadProcess, _between, _LoopCounter
from memtriage.session.outside_reader import ReadRequest
from support.outside_parts import known_python

_SPAWNS = """
import multiprocessing, sys, time
from multiprocessing import util
def train(told):
    import torch
    kept = [torch.ones(1000) for _ in range(5)]
    util.Finalize(None, time.sleep, args=(60,), exitpriority=1)  # it ends a minute after the function
    told.send("runs")
    told.recv()
if __name__ == "__main__":
    told, other = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=train, args=(other,), daemon=True)
    child.start()
    told.recv()
    print(child.pid, flush=True)
    told.send(sys.stdin.readline())
    sys.stdin.readline()
"""


@known_python
def test_a_reading_after_its_function_has_returned_proves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(_SPAWNS)
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        child = int(job.stdout.readline())
        process = ReadProcess.of(
            ReadRequest(child, str(tmp_path)), os.open(f"/proc/{child}/mem", os.O_RDONLY)
        )
        runs = process.read().census
        job.stdin.write("\n")
        job.stdin.flush()
        until = time.monotonic() + 30
        while process.reader.runs_program() and time.monotonic() < until:
            time.sleep(0.05)
        returned = process.read().census
        process.close()
        job.kill()
        os.kill(child, 9)
    assert runs is not None and returned is not None
    assert runs.between and [seen.storages for seen in runs.holders] == [5]
    assert not returned.between and not returned.holders


@known_python
@pytest.mark.parametrize(
    ("script", "place"),
    [
        pytest.param("for step in [41, 42]:\n    at(step)\n", "<module>", id="module"),
        pytest.param("def main():\n    step = 42\n    at(step)\nmain()\n", "main", id="function"),
    ],
)
def test_numbers_of_what_runs_are_read(tmp_path: Path, script: str, place: str) -> None:
    waits = "import sys\ndef at(step):\n    if step == 42: print(flush=True), sys.stdin.readline()\n"
    (tmp_path / "loop.py").write_text(f"import torch\n{waits}{script}")
    command = [sys.executable, tmp_path / "loop.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        job.stdout.readline()
        with closing(JobReader(job.pid)) as reader:
            numbers = dict(reader.numbers())
        job.kill()
    assert numbers[place, "step"] == 42


def counted(values: list[int]) -> _LoopCounter:
    counter = _LoopCounter(values[0])
    for value in values[1:]:
        counter.add(value)
    return counter


def test_a_counter_of_steps_has_the_unit_one_and_goes_on_after_it_began_again() -> None:
    steps = counted([3, 5, 8, 8, 9, 2, 4])
    assert (steps.total, steps.changes, steps.unit) == (10, 5, 1)


def test_a_count_of_samples_has_another_unit() -> None:
    assert counted([16, 48, 96, 112]).unit == 16


def test_steps_between_two_counts_are_interpolated() -> None:
    assert _between((10.0, 100), (14.0, 120), 11.0) == 105
    assert _between((10.0, None), (14.0, 120), 11.0) is None
