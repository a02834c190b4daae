"""Primed memory on a real GPU: what was predicted, CUDA IPC, parking, and `memtriage run --prime`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from tests.support.primed_training import build, priming_of

import memtriage
from memtriage.treat.priming import CudaBlocks, allocate, prime_device

MIB = 1 << 20
SIZES = [64 * MIB, 40 * MIB, 20 * MIB]
TIME_LIMIT_S = 300


@pytest.fixture(autouse=True)
def no_workspaces(on_a_gpu: None) -> None:
    """Workspaces of cuBLAS that earlier tests left live in their segments and would pin them."""
    give_all_back()


def train(steps: int) -> list[float]:
    torch.manual_seed(0)
    found: list[float] = []
    model, optimizer, step = build(torch.device("cuda"), found)
    for _ in range(steps):
        step()
    del model, optimizer, step
    return found


def test_blocks_leave_one_segment_each_and_no_peak() -> None:
    assert allocate(SIZES, CudaBlocks(0)) is None
    assert torch.cuda.memory_reserved() == sum(SIZES)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 0
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == sum(SIZES)
    del tensor


def test_too_large_blocks_leave_nothing_behind() -> None:
    free, _ = torch.cuda.mem_get_info()
    assert allocate([256 * MIB, 2 * free], CudaBlocks(0)) is not None
    assert torch.cuda.memory_reserved() == 0


def test_primed_training_reserves_what_was_predicted(keep: Any) -> None:
    priming = priming_of(torch.cuda.get_device_name())
    assert priming.helps
    plain = train(12)
    before = torch.cuda.max_memory_reserved()
    give_all_back()
    assert prime_device(priming).primed
    primed = train(12)
    after = torch.cuda.max_memory_reserved()
    keep(
        "prime",
        {
            "reserved": [before, after],
            "predicted": [priming.reserved_before, priming.reserved_after],
            "allocated": [torch.cuda.max_memory_allocated(), priming.allocated],
        },
    )
    assert before == pytest.approx(priming.reserved_before, rel=0.01)
    assert after == pytest.approx(priming.reserved_after, rel=0.01)
    assert primed[0] == plain[0]
    assert primed == pytest.approx(plain, rel=1e-3)


def give_all_back() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _sum(tensors: Any, sums: Any) -> None:
    received = tensors.get()
    sums.put([int(tensor.sum()) for tensor in received])
    del received  # tells the process that made them


def test_another_process_reads_primed_memory_by_ipc() -> None:
    assert allocate(SIZES, CudaBlocks(0)) is None
    tensors = [torch.full((5 * MIB,), number, dtype=torch.int32, device="cuda") for number in (1, 2)]
    assert torch.cuda.memory_reserved() == sum(SIZES)
    context = multiprocessing.get_context("spawn")
    shared, sums = context.Queue(), context.Queue()
    reader = context.Process(target=_sum, args=(shared, sums))
    reader.start()
    shared.put(tensors)
    assert sums.get(timeout=TIME_LIMIT_S) == [5 * MIB, 10 * MIB]
    reader.join(TIME_LIMIT_S)
    assert reader.exitcode == 0
    del tensors
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_parking_gives_primed_memory_back_and_brings_values_back() -> None:
    assert allocate(SIZES, CudaBlocks(0)) is None
    model = torch.nn.Linear(2048, 2048, device="cuda")
    weight = model.weight.detach().cpu()
    memtriage.park(model)
    assert torch.cuda.memory_reserved() == 0
    memtriage.unpark()
    assert torch.equal(model.weight.detach().cpu(), weight)
    memtriage.release_parking()


def test_run_primes_a_script_before_its_first_allocation(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from tests.support.primed_training import build\n"
        "model, optimizer, step = build(torch.device('cuda'), [])\n"
        "for _ in range(8):\n"
        "    step()\n"
        "print(torch.cuda.max_memory_reserved())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memtriage", "run", "--prime", "-o", str(tmp_path / "run"), str(script)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "run").rglob("priming.json")
    priming = json.loads(file.read_text())
    assert priming["primed"], priming
    assert int(done.stdout) == pytest.approx(priming["reserved_after"], rel=0.01)
