"""A job on a GPU that was started plainly: its allocator's statistics and its tensors, read from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memtriage.account.process_ledger import gpu_rows
from memtriage.outside.census import take_census
from memtriage.outside.memory import ForbiddenError
from memtriage.outside.python_layout import layout_of

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

_JOB = """
import sys
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
history = []

def train(steps):
    for _ in range(steps):
        hidden = model(torch.ones(256, 1024, device="cuda"))
        hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(hidden.detach().clone())
    del hidden
    torch.cuda.synchronize()
    print(torch.cuda.memory_reserved(), flush=True)

train(5)
sys.stdin.read()
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _JOB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_plain_job_is_read(job: subprocess.Popen[str], keep: Callable[[str, Any], None]) -> None:
    assert job.stdout is not None
    used = int(job.stdout.readline())
    try:
        census = take_census(job.pid, within_s=300)
    except ForbiddenError as error:
        pytest.skip(str(error))
    held: dict[str, int] = {}
    owners: dict[str, int] = {}
    for storage in census.storages:
        if storage.device == "cuda:0":
            held[storage.holder or ""] = held.get(storage.holder or "", 0) + storage.nbytes
            owners[storage.owner] = owners.get(storage.owner, 0) + storage.nbytes
    assert held["__main__.history[*]"] == 5 * 256 * 1024 * 4
    assert owners["parameter"] == 4 * (1024 * 1024 + 1024) * 4
    assert owners["optimizer state"] >= 2 * owners["parameter"]
    rows = gpu_rows(owners, used)
    assert sum(row.bytes for row in rows) == used
    keep("outside", {"rows": [(row.row, row.owner, row.bytes) for row in rows], "held": held})
