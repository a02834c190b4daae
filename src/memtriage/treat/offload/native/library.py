"""The compiled kernel: tensors in, addresses out."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.treat.offload.kernel import Hyper, Operands, Scaling

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}
_NOTHING: Final = 2
RUN: Final = 1 << 15
"""Elements that a thread takes at a time, about a megabyte over the bus, so that threads end together."""


class _Part(ctypes.Structure):
    _fields_ = [
        ("gradient", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("average", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("before", ctypes.c_int64),
        ("step_size", ctypes.c_float),
        ("correction", ctypes.c_float),
    ]


class _Settings(ctypes.Structure):
    _fields_ = [
        ("keep", ctypes.c_float),
        ("weight1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("weight2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("sign", ctypes.c_float),
        ("ranks", ctypes.c_float),
        ("grad_scale", ctypes.c_float),
        ("clip", ctypes.c_float),
        ("scaled", ctypes.c_int32),
    ]


class Library:
    """The loaded library. Calls release the interpreter."""

    def __init__(self, path: Path, run: int = RUN) -> None:
        """Load it.

        Args:
            run: elements that a thread takes at a time.

        Raises:
            OSError: it cannot be loaded.
        """
        loaded = ctypes.CDLL(str(path))
        pointer, count, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.path, self.run = path, run
        self.crew = _function(loaded.memtriage_crew, pointer, [kind])
        self.leave = _function(loaded.memtriage_crew_leave, None, [pointer])
        self.start = _function(
            loaded.memtriage_start,
            pointer,
            [pointer, ctypes.POINTER(_Part), count, ctypes.POINTER(_Settings), kind, kind, kind, count],
        )
        self.wait = _function(loaded.memtriage_wait, None, [pointer, pointer])


class Crew:
    """The threads of one optimizer, which compute its tiles one after another."""

    def __init__(self, library: Library, threads: int) -> None:
        """Raises RuntimeError when the system refuses the threads."""
        self._library = library
        self._crew = library.crew(threads)
        self._owner_pid = os.getpid()
        if self._crew is None:
            raise RuntimeError(f"the system refused {threads} threads")

    def job(self, operands: Operands, hyper: Hyper, scaling: Scaling) -> CrewJob:
        """Return the job of stepping all elements of all parts: at least one, none of them empty."""
        parts = (_Part * len(operands.masters))()
        before = 0
        rounded: Sequence[Tensor | None] = operands.rounded or [None] * len(parts)
        corrections: dict[float, tuple[float, float]] = {}
        for part, gradient, master, average, square, weight, number in zip(
            parts,
            operands.gradients,
            operands.masters,
            operands.exp_avgs,
            operands.exp_avg_sqs,
            rounded,
            operands.steps,
            strict=True,
        ):
            part.gradient, part.master = gradient.data_ptr(), master.data_ptr()
            part.average, part.square = average.data_ptr(), square.data_ptr()
            part.rounded = None if weight is None else weight.data_ptr()
            part.count, part.before = master.numel(), before
            before += part.count
            step = float(number)
            if step not in corrections:
                # In double precision, as torch computes them.
                size, correction = hyper.lr / (1 - hyper.beta1**step), math.sqrt(1 - hyper.beta2**step)
                corrections[step] = -size, correction
            part.step_size, part.correction = corrections[step]
        kinds = (
            _KINDS[operands.gradients[0].dtype],
            _KINDS[operands.exp_avgs[0].dtype],
            _KINDS[operands.rounded[0].dtype] if operands.rounded else _NOTHING,
        )
        start = partial(
            self._library.start,
            self._crew,
            parts,
            len(parts),
            ctypes.byref(_settings(hyper, scaling)),
            *kinds,
            self._library.run,
        )
        # The library only has the addresses: the job keeps the tensors alive.
        return CrewJob(operands, start, partial(self._library.wait, self._crew))

    def close(self) -> None:
        """End the threads. No job may be running. Repeatable."""
        # A forked child has no such threads.
        if self._crew is not None and os.getpid() == self._owner_pid:
            self._library.leave(self._crew)
        self._crew = None


class CrewJob:
    """A tile for the crew."""

    def __init__(
        self, operands: Operands, start: Callable[[], int | None], wait: Callable[[int], None]
    ) -> None:
        self._operands, self._start, self._wait = operands, start, wait
        self._ticket: int | None = None

    def start(self) -> None:
        """Begin when earlier jobs leave threads free. If it raises MemoryError, nothing begins."""
        self._ticket = self._start()
        if self._ticket is None:
            raise MemoryError("no host memory for a tile's list of parts")

    def wait(self) -> None:
        """Wait until it is done, if it was started. Repeatable."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._wait(ticket)


def takes(operands: Operands) -> bool:
    """Whether the kernel knows the types."""
    given = (operands.gradients, operands.exp_avgs, operands.rounded)
    return all(not some or some[0].dtype in _KINDS for some in given)


def _function(function: Any, result: Any, arguments: list[Any]) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _settings(hyper: Hyper, scaling: Scaling) -> _Settings:
    return _Settings(
        keep=1 - hyper.lr * hyper.weight_decay,
        weight1=1 - hyper.beta1,
        beta2=hyper.beta2,
        weight2=1 - hyper.beta2,
        eps=hyper.eps,
        sign=-1.0 if hyper.maximize else 1.0,
        ranks=scaling.ranks,
        grad_scale=1.0 if scaling.grad_scale is None else scaling.grad_scale,
        clip=1.0 if scaling.clip is None else scaling.clip,
        scaled=scaling != Scaling(),
    )
