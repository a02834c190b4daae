"""Triton without a GPU: kernels are not compiled, and a launch does nothing.

What a program allocates around a kernel is Python and is traced. A kernel that is chosen by trial
(`triton.autotune`) runs once for each configuration, with the buffer that Triton clears between runs.

Known limitations: memory that a kernel asks for itself (`triton.set_allocator`) is not seen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda.stand_ins import all_replaced, around
from memtriage.prediction.fake_cuda.tensors import CUDA
from memtriage.prediction.gpu_kinds import GpuKind

_NEEDED: Final = ("JITFunction", "driver")
"""Names of `triton.runtime` that are needed: Triton 3 has them."""
_WARP: Final = 32
_REGISTERS: Final = 65536
"""Of a multiprocessor, since compute capability 5.0 (CUDA programming guide)."""
CLEARED: Final = 256 << 20
"""Bytes that Triton clears between runs (`get_empty_cache_for_benchmark` of its driver for NVIDIA)."""


def fake_triton(
    machine: GpuKind, timed: Callable[[Callable[[], Any], int], None]
) -> AbstractContextManager[None]:
    """In the block Triton finds a GPU of this kind, on which kernels do nothing.

    Args:
        timed: runs a function before, and with, a buffer of so many bytes.
    """
    if importlib.util.find_spec("triton") is None:
        return nullcontext()
    from triton import runtime, testing

    if any(not hasattr(runtime, name) for name in _NEEDED):
        return nullcontext()

    def do_bench(
        fn: Callable[[], Any], *args: Any, quantiles: Sequence[float] | None = None, **_: Any
    ) -> Any:
        """Time a function: every one takes as long, so that the first of several is chosen."""
        timed(fn, CLEARED)
        return 1.0 if quantiles is None else [1.0] * len(quantiles)

    driver = _TritonDriver(machine, do_bench)
    attributes = (
        (runtime.driver, "_active", driver),
        (runtime.driver, "_default", driver),
        (runtime.JITFunction, "run", around(runtime.JITFunction.run, _launch)),
        (testing, "do_bench", do_bench),
        (testing, "do_bench_cudagraph", do_bench),
    )
    return all_replaced(attributes)


def _launch(
    original: Callable[..., Any], self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> Any:
    """Launch a kernel, which does nothing; `warmup` only compiles, which needs no GPU."""
    if warmup:
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    return None


class _TritonDriver:
    """The driver of a GPU (`triton.backends.driver.GPUDriver`), as far as Python asks it."""

    def __init__(self, machine: GpuKind, bench: Callable[..., Any]) -> None:
        self._machine = machine
        self._bench = bench
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._machine.shared_memory,
            "multiprocessor_count": self._machine.multiprocessors,
            "warpSize": _WARP,
            "max_num_regs": _REGISTERS,
        }

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._machine.capability
        return GPUTarget("cuda", 10 * major + minor, _WARP)

    def get_current_device(self) -> int:
        return int(torch.cuda.current_device())

    def set_current_device(self, device: int) -> None:
        """The program's GPU stays the current one."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return self._machine.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        return self._bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(CLEARED // 4, dtype=torch.int, device=CUDA)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()
