"""Operators of `torch.library`: Python kernels run, others are asked for shapes."""

from __future__ import annotations

import ctypes

import pytest
import torch

import memtriage
from support.training import build_with

BYTES = 1 << 24

library = torch.library.Library("memtriage_kernels", "DEF")
library.define("unknown(Tensor values, float factor=1.0) -> Tensor")
library.define("scale_(Tensor(a!) values, float factor) -> ()")


@torch.library.custom_op("memtriage_kernels::with_buffer", mutates_args=())
def with_buffer(values: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(BYTES, dtype=torch.uint8, device=values.device)
    result = torch.empty_like(values)
    del buffer
    return result


@torch.library.custom_op("memtriage_kernels::native", mutates_args=())
def native(values: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(values)
    ctypes.memset(values.data_ptr(), 0, values.numel())
    return result


native.register_fake(torch.empty_like)
with_buffer.register_autograd(lambda ctx, gradient: gradient)
native.register_autograd(lambda ctx, gradient: gradient)


def test_what_a_python_kernel_allocates_for_itself_is_traced():
    assert memtriage.predict(build_with(with_buffer)).peak_allocated >= BYTES


def test_native_code_gets_no_address_and_the_shape_function_answers():
    assert memtriage.predict(build_with(native)).peak_allocated < BYTES


def test_the_kernel_for_the_host_is_not_asked_for_values():
    """That of a package may compile itself first, which takes longer than the trace."""
    ran = []

    @torch.library.custom_op("memtriage_kernels::halved", mutates_args=(), device_types="cuda")
    def halved(values: torch.Tensor) -> torch.Tensor:
        ctypes.memset(values.data_ptr(), 0, 1)
        return torch.empty_like(values)

    @halved.register_kernel("cpu")
    def on_host(values: torch.Tensor) -> torch.Tensor:
        ran.append(values)
        return values / 2

    halved.register_fake(torch.empty_like)

    def called(weight):
        halved(torch.ones(2, device=weight.device))
        return weight * 1

    assert memtriage.predict(build_with(called)).peak_allocated
    assert not ran


def test_an_operator_that_only_writes_needs_no_shape_function():
    def scaled(weight):
        with torch.no_grad():
            torch.ops.memtriage_kernels.scale_(weight, 2.0)
        return weight * 1

    assert memtriage.predict(build_with(scaled)).peak_allocated < BYTES


@pytest.mark.parametrize("compiled", [False, True])
def test_one_line_says_what_to_register(compiled):
    if compiled:
        pytest.importorskip("triton")

    def call(weight):
        return torch.ops.memtriage_kernels.unknown(weight, 2.0)

    with pytest.raises(ValueError, match="has no shape function") as refused:
        memtriage.predict(build_with(torch.compile(call) if compiled else call))
    assert 'register_fake("memtriage_kernels::unknown") def _(values, factor)' in str(refused.value)
    assert "\n" not in str(refused.value)
