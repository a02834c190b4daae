"""What Inductor allocates while it tries kernels on the GPU in the first step; nothing of it stays.

A Triton kernel with several configurations is timed at its first call: with copies of the operands that it
writes, and with a buffer of the size of the L2 cache that is filled between runs (`CachingAutotuner` in
torch/_inductor/runtime/triton_heuristics.py, `InductorBenchmarker` in benchmarking.py). Padding of a matrix
product is timed at compile time, with operands of its own (`_should_pad` in fx_passes/pad_mm.py).

Where a reduction uses many registers, Inductor tries smaller blocks. Triton compiles for a GPU that is not
there to count them: its compiler and NVIDIA's assembler are in its package.
"""

from __future__ import annotations

import functools
import linecache
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.operators import Args
from memtriage.prediction.scratch.products import Workspaces

OPERATOR: Final = "inductor::trial"
"""What blocks of trials are called."""
_REGISTER_COUNT: Final = b"\x04\x2f\x08\x00"
"""Attribute of a kernel in a cubin: its form, `EIATTR_REGCOUNT`, its length; symbol and count follow."""

MOST: Final = 255
"""Registers that a thread has at most."""


class KernelTrials:
    """Allocates and frees on the device what trials do.

    Attributes:
        most: bytes that they have held at once.
        chosen: sources of kernels whose configuration was chosen, which Inductor keeps (`AutotuneCache`).
    """

    def __init__(self, lifetimes: Lifetimes, l2_cache: int, workspaces: Workspaces) -> None:
        self.most = 0
        self.chosen: set[str] = set()
        self._lifetimes = lifetimes
        self._workspaces = workspaces
        self._flushed = l2_cache
        self._held = 0

    def check_intact(self, args: Args) -> None:
        """Raise what torch raises where a kernel is given memory that is another's by now."""
        if self._lifetimes.overwritten:
            self._lifetimes.check_intact(arg for arg in args if isinstance(arg, torch.Tensor))

    def keeps(self, source: str) -> bool:
        """Whether a kernel that is compiled now is launched as was chosen before.

        A worker looks the choice up. Until its workers have started, which is taken to be in the first step,
        Inductor compiles in this process, and tries all configurations again (`_make_launchers` in
        torch/_inductor/runtime/triton_heuristics.py).
        """
        return source in self.chosen and self._lifetimes.step > 0

    def time(self, needed: list[int]) -> None:
        """Time something that allocates these sizes in every run."""
        self._time(needed, lambda: None)

    def call(self, function: Callable[[], Any], cleared: int) -> None:
        """Run a function before, and with, a buffer of so many bytes, which is cleared between its runs."""
        function()
        with self._holding([cleared]):
            function()

    def pad(
        self,
        func: Any,
        args: Args,
        operands: list[int],
        product: int,
        padded_beforehand: list[int],
        padded: list[int],
    ) -> None:
        """Time a matrix product as it is and padded; the first product of a thread makes its workspaces.

        Args:
            func, args: the operator.
            operands: sizes of the operands.
            product: size of the result.
            padded_beforehand: sizes of padded operands that are made once.
            padded: sizes of padded operands that every run makes, and of its result.
        """
        with self._holding(operands):
            multiply = functools.partial(self._workspaces.keep, func, args)
            self._time([product], multiply)
            with self._holding(padded_beforehand):
                self._time(padded, multiply)

    def _time(self, needed: list[int], launch: Callable[[], None]) -> None:
        def run() -> None:
            with self._holding(needed):
                launch()

        self.call(run, self._flushed)

    @contextmanager
    def _holding(self, sizes: list[int]) -> Iterator[None]:
        blocks = self._lifetimes.scratch(sizes, OPERATOR)
        self._held += sum(sizes)
        self.most = max(self.most, self._held)
        yield
        self._held -= sum(sizes)
        self._lifetimes.release(blocks)


class HostKernel:
    """A kernel of the host, which allocates nothing on the device."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch it."""

    run = __call__


class Kernel(HostKernel):
    """A Triton kernel that does nothing: what it would allocate is in the wrapper that calls it."""

    def __init__(self, name: str, source: str, trials: KernelTrials) -> None:
        self._name = name
        self._source = source
        self._trials = trials
        self._settled = trials.keeps(source)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch it; the first time also try its configurations, unless one was chosen before."""
        self._trials.check_intact(args)
        if not self._settled:
            self._settled = True
            tuner = _tuner(self._name, self._source)
            several = len(tuner.configs) > 1
            if several or _with_smaller_blocks(tuner) > 1:
                self._trials.time(_copied(tuner, args))
                if several:  # a choice between one and what its use of registers has added is not kept
                    self._trials.chosen.add(self._source)


def _tuner(name: str, source: str) -> Any:
    """The kernel's `CachingAutotuner`."""
    file = f"<{name}>"
    # Triton reads the source of a function that it compiles.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__file__": f"{name}.py", "__name__": name}
    exec(compile(source, file, "exec"), space)
    return space[name]


def _with_smaller_blocks(tuner: Any) -> int:
    """The configurations of a kernel that has one, with what Inductor adds if it uses many registers."""
    (config,) = tuner.configs
    if _scaled(tuner, MOST) == 1:
        return 1
    used = registers(tuner, config)
    return _scaled(tuner, MOST if used is None else used)


def _scaled(tuner: Any, used: int) -> int:
    """The configurations after `_dynamic_scale_rblock`, were this many registers used."""
    kernel = SimpleNamespace(n_regs=used)
    tuner.compile_results = [SimpleNamespace(config=config, kernel=kernel) for config in tuner.configs]
    tuner._precompile_config = lambda config: SimpleNamespace(config=config, kernel=kernel)
    tuner._make_launchers = lambda: None
    tuner._dynamic_scale_rblock()
    return len(tuner.compile_results)


def _copied(tuner: Any, args: Args) -> list[int]:
    """Sizes of the copies of operands that are also read (`maybe_clone_args`), without those that would raise
    the peak and go to the host (`copy_args_to_cpu_if_needed`)."""
    written = [
        _extent(arg)
        for name, arg in zip(tuner.fn.arg_names, args, strict=False)
        if name in tuner.mutated_arg_names and isinstance(arg, torch.Tensor)
    ]
    if not written or not tuner.optimize_mem:
        return written
    room = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    copied = []
    for size in written:
        if size <= room:
            room -= size
            copied.append(size)
    return copied


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last (`clone_preserve_strides`)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def registers(tuner: Any, config: Any) -> int | None:
    """The registers of a kernel (`CachingAutotuner`) in one of its configurations; None if not compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    try:
        compiled = triton.compile(
            ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", meta["cc"], tuner.device_props.warp_size or 32),
            options=tuner._create_compile_options(config, meta),
        )
    except Exception:  # where no subprocess may be started, say; the caller knows what to assume
        return None
    return _in_cubin(compiled.asm["cubin"])


def _in_cubin(cubin: bytes) -> int | None:
    place = cubin.find(_REGISTER_COUNT)
    if place < 0:
        return None
    _, count = struct.unpack_from("<II", cubin, place + len(_REGISTER_COUNT))
    return int(count)
