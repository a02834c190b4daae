"""`memtriage.compact` on a real GPU: nothing changes but addresses, and what must not move does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memtriage
from memtriage.treat.compaction.one_device import PRIVATE
from memtriage.treat.compaction.storages import GRAPH, KEPT, NOT_OURS

PROGRAM = Path(__file__).with_name("compacted.py")
MIB = 1 << 20
SLACK = 64 * 10**6
TIME_LIMIT_S = 100


def sparse_blocks(every: int = 7, count: int = 800, seed: int = 0, device: str = "cuda") -> list[Tensor]:
    """Blocks of many sizes, one in `every` of those allocated, filled with random bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [512 + 4096 * 3 ** (index % 8) + 24 * index for index in range(count)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    kept = blocks[::every]
    for block in kept:
        block.random_(generator=generator)
    return kept


def compacted(done: memtriage.Compaction) -> bool:
    assert done.after is not None
    return done.after.reserved <= 1.02 * done.after.allocated + SLACK


def reserved_less(done: memtriage.Compaction) -> int:
    assert done.after is not None
    return done.before.reserved - done.after.reserved


def test_values_stay_and_memory_goes_back() -> None:
    kept = sparse_blocks()
    values = [block.cpu() for block in kept]
    addresses = [block.data_ptr() for block in kept]
    foretold = memtriage.compact(dry_run=True)
    assert [block.data_ptr() for block in kept] == addresses
    done = memtriage.compact()
    assert done.moved > 0
    assert compacted(done)
    assert reserved_less(done) > 100 * MIB
    assert done.after is not None
    assert abs(foretold.predicted.reserved - done.after.reserved) <= 24 * MIB
    assert foretold.moved == done.moved
    assert all(torch.equal(block.cpu(), value) for block, value in zip(kept, values, strict=True))
    assert memtriage.compact().moved == 0


def test_views_leaves_saved_tensors_and_streams_stay_valid() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = sparse_blocks(seed=1)
    junk = [torch.empty(size * 5000, device="cuda") for size in range(1, 400)]
    weight = torch.randn(300, 300, device="cuda", requires_grad=True)
    del junk[::2]
    hidden = torch.randn(500, 300, device="cuda") @ weight / 300  # exp() of more would be infinite
    loss = (hidden.tanh() * hidden.exp()).sum()
    tied, view = weight.detach(), weight.detach()[10:20, ::3]
    expected = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    before, version, values = view.clone(), weight._version, [block.cpu() for block in on_side]
    del hidden, junk
    torch.cuda.synchronize()
    done = memtriage.compact()
    assert done.moved > 0
    assert torch.equal(view, before)
    assert weight._version == version
    assert tied.data_ptr() == weight.data_ptr()
    loss.backward()
    assert torch.equal(weight.grad, expected)
    assert all(torch.equal(block.cpu(), value) for block, value in zip(on_side, values, strict=True))
    weight.detach().add_(1)
    assert torch.equal(view, before + 1)


def test_what_is_kept_or_exported_stays() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    kept = sparse_blocks(every=41)
    large = [block for block in kept if block.numel() > 2 * MIB]
    pinned, exported = large[0], large[1]
    reduce_tensor(exported)
    addresses = pinned.data_ptr(), exported.data_ptr()
    done = memtriage.compact(keep=[pinned[5:9]])
    assert (pinned.data_ptr(), exported.data_ptr()) == addresses
    assert {KEPT, NOT_OURS} <= {row.reason for row in done.refused}


def test_memory_from_elsewhere_is_left_alone() -> None:
    kept = sparse_blocks(every=41)
    large = [block for block in kept if block.numel() > 2 * MIB]
    alias = torch.from_dlpack(large[0])
    address = large[0].data_ptr()
    done = memtriage.compact()
    assert large[0].data_ptr() == address == alias.data_ptr()
    assert any(row.stranded for row in done.refused)


def test_nothing_moves_while_a_graph_is_alive_and_all_does_afterwards() -> None:
    kept = sparse_blocks()
    source = kept[-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source.float() * 2
    addresses = [block.data_ptr() for block in kept]
    done = memtriage.compact()
    assert done.moved == 0, str(done)
    assert GRAPH in {row.reason for row in done.refused}, str(done)
    assert [block.data_ptr() for block in kept] == addresses
    source.fill_(3)
    graph.replay()
    assert bool((result == 6).all())
    graph.reset()
    again = memtriage.compact()
    assert again.moved > 0, str(again)
    assert bool((source == 3).all())


def test_a_pool_of_the_users_own_is_left_alone() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = sparse_blocks(every=41)
    addresses = [block.data_ptr() for block in kept]
    done = memtriage.compact()
    assert [block.data_ptr() for block in kept] == addresses
    assert PRIVATE in {row.reason for row in done.refused}


def run(command: list[str], kind: str, settings: str = "") -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings} if settings else dict(os.environ)
    process = subprocess.run(
        [*command, str(PROGRAM), kind], capture_output=True, text=True, timeout=TIME_LIMIT_S, env=environment
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def assert_same_training(result: dict[str, Any]) -> None:
    assert result["plain"] == result["compacted"]
    assert len(set(result["plain"])) > 1
    assert sum(result["moved"]) > 0
    assert result["stopped"] == []


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_training_with_checkpointing_is_bit_identical(settings: str) -> None:
    assert_same_training(run([sys.executable], "checkpointed", settings))


def test_compiled_training_is_bit_identical() -> None:
    assert_same_training(run([sys.executable], "compiled"))


def test_compiled_with_graphs_nothing_moves() -> None:
    outcome = run([sys.executable], "graphs")
    assert outcome["moved"] == [0]
    assert GRAPH in outcome["refused"]
    assert outcome["same"]
    assert outcome["right"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_devices_of_one_process() -> None:
    devices = ["cuda:0", "cuda:1"]
    kept = [sparse_blocks(seed=index, device=device) for index, device in enumerate(devices)]
    values = [[block.cpu() for block in blocks] for blocks in kept]
    alone = memtriage.compact("cuda:1")
    assert [device.device for device in alone.devices] == ["cuda:1"]
    assert alone.moved > 0
    done = memtriage.compact()
    assert [device.device for device in done.devices] == devices
    assert [device.moved > 0 for device in done.devices] == [True, False]
    assert compacted(done)
    assert torch.cuda.current_device() == 0
    for blocks, before in zip(kept, values, strict=True):
        assert all(torch.equal(block.cpu(), value) for block, value in zip(blocks, before, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sharded_training_is_bit_identical() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert_same_training(run(torchrun, "fsdp"))
