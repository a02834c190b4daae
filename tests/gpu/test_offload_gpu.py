"""`OffloadedAdamW` on a real GPU: exact pinning, the bits of the reference, copies that overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from memtriage import OffloadedAdamW
from memtriage.treat.offload.native.choice import Kernel
from memtriage.treat.offload.pinned import PinnedMemory, PinningFailed
from support.offload import (
    assert_same_as_reference,
    give_gradients,
    masters_of,
    parameters,
    reference,
    same_bits,
)

MIB = 1 << 20
NOISE = 8 * MIB
"""Bytes by which the resident set of a process with CUDA moves by itself."""

RANKS_PROGRAM = Path(__file__).parents[1] / "treat" / "offload" / "partition_program.py"
RANKS = 2
TIME_LIMIT_S = 300


@pytest.fixture
def threads() -> Iterator[None]:
    """All cores, whatever OMP_NUM_THREADS says: the transfers are to overlap with real work."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def large(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(count, generator=generator, device="cuda").bfloat16()


def test_pinned_memory_costs_its_size_and_no_power_of_two() -> None:
    torch.zeros(1, device="cuda")
    PinnedMemory(MIB, pin=True).close()
    before = resident()
    memory = PinnedMemory(1100 * MIB + 4096, pin=True)
    assert memory.pinned
    assert memory.bytes.is_pinned()
    grown = resident() - before
    assert 1100 * MIB - NOISE <= grown <= 1100 * MIB + NOISE
    memory.close()
    assert not memory.bytes.is_pinned()
    del memory
    assert resident() - before <= NOISE


def test_a_refused_registration_warns_and_the_next_kernel_is_not_blamed() -> None:
    memory = PinnedMemory(MIB, pin=True)
    # What is registered already the driver refuses to register.
    with pytest.warns(PinningFailed):
        again = _pinned_again(memory)
    assert not again
    torch.ones(10, device="cuda").sum().item()
    memory.close()


def _pinned_again(memory: PinnedMemory) -> bool:
    from memtriage.treat.offload import pinned

    return pinned._register(memory.bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tile", [128, 1 << 21])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_the_bits_are_those_of_the_reference(dtype: torch.dtype, tile: int, kernel: Kernel) -> None:
    weights = parameters(dtype=dtype, device="cuda")
    masters = masters_of(weights)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    optimizer = OffloadedAdamW(weights, tile_elements=tile, kernel=kernel, **settings)
    expected = reference(masters, **settings)
    assert optimizer.pinned
    for step in range(4):
        give_gradients(weights, masters, seed=step)
        optimizer.step()
        expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)
    optimizer.close()


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.usefixtures("threads")
def test_copies_wait_for_what_makes_gradients_and_readers_wait_for_copies(pin: bool) -> None:
    """The GPU is kept busy in front of the gradients; the weights are read right behind the step."""
    count = 20_000_003
    weight = Parameter(large(count))
    master = Parameter(weight.detach().float().cpu())
    optimizer, expected = OffloadedAdamW([weight], pin_memory=pin), reference([master])
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    for step in range(3):
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            weight.grad = torch.zeros(count, device="cuda", dtype=torch.bfloat16)
            for _ in range(40):
                square = (square @ square).clamp_(-1, 1)
            weight.grad += large(count, seed=step + 1)
            optimizer.step()
            seen = weight.detach().clone()
            weight.grad = None
        torch.cuda.synchronize()
        master.grad = large(count, seed=step + 1).float().cpu()
        expected.step()
        assert same_bits(seen, master.detach().bfloat16())
    optimizer.close()


@pytest.mark.usefixtures("threads")
def test_nothing_stays_on_the_device() -> None:
    others = torch.cuda.memory_allocated()  # cuBLAS keeps a workspace of 64 MiB on Hopper
    weight = Parameter(large(5_000_000))
    optimizer = OffloadedAdamW([weight])
    weight.grad = large(5_000_000, seed=1)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert before - others <= 2 * 2 * 5_000_000 + MIB
    optimizer.close()


def tiny_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=128,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to("cuda", torch.bfloat16)


def losses(model: torch.nn.Module, step: Any, steps: int = 200) -> Tensor:
    """Of a model that learns to count in threes; `step` is called behind each backward."""
    found = []
    for number in range(steps):
        start = torch.randint(0, 256, (8, 1), generator=torch.Generator().manual_seed(number))
        tokens = ((start + torch.arange(64) * 3) % 256).cuda()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        step()
        model.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def test_the_loss_curve_of_a_real_model_is_that_of_adamw_on_the_gpu() -> None:
    first = tiny_gpt2()
    optimizer = OffloadedAdamW(first.parameters(), lr=3e-3, weight_decay=0.1)
    ours = losses(first, optimizer.step)
    optimizer.close()

    second = tiny_gpt2()
    weights = list(second.parameters())
    masters = [Parameter(weight.detach().float()) for weight in weights]
    on_gpu = torch.optim.AdamW(masters, lr=3e-3, weight_decay=0.1, fused=True)

    def step() -> None:
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        on_gpu.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)

    theirs = losses(second, step)
    assert ours[-1] < 0.2 * ours[0]
    # Half a unit in the last place of a bfloat16 loss between 4 and 8.
    assert (ours - theirs).abs().max() <= 0.5 * 2**-5
    assert (ours - theirs).abs().mean() <= 0.1 * 2**-5


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_overlap_with_backward_changes_no_bit(gradients: str) -> None:
    plain, overlapped = tiny_gpt2(), tiny_gpt2()
    first = OffloadedAdamW(plain.parameters(), lr=3e-3)
    second = OffloadedAdamW(overlapped.parameters(), lr=3e-3, overlap_backward=True, gradients=gradients)
    for number in range(5):
        tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(number)).cuda()
        overlapped.load_state_dict(plain.state_dict())
        for model, optimizer in ((plain, first), (overlapped, second)):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, two in zip(plain.parameters(), overlapped.parameters(), strict=True):
            assert same_bits(one.detach(), two.detach())
    first.close()
    second.close()


def test_a_grad_scaler_on_the_device() -> None:
    weights = parameters(dtype=torch.float32, device="cuda")
    masters = masters_of(weights)
    optimizer, expected = OffloadedAdamW(weights, max_norm=1e6), reference(masters)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1000)
    for step in range(3):
        give_gradients(weights, masters, seed=step)
        for weight in weights:
            assert weight.grad is not None
            weight.grad *= 8.0
        if step == 1:
            assert weights[0].grad is not None
            weights[0].grad[0, 0] = float("inf")
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update(8.0)
        if step != 1:
            expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)
    optimizer.close()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_partition_ddp_and_fsdp2_over_nccl(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, str(RANKS_PROGRAM), str(tmp_path / "meeting"), "cuda"],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "NCCL_NVLS_ENABLE": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for output in outputs:
        outcomes = dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
        assert outcomes and set(outcomes.values()) == {"passed"}, outcomes
