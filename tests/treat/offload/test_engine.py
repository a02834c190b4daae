"""Given the same gradients, every bit is that of torch's fused AdamW in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.bucket import Bucket
from memtriage.treat.offload.engine import Engine
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.kernel import FloatRoom
from memtriage.treat.offload.native.choice import Kernel
from memtriage.treat.offload.pipeline import Ring, lane_to
from memtriage.treat.offload.resident import ResidentParameter, settle_in
from support.offload import (
    Pair,
    group_of_one,
    parameters,
    same_bits,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    tile=st.sampled_from((64, 128, 320, 4096)),
    depth=st.integers(1, 4),
    both=st.fixed_dictionaries(
        {
            "lr": st.floats(0, 1) | st.floats(0, 1).map(torch.tensor),
            "betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
            "eps": st.floats(1e-12, 1e-3),
            "weight_decay": st.floats(0, 0.5),
            "maximize": st.booleans(),
        }
    ),
    steps=st.integers(1, 3),
    kernel=st.sampled_from(("auto", "torch")),
)
def test_any_shapes_and_settings(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    tile: int,
    depth: int,
    both: dict[str, Any],
    steps: int,
    kernel: Kernel,
) -> None:
    pair = Pair(parameters(shapes, dtype), both=both, tile_elements=tile, ring_depth=depth, kernel=kernel)
    pair.train(*range(steps))
    pair.assert_same()
    pair.optimizer.close()


def test_tilings_that_are_no_multiples_of_64_would_change_bits() -> None:
    """Why tiles are cut as they are: the kernel's scalar tail rounds otherwise than its vectors."""

    def stepped(cuts: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        weight, gradient = (torch.randn(5000, generator=generator) for _ in range(2))
        average, square = gradient * 0.1, gradient.square() * 0.3
        for part in zip(*(tensor.split(cuts) for tensor in (weight, gradient, average, square)), strict=True):
            lists = [[tensor] for tensor in part]
            torch._fused_adamw_(
                *lists,
                [],
                [torch.tensor(3.0)],
                lr=1e-2,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        return weight

    whole = stepped([5000])
    assert same_bits(stepped([64] * 78 + [8]), whole)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # whose vectors are loops of the same code
        assert not same_bits(stepped([7] * 714 + [2]), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pair = Pair(parameters([(200_000,)]), tile_elements=1 << 16)
        pair.give(3)
        pair.optimizer.step()
        torch.set_num_threads(1)
        pair.expected.step()
        pair.assert_same()
    finally:
        torch.set_num_threads(before)


def test_gradients_of_another_type_than_the_weights() -> None:
    pair = Pair(parameters(dtype=torch.float32))
    for step in range(2):
        pair.give(step)
        for weight, master in zip(pair.weights[::2], pair.masters[::2], strict=True):
            assert weight.grad is not None
            weight.grad_dtype = None
            weight.grad = weight.grad.bfloat16()
            master.grad = weight.grad.float()
        pair.step()
    pair.assert_same()


def test_channels_last_and_gradients_with_other_strides() -> None:
    weight = Parameter(torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last).bfloat16())
    row = Parameter(torch.randn(70, 9).bfloat16())
    pair = Pair([weight, row], tile_elements=64)
    for _ in range(2):
        gradient = torch.randn(8, 6, 3, 3).bfloat16()
        weight.grad = gradient
        pair.masters[0].grad = gradient.float().to(memory_format=torch.channels_last)
        row.grad = torch.randn(9).bfloat16().expand(70, 9)
        pair.masters[1].grad = row.grad.float().contiguous()
        pair.step()
    pair.assert_same()
    assert pair.optimizer.state[weight]["exp_avg"].stride() == weight.stride()


def test_moments_in_bfloat16_are_rounded_after_each_step() -> None:
    pair = Pair(state_dtype=torch.bfloat16)
    for step in range(4):
        pair.train(step)
        for state in pair.expected.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())
    for weight, master in zip(pair.weights, pair.masters, strict=True):
        assert same_bits(pair.optimizer.state[weight]["master"], master.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            kept = pair.optimizer.state[weight][key]
            assert kept.dtype == torch.bfloat16
            assert torch.equal(kept.float(), pair.expected.state[master][key])


def test_nan_and_infinite_gradients_do_what_they_do_in_torch() -> None:
    pair = Pair(parameters([(200,), (30,)]), tile_elements=64)
    pair.train(0)
    pair.give(1)
    for of in (pair.weights, pair.masters):
        assert of[0].grad is not None
        of[0].grad[5:8] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    pair.step()
    for weight, master in zip(pair.weights, pair.masters, strict=True):
        torch.testing.assert_close(weight.float(), master.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
        for key in ("exp_avg", "exp_avg_sq"):
            ours, theirs = pair.optimizer.state[weight][key], pair.expected.state[master][key]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert pair.weights[0].isnan().sum() == 3


def test_gradients_of_a_group_are_summed_once() -> None:
    weight = Parameter(torch.linspace(-2, 2, 300).bfloat16())
    resident = ResidentParameter(weight, "w", 1, 0)
    settle_in([resident], torch.float32, gradients=True)
    bucket = Bucket(0, lane_to(torch.device("cpu")), torch.bfloat16, [resident], reduced=False)
    bucket.weights, bucket.gradients = [resident.weights()], [torch.arange(300.0).bfloat16()]
    bucket.cut(128)
    with group_of_one() as group:
        arithmetic = Arithmetic(FloatRoom(128, moments=False), None)
        engine = Engine(Ring(128, 2, pin=False), arithmetic, Exchange(group, 128))
        engine.adopt(bucket)
        engine.collect(bucket)
        assert resident.gradient is not None
        assert torch.equal(resident.gradient, torch.arange(300.0).bfloat16().float())
        assert not bucket.reduced
        engine.reduce(bucket)
        assert bucket.reduced
        engine.reduce(bucket)
        assert torch.equal(bucket.gradients[0].float(), torch.arange(300.0).bfloat16().float())
        engine.collect(bucket)
        assert torch.equal(resident.gradient, 2 * torch.arange(300.0).bfloat16().float())
        resident.master += 1
        engine.upload(bucket)
        assert torch.equal(bucket.weights[0], resident.master.bfloat16())
        engine.close()
