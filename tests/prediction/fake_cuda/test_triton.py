"""Triton kernels: what is allocated around them is traced."""

from __future__ import annotations

import pytest
import torch

import memtriage
from memtriage.prediction.fake_cuda.triton import CLEARED
from support.training import build_with

triton = pytest.importorskip("triton")
tl = triton.language

COUNT = 1 << 22
BYTES = 4 * COUNT


@triton.jit
def double(source, result, count, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    tl.store(result + places, tl.load(source + places, mask=inside) * 2, mask=inside)


tuned = triton.autotune(configs=[triton.Config({"block": size}) for size in (128, 256)], key=["count"])(
    double
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        result = torch.empty_like(values)
        double[lambda given: (triton.cdiv(COUNT, given["block"]),)](values, result, COUNT, block=1024)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_results_of_kernels_are_allocated_by_python():
    prediction = memtriage.predict(build_with(Double.apply, COUNT))
    assert 2 * BYTES <= prediction.peak_allocated < 2 * BYTES + (1 << 20)


def test_a_kernel_with_configurations_is_timed_once():
    def choose(values):
        result = torch.empty_like(values)
        tuned[lambda given: (triton.cdiv(COUNT, given["block"]),)](values.detach(), result, COUNT)
        return values * result

    prediction = memtriage.predict(build_with(choose, COUNT))
    first, second = prediction.steps
    assert prediction.compile_trials == CLEARED
    assert first.peak_allocated >= CLEARED + 2 * BYTES
    assert second.peak_allocated < CLEARED


def test_compiled_code_knows_what_a_kernel_writes(monkeypatch):
    """A kernel that is not understood is taken to write everything, and its operands are copied."""
    from torch._higher_order_ops import triton_kernel_wrap

    written = []

    def identify(*args):
        written.extend(original(*args))
        return written

    original = triton_kernel_wrap.get_mutated_tensors
    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", identify)
    memtriage.predict(build_with(torch.compile(Double.apply, fullgraph=True), COUNT))
    assert set(written) == {"result"}


def test_the_driver_is_as_before_afterwards():
    before = triton.runtime.JITFunction.run, triton.runtime.driver._active
    seen = []

    def look(values):
        active = triton.runtime.driver.active
        seen.append(
            (active.get_current_target().arch, active.utils.get_device_properties(0)["max_shared_mem"])
        )
        return values * 2

    memtriage.predict(build_with(look, COUNT), gpu="a100")
    assert seen[0] == (80, 166912)
    assert (triton.runtime.JITFunction.run, triton.runtime.driver._active) == before
