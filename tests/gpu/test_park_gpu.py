"""Parking and phases on a real GPU: memory that goes, bits that come back, errors instead of faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memtriage
from memtriage.model.units import size
from memtriage.treat.parking.handle import ParkedError, ParkError, ParkRefused

MIB = 1 << 20
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "park.py"
TIME_LIMIT_S = 60
SPARE = 100 * MIB
"""Reserved bytes beyond 1.1 times the allocated ones that a phase may leave, by its promise."""


@pytest.fixture(autouse=True)
def nothing_stays_parked() -> Iterator[None]:
    yield
    if memtriage.treat.parking.api.is_parked():
        memtriage.unpark()
    memtriage.release_parking()


def decoder(width: int = 1024, layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*blocks).to("cuda", torch.bfloat16)


def losses(parking: bool, steps: int = 4) -> list[float]:
    """Training of a model, parked in whole between the steps or never."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for step in range(steps):
        generator = torch.Generator(device="cuda").manual_seed(step)
        batch = torch.randn(64, 1024, generator=generator, device="cuda", dtype=torch.bfloat16)
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
        found.append(loss.item())
        del loss, batch
        if parking:
            memtriage.park(model)
            memtriage.park(optimizer)
            memtriage.unpark(model)
            memtriage.unpark(optimizer)
    return found


def test_training_goes_on_with_the_same_bits() -> None:
    assert losses(parking=True) == losses(parking=False)


def test_device_memory_goes_and_values_come_back() -> None:
    model = decoder(layers=16)
    view = model[0].weight.detach()[5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    model(torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())]
    before = [tensor.detach().cpu().clone() for tensor in tensors]
    row = view.cpu().clone()
    allocated = torch.cuda.memory_allocated()
    parked = memtriage.park(model, optimizer)
    left, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    print(
        f"{size(allocated)} allocated; parked {size(parked.nbytes)}: {size(left)}, reserved {size(reserved)}"
    )
    assert parked.nbytes > 0.9 * allocated - 64 * MIB
    assert left <= allocated - parked.nbytes
    assert reserved <= 1.1 * left + SPARE
    memtriage.unpark()
    assert torch.cuda.memory_allocated() >= allocated
    assert all(torch.equal(each.detach().cpu(), then) for each, then in zip(tensors, before, strict=True))
    assert torch.equal(view.cpu(), row)


@pytest.mark.parametrize("use", ["add", "linear", "foreach", "forward", "to"])
def test_a_parked_tensor_raises_and_the_context_survives(use: str) -> None:
    model = decoder(layers=1)
    weight, x = model[0].weight, torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    with memtriage.park(model), pytest.raises(ParkedError, match="parked"):
        match use:
            case "add":
                weight + 1
            case "linear":
                nn.functional.linear(x, weight)
            case "foreach":
                torch._foreach_add_([weight], 1)
            case "forward":
                model(x)
            case "to":
                weight.to("cpu")
    assert torch.isfinite(model(x)).all()


