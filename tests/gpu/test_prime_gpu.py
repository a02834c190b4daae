"""Primed memory on a real GPU: what was predicted, CUDA IPC, parking, and `memtriage run --prime`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

import memtriage
from memtriage.model.priming import StatePool
from memtriage.observe.states import parameter_bytes
from memtriage.treat.priming import CudaBlocks, CudaPools, StatePools, allocate, pools_possible, prime_device
from support.primed_training import build, priming_of

MIB = 1 << 20
SIZES = [64 * MIB, 40 * MIB, 20 * MIB]
TIME_LIMIT_S = 300
SEARCH_LIMIT_S = 900
TESTS = Path(__file__).parents[1]


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


WIDTH = 2048
STATES = 2 * 4 * WIDTH * WIDTH


def adam_with_a_pool() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A layer whose states are to be made in a pool, before its first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    pool = StatePool(size=STATES, parameters=parameter_bytes(optimizer))
    StatePools([pool], CudaPools(0)).install()
    return model, optimizer


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(torch.ones(16, WIDTH, device="cuda")).square().mean()
        loss.backward()
        found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def private_segments() -> list[int]:
    return [
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0) and segment["segment_type"] == "large"
    ]


needs_pools = pytest.mark.skipif(not pools_possible(), reason="this torch has no pools for a single thread")


@needs_pools
def test_states_fill_one_segment_of_their_own_and_what_was_primed_stays() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    del plain
    give_all_back()
    assert allocate(SIZES, CudaBlocks(0)) is None
    model, optimizer = adam_with_a_pool()
    before = torch.cuda.memory_reserved()
    assert trained(model, optimizer) == expected
    assert private_segments() == [STATES]
    reserved = torch.cuda.memory_stats()["reserved_bytes.large_pool.current"]
    assert reserved == sum(SIZES) + STATES >= before
    assert "_init_group" not in vars(optimizer)
    state = optimizer.state[model.weight]
    low = min(state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr())
    assert abs(state["exp_avg"].data_ptr() - state["exp_avg_sq"].data_ptr()) == STATES // 2
    (segment,) = [each for each in torch.cuda.memory_snapshot() if each["address"] == low]
    assert segment["total_size"] == STATES
    del model, optimizer, state, segment
    give_all_back()
    assert torch.cuda.memory_reserved() == 0


@needs_pools
def test_without_memory_for_a_pool_states_are_made_as_ever() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    free, _ = torch.cuda.mem_get_info()
    StatePools([StatePool(size=2 * free, parameters=parameter_bytes(optimizer))], CudaPools(0)).install()
    trained(model, optimizer)
    assert private_segments() == []
    assert len(optimizer.state) == 1


@needs_pools
def test_parking_gives_states_of_a_pool_back_and_brings_them_back() -> None:
    model, optimizer = adam_with_a_pool()
    trained(model, optimizer)
    average = optimizer.state[model.weight]["exp_avg"].detach().cpu()
    give_all_back()
    memtriage.park(model, optimizer)
    torch.cuda.empty_cache()
    assert private_segments() == []
    memtriage.unpark()
    assert torch.equal(optimizer.state[model.weight]["exp_avg"].detach().cpu(), average)
    memtriage.release_parking()


@needs_pools
def test_another_process_reads_states_of_a_pool_by_ipc() -> None:
    model, optimizer = adam_with_a_pool()
    trained(model, optimizer)
    shared_state = torch.full_like(optimizer.state[model.weight]["exp_avg"], 1.0)
    optimizer.state[model.weight]["exp_avg"].fill_(1.0)
    context = multiprocessing.get_context("spawn")
    shared, sums = context.Queue(), context.Queue()
    reader = context.Process(target=_sum, args=(shared, sums))
    reader.start()
    shared.put([optimizer.state[model.weight]["exp_avg"], shared_state])
    assert sums.get(timeout=TIME_LIMIT_S) == [WIDTH * WIDTH] * 2
    reader.join(TIME_LIMIT_S)
    assert reader.exitcode == 0


def test_run_primes_a_script_before_its_first_allocation(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from support.primed_training import build\n"
        "model, optimizer, step = build(torch.device('cuda'), [])\n"
        "for _ in range(8):\n"
        "    step()\n"
        "print(torch.cuda.max_memory_reserved())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memtriage", "run", "--prime", "-o", str(tmp_path / "run"), str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=SEARCH_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "run").rglob("priming.json")
    priming = json.loads(file.read_text())
    assert priming["primed"], priming
    assert int(done.stdout) == pytest.approx(priming["reserved_after"], rel=0.01)
