"""A job on a GPU that was started plainly: its allocator's statistics and its tensors, read from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memtriage.account.process_ledger import gpu_rows
from memtriage.observe.cuda import counters
from memtriage.outside.census import take_census
from memtriage.outside.cuda_allocator import allocator_of
from memtriage.outside.memory import ForbiddenError
from memtriage.outside.python_layout import layout_of

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

_JOB = """
import json, sys
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
    stats = torch.cuda.memory_stats()
    print(json.dumps({name: stats[name] for name in stats if name.endswith("all.current")}), flush=True)

train(5)
for line in sys.stdin:
    train(int(line))
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _JOB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _said(job: subprocess.Popen[str]) -> dict[str, int]:
    assert job.stdout is not None
    found: dict[str, int] = json.loads(job.stdout.readline())
    return found


def test_this_process_reads_its_own_statistics() -> None:
    kept = [torch.zeros(300_011, device="cuda") for _ in range(3)]
    kept += [torch.zeros(11, device="cuda")]
    del kept[0]
    allocator = allocator_of(os.getpid())
    assert allocator is not None
    for _ in range(2):
        assert allocator.counters()["cuda:0"] == counters(0)
        kept.append(torch.zeros(5_000_000, device="cuda"))


def test_a_plain_job_is_read(job: subprocess.Popen[str], keep: Callable[[str, Any], None]) -> None:
    said = _said(job)
    try:
        census = take_census(job.pid, within_s=300)
    except ForbiddenError as error:
        pytest.skip(str(error))
    allocator = allocator_of(job.pid)
    assert allocator is not None
    found = allocator.counters()["cuda:0"]
    assert found.allocated == said["allocated_bytes.all.current"]
    assert found.reserved == said["reserved_bytes.all.current"]
    assert found.requested == said["requested_bytes.all.current"]
    held: dict[str, int] = {}
    owners: dict[str, int] = {}
    for storage in census.storages:
        if storage.device == "cuda:0":
            held[storage.holder or ""] = held.get(storage.holder or "", 0) + storage.nbytes
            owners[storage.owner] = owners.get(storage.owner, 0) + storage.nbytes
    assert held["__main__.history[*]"] == 5 * 256 * 1024 * 4
    assert owners["parameter"] == 4 * (1024 * 1024 + 1024) * 4
    assert owners["optimizer state"] >= 2 * owners["parameter"]
    rows = gpu_rows(owners, found, None)
    assert sum(row.bytes for row in rows) == found.reserved
    keep("outside", {"rows": [(row.row, row.owner, row.bytes) for row in rows], "held": held})
    assert job.stdin is not None
    job.stdin.write("3\n")
    job.stdin.flush()
    said = _said(job)
    assert allocator.counters()["cuda:0"].allocated == said["allocated_bytes.all.current"]