def test_unpark_without_room_can_be_repeated() -> None:
    model = decoder(layers=16)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    parked = memtriage.park(model)
    free = torch.cuda.mem_get_info()[0]
    filler: Tensor | None = torch.empty(free - parked.nbytes // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        memtriage.unpark()
    print(caught.value.__notes__)
    assert "still parked" in caught.value.__notes__[-1]
    filler = None
    torch.cuda.empty_cache()
    memtriage.unpark()
    assert filler is None
    assert all(
        torch.equal(each.detach().cpu(), then) for each, then in zip(model.parameters(), before, strict=True)
    )
    with pytest.raises(ParkError, match="nothing"):
        memtriage.unpark()


def test_work_that_is_still_to_run_is_waited_for() -> None:
    """The weight is written by a stream that is far behind when it is parked, and again right after."""
    weight = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for round_ in range(1, 4):
            for _ in range(60):
                square = (square @ square).clamp_(-1, 1)
            weight.fill_(round_)
            memtriage.park(weight)
            memtriage.unpark(weight)
            weight.add_(0.5)
            assert weight.eq(round_ + 0.5).all().item()


def test_it_comes_back_to_the_stream_that_it_is_of() -> None:
    weight, side = torch.ones(1 << 24, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = torch.zeros(1 << 24, device="cuda")
        memtriage.park(weight, other)
        memtriage.unpark()
    streams = {}
    for segment in torch.cuda.memory_snapshot():
        for name, tensor in (("weight", weight), ("other", other)):
            if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
                streams[name] = segment["stream"]
    assert streams == {"weight": 0, "other": side.cuda_stream}
    assert weight.sum().item() == 1 << 24


def test_what_was_sent_to_another_process_is_parked() -> None:
    """As after a refit by CUDA IPC. Nobody opens the handle here, so torch still keeps the memory."""
    weight = torch.arange(1 << 20, device="cuda")
    weight.untyped_storage()._share_cuda_()
    assert memtriage.park(weight).storages == 1
    assert weight.untyped_storage().nbytes() == 0
    memtriage.unpark()
    assert torch.equal(weight.cpu(), torch.arange(1 << 20))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_the_benchmark_finds_the_same_values_under_each_allocator_setting(conf: str, tmp_path: Path) -> None:
    out = tmp_path / "park.json"
    command = [sys.executable, str(BENCHMARK), "--parameters", "4e8", "--cycles", "3", "--out", str(out)]
    ran = subprocess.run(command, env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf}, timeout=TIME_LIMIT_S)
    assert ran.returncode in (0, 1)  # 1: slower than its target; with so few bytes that says little
    report = json.loads(out.read_text())
    assert report["identical"]
    assert all(cycle["reserved"] <= 1.1 * cycle["allocated"] + SPARE for cycle in report["cycles"])


def test_with_a_captured_graph_nothing_is_parked() -> None:
    weight = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight * 2
    with pytest.warns(ParkRefused, match="graph"):
        parked = memtriage.park(weight)
    assert parked.storages == 0
    weight.fill_(3)
    graph.replay()
    assert out.eq(6).all().item()
    assert memtriage.park(weight, despite_graphs=True).storages == 1
    memtriage.unpark()
    assert weight.eq(3).all().item()


def test_a_phase_leaves_little_reserved_though_survivors_are_scattered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = decoder(layers=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    policy = memtriage.PhasePolicy(unpark=(model, optimizer), park=(model, optimizer))
    kept: list[Tensor] = []
    for length in (40, 300, 170):
        with memtriage.phase("train", policy) as phase:
            x = torch.randn(length, 1024, device="cuda", dtype=torch.bfloat16)
            for layer in model:
                x = layer(x)
                # Small survivors in the midst of activations and gradients: segments that cannot go back.
                kept.append(x.detach()[:1].clone())
                kept.append(torch.zeros(300_000, device="cuda"))
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x
        line = capsys.readouterr().out
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with capsys.disabled():
            print(line, phase.report and (phase.report.parts, str(phase.report.compaction)))
        assert reserved <= 1.1 * allocated + SPARE
        match = re.match(r"GPU Memory after train: (\d+\.\d\d)GB allocated, (\d+\.\d\d)GB reserved\n", line)
        assert match is not None
        assert float(match[2]) == pytest.approx(reserved / 1024**3, abs=0.02)
        del kept[len(kept) // 2 :]


def test_both_devices_are_parked() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [torch.full((1 << 22,), float(index + 1), device=f"cuda:{index}") for index in range(2)]
    parked = memtriage.park(tensors)
    assert parked.nbytes == 2 << 24
    memtriage.unpark(tensors[1])
    memtriage.unpark(parked)
    assert all(tensor.eq(index + 1).all().item() for index, tensor in enumerate(tensors))
