"""Patches on and off, and what is refused, on modules that look like DeepSpeed's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import memtriage
from memtriage.treat.deepspeed import remedy
from memtriage.treat.deepspeed.staging import Streamed
from memtriage.treat.offload.pinned import host_memory
from support.deepspeed_standins import Install, make_accelerator

LARGE = remedy.EXACT_FROM


@pytest.fixture(autouse=True)
def without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedy, "locked_memory", host_memory)


def test_only_large_buffers_are_pinned_exactly(install: Install) -> None:
    accelerator, _ = install()
    template = torch.zeros(0, dtype=torch.float32)
    with memtriage.deepspeed_exact_host_memory() as handle:
        exact = accelerator.pin_memory(torch.arange(LARGE // 4 + 1, dtype=torch.float32).view(1, -1))
        assert torch.equal(exact.flatten(), torch.arange(LARGE // 4 + 1, dtype=torch.float32))
        assert exact.shape == (1, LARGE // 4 + 1)
        assert exact.data_ptr() % 4096 == 0
        assert handle.rounding == 2 * LARGE - (LARGE + 4)
        empty = accelerator._torch_empty_pinned(template, (3, LARGE))
        assert empty.shape == (3, LARGE) and empty.dtype == torch.float32
        before = handle.rounding
        assert accelerator.pin_memory(torch.ones(5)).sum() == 5
        assert accelerator._torch_empty_pinned(template, (2, 3)).shape == (2, 3)
        assert handle.rounding == before


def test_what_is_not_contiguous_is_pinned_as_before(install: Install) -> None:
    accelerator, _ = install()
    across = torch.rand(1024, 512).t()
    with memtriage.deepspeed_exact_host_memory() as handle:
        assert torch.equal(accelerator.pin_memory(across), across)
        assert handle.rounding == 0


def test_a_refused_registration_leaves_it_to_torch(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedy, "locked_memory", lambda nbytes: None)
    accelerator, _ = install()
    with memtriage.deepspeed_exact_host_memory() as handle:
        assert accelerator.pin_memory(torch.ones(LARGE)).sum() == LARGE
        assert accelerator._torch_empty_pinned(torch.zeros(0), (LARGE,)).shape == (LARGE,)
        assert handle.rounding == 0


def test_other_devices_than_cuda_pin_as_before(install: Install) -> None:
    accelerator, _ = install(make_accelerator("xpu"))
    with memtriage.deepspeed_exact_host_memory():
        assert not vars(accelerator)


def test_the_staging_copy_goes_and_the_weights_are_the_same(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[None] = []
    monkeypatch.setattr(remedy, "trim", lambda: trims.append(None))
    _, kind = install()
    with memtriage.deepspeed_exact_host_memory() as handle:
        optimizer = kind(1000)
        assert len(trims) == 1
        assert isinstance(optimizer.param_buffer_of_bit16_for_cpu_offload_groups[0], Streamed)
        assert optimizer.temp_grad_buffer_for_cpu_offload.numel() == 0
        assert handle.staging == 2000
        for _ in range(3):
            optimizer.step()
        assert len(trims) == 2  # the first step is what trims
        assert torch.equal(optimizer.on_device, torch.full((1000,), 1.25**3).bfloat16())
    assert optimizer.param_buffer_of_bit16_for_cpu_offload_groups[0].shape == (1000,)
    assert optimizer.temp_grad_buffer_for_cpu_offload.shape == (1000,)
    optimizer.step()
    assert torch.equal(optimizer.on_device, torch.full((1000,), 1.25**4).bfloat16())


def test_optimizers_without_offload_are_left_alone(install: Install) -> None:
    _, kind = install()

    class Other(kind):
        def step(self, closure: Any = None) -> None:
            pass

    with memtriage.deepspeed_exact_host_memory() as handle:
        Other(10), kind(10, cpu_offload=False)
        assert handle.staging == 0


def test_undone_everything_is_what_it_was(install: Install) -> None:
    accelerator, kind = install()
    before = dict(vars(kind)), dict(vars(accelerator))
    handle = memtriage.deepspeed_exact_host_memory()
    assert handle.active
    assert dict(vars(kind)) != before[0]
    gone = kind(10)
    del gone
    gc.collect()
    handle.undo()
    handle.undo()
    assert not handle.active
    assert (dict(vars(kind)), dict(vars(accelerator))) == before
    memtriage.deepspeed_exact_host_memory().undo()


def test_it_is_on_once(install: Install) -> None:
    install()
    with memtriage.deepspeed_exact_host_memory(), pytest.raises(RuntimeError, match="on already"):
        memtriage.deepspeed_exact_host_memory()
    memtriage.deepspeed_exact_host_memory().undo()
