"""The cures of the zoo's leaks, applied to the scripts: growth stops, and the printed results stay the same.

`truth.toml` has them as patches. They are measured without memtriage, by malloc's bytes in use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.zoo.test_zoo import LEAKING, TRUTH, ZOO

OF_MAIN = [name for name in LEAKING if not {"where", "private_pages"} & TRUTH[name].keys()]
"""Scripts whose growth the counter of `MEASURE` shows: it is in their own process, from malloc or shared."""
CURES = [(name, number) for name in OF_MAIN for number in range(len(TRUTH[name]["cures"]))]
LEFT = 0.15
"""A cure leaves less than this part of the growth: a number per step, or a tensor object."""
MEASURE = """
import ctypes, gc, json, os, re, runpy, sys, traceback
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
readings, step, backward = [], 0, torch.autograd.backward
def read():
    if gc.isenabled():
        gc.collect()
    info = mallinfo()
    shared = re.search(r"RssShmem:\\s+(\\d+)", open("/proc/self/status").read())
    return info.uordblks + info.hblkhd + 1024 * int(shared[1])
def stepped(*_):
    global step
    step += 1
def measured(*args, **kwargs):
    readings.append((step, read()))
    torch.autograd.backward = backward  # one within a backward does not count
    try:
        return backward(*args, **kwargs)
    finally:
        torch.autograd.backward = measured
def run(script):
    os.chdir(os.path.dirname(script))
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
    register_optimizer_step_post_hook(stepped)
    torch.autograd.backward = measured
    sys.argv, status = [script], 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    json.dump(readings, open("readings.json", "w"))
    sys.stdout.flush()
    os._exit(status)
gc.freeze()
for line in sys.stdin:
    child = os.fork()  # each script has a process of its own; torch is only imported once
    if not child:
        run(line.strip())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that measures one script for each line that it gets."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def growth(readings: list[tuple[int, int]], *, within_step: bool) -> float:
    """Return the growth of memory per reading, after the first third; or inside of each step."""
    if within_step:
        steps = {step: [nbytes for at, nbytes in readings if at == step] for step, _ in readings}
        rises = [(each[-1] - each[0]) / (len(each) - 1) for each in steps.values() if len(each) > 1]
        return sum(rises[2:]) / len(rises[2:])
    third = len(readings) // 3
    middle, last = readings[third : 2 * third], readings[2 * third : 3 * third]
    return (sum(nbytes for _, nbytes in last) - sum(nbytes for _, nbytes in middle)) / third**2


def run(server: subprocess.Popen[str], source: str, script: Path) -> tuple[int, str, list[tuple[int, int]]]:
    """Return a script's status, what it printed, and (step, bytes in use) at each backward."""
    script.parent.mkdir()
    script.write_text(source)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{script}\n")
    server.stdin.flush()
    status = int(server.stdout.readline())
    return (
        status,
        (script.parent / "printed").read_text(),
        json.loads((script.parent / "readings.json").read_text()),
    )


def cured(name: str, cure: dict[str, Any]) -> str:
    """Return the source of a script with a cure's replacements, each of which must apply once or more."""
    source = (ZOO / name).read_text()
    for old, new in cure["patch"]:
        assert old in source, f"{name} has no {old!r}"
        source = source.replace(old, new)
    return source


def lines(printed: str, changes: str | None) -> str:
    return printed if changes is None else re.sub(changes, "", printed)


@pytest.mark.long
@pytest.mark.parametrize(("name", "number"), CURES)
def test_a_cure_stops_the_growth_and_changes_no_result(
    name: str, number: int, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    truth = TRUTH[name]
    cure = truth["cures"][number]
    within_step = "bytes_per_microbatch" in truth and "bytes_per_step" not in truth
    status, printed, readings = run(server, (ZOO / name).read_text(), tmp_path / "leaking" / Path(name).name)
    assert status == truth.get("exit", 0)
    before = growth(readings, within_step=within_step)
    status, afterwards, readings = run(server, cured(name, cure), tmp_path / "cured" / Path(name).name)
    assert status == 0, afterwards
    after = growth(readings, within_step=within_step)
    assert before > 20_000, before
    assert after < LEFT * before, (before, after)
    if truth.get("exit", 0) == 0:
        assert lines(afterwards, cure.get("changes")) == lines(printed, cure.get("changes"))


@pytest.mark.parametrize(("name", "number"), CURES)
def test_a_cure_applies(name: str, number: int) -> None:
    compile(cured(name, TRUTH[name]["cures"][number]), name, "exec")


@pytest.mark.parametrize("name", OF_MAIN)
def test_each_leak_has_a_cure(name: str) -> None:
    assert TRUTH[name]["cures"]
