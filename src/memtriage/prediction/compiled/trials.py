"""What Inductor allocates while it tries kernels on the GPU in the first step; nothing of it stays.

A Triton kernel with several configurations is timed at its first call: with copies of the operands that it
writes, and with a buffer of the size of the L2 cache that is filled between runs (`CachingAutotuner` in
torch/_inductor/runtime/triton_heuristics.py, `InductorBenchmarker` in benchmarking.py). Padding of a matrix
product is timed at compile time, with operands of its own (`_should_pad` in fx_passes/pad_mm.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from memtriage.prediction.lifetimes import Lifetimes

OPERATOR: Final = "inductor::trial"
"""What blocks of trials are called."""


class KernelTrials:
    """Allocates and frees on the device what trials do.

    Attributes:
        most: bytes that they have held at once.
    """

    def __init__(self, lifetimes: Lifetimes, l2_cache: int) -> None:
        self.most = 0
        self._lifetimes = lifetimes
        self._flushed = l2_cache
        self._held = 0

    def time(self, needed: list[int]) -> None:
        """Time something that allocates these sizes in every run."""
        self.call(lambda: self._run(needed), self._flushed)

    def call(self, function: Callable[[], Any], cleared: int) -> None:
        """Run a function before, and with, a buffer of so many bytes, which is cleared between its runs."""
        function()
        with self._holding([cleared]):
            function()

    def pad(self, operands: list[int], product: int, padded_beforehand: list[int], padded: list[int]) -> None:
        """Time a matrix product as it is and padded.

        Args:
            operands: sizes of the operands.
            product: size of the result.
            padded_beforehand: sizes of padded operands that are made once.
            padded: sizes of padded operands that every run makes, and of its result.
        """
        with self._holding(operands):
            self.time([product])
            with self._holding(padded_beforehand):
                self.time(padded)

    def _run(self, needed: list[int]) -> None:
        with self._holding(needed):
            pass

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
        self._trials: KernelTrials | None = trials

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch it; the first time also try its configurations."""
        if self._trials is not None:
            tuned, trials = _tuned(self._name, self._source), self._trials
            self._trials = None
            if tuned.configurations > 1:
                trials.time(_copied(tuned, args))


@dataclass(frozen=True, slots=True)
class _Tuned:
    """A kernel as its heuristics see it.

    Attributes:
        configurations: how many are tried.
        arguments: their names.
        written: names of those that are also read.
        spares_memory: whether copies that would raise the peak go to the host.
    """

    configurations: int
    arguments: tuple[str, ...]
    written: frozenset[str]
    spares_memory: bool


class _Jitted:
    """Stands for `triton.jit`: the heuristics look at the parameters alone."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)


def _tuned(name: str, source: str) -> _Tuned:
    space: dict[str, Any] = {"__file__": f"{name}.py", "__name__": name, "_Jitted": _Jitted}
    exec(compile(source.replace("@triton.jit", "@_Jitted"), f"<{name}>", "exec"), space)
    tuner = space[name]
    return _Tuned(
        len(tuner.configs),
        tuple(tuner.fn.arg_names),
        frozenset(tuner.mutated_arg_names),
        bool(tuner.optimize_mem),
    )


def _copied(tuned: _Tuned, args: tuple[Any, ...]) -> list[int]:
    """Sizes of the copies (`maybe_clone_args`), less those on the host (`copy_args_to_cpu_if_needed`)."""
    written = [
        _extent(arg)
        for name, arg in zip(tuned.arguments, args, strict=False)
        if name in tuned.written and isinstance(arg, torch.Tensor)
    ]
    if not written or not tuned.spares_memory:
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
