"""The generation engine: a process of its own on the same GPU, which takes weights over CUDA IPC.

It stands for vLLM: asleep it holds no weights and no cache; woken, it takes the memory that it was promised,
which the trainer must have given back. For the CPU the same engine also runs inside the trainer's process and
takes tensors as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

PLACES: Final = ("process", "inside")
"""In a process of its own, or inside the trainer's, where no CUDA IPC is."""
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PR_SET_PTRACER: Final = 0x59616D61
"""`prctl` option of the Yama security module (linux/prctl.h): who may take descriptors of this process."""
_CACHE_SHARE: Final = 0.7
"""Of the GPU's memory, however much is free: settled beforehand, as vLLM's `gpu_memory_utilization`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a parameter is in a bucket."""

    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


class Engine:
    """What runs in the generation process: the answers to `call`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: dict[str, Tensor] = {}
        self._cache: Tensor | None = None

    def wake_weights(self, pieces: list[Piece]) -> None:
        """Make room for all weights."""
        self._weights = {
            piece.name: torch.empty(piece.shape, dtype=piece.dtype, device=self._device) for piece in pieces
        }
        self._settle()

    def take(self, bucket: Tensor, pieces: list[Piece]) -> None:
        """Copy a bucket's weights into the engine's own."""
        for piece in pieces:
            source = bucket[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.shape)
            self._weights[piece.name].copy_(source)
        self._settle()

    def wake_cache(self) -> int:
        """Make the key-value cache; returns the bytes that were free for it (0 on the CPU).

        Raises:
            RuntimeError: less is free than it takes.
        """
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        wanted = int(_CACHE_SHARE * total)
        if free < wanted:
            raise RuntimeError(
                f"the cache takes {wanted:,} bytes, and {free:,} are free: the trainer holds more"
            )
        self._cache = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        self._cache[:: 1 << 20].zero_()
        self._settle()
        return free

    def generate(self) -> float:
        """Read every weight once, as decoding one token does; returns their sum."""
        return sum_of(self._weights, self._device)

    def sleep(self) -> None:
        """Give everything back."""
        self._weights.clear()
        self._cache = None
        if self._device.type == "cuda":
            self._settle()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sum_of(weights: Mapping[str, Tensor], device: torch.device) -> float:
    """The sum of all elements; the same on both sides only if every weight arrived."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for weight in weights.values():
        total += weight.sum(dtype=torch.float32)
    return total.item()


class Generation(Protocol):
    """The trainer's view of an engine."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of `Engine` and wait for its answer."""
        ...

    def send(self, bucket: Tensor, pieces: list[Piece]) -> None:
        """Hand a bucket over; `acknowledged` says when it may be overwritten."""
        ...

    def acknowledged(self) -> None:
        """Wait until the oldest bucket that was handed over has been copied."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class InProcess:
    """An engine in this process."""

    def __init__(self, device: torch.device) -> None:
        self._engine = Engine(device)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._engine, method)(*arguments)

    def send(self, bucket: Tensor, pieces: list[Piece]) -> None:
        self._engine.take(bucket, pieces)

    def acknowledged(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""


class OtherProcess:
    """An engine in a process of its own, which opens buckets by their CUDA IPC handles."""

    def __init__(self, device: torch.device) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        # As vLLM, which cannot use expandable segments.
        with without_allocator_settings():
            self._process = spawning.Process(target=_serve, args=(theirs, str(device)), daemon=True)
            self._process.start()
        theirs.close()
        allow_fd_transfer(self._process.pid)
        self._ready = False

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer()

    def send(self, bucket: Tensor, pieces: list[Piece]) -> None:
        self._pipe.send(("take", (reduce_tensor(bucket), pieces)))

    def acknowledged(self) -> None:
        self._answer()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)

    def _answer(self) -> Any:
        if not self._ready:  # it starts while the trainer makes its model, and says so when it is there
            self._receive()
            self._ready = True
        return self._receive()

    def _receive(self) -> Any:
        try:
            failed, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the generation process died; its own error stands above") from None
        if failed:
            raise RuntimeError(f"in the generation process: {answer}")
        return answer


def make(device: torch.device, place: str) -> Generation:
    """An engine in one of `PLACES`."""
    return OtherProcess(device) if place == "process" else InProcess(device)


def _serve(pipe: Connection, name: str) -> None:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # makes the context, which takes a second
    engine = Engine(device)
    pipe.send((False, None))
    while (message := pipe.recv()) is not None:
        method, arguments = message
        try:
            if method == "take":
                (rebuild, handle), pieces = arguments
                answer = engine.take(rebuild(*handle), pieces)
            else:
                answer = getattr(engine, method)(*arguments)
        except Exception as error:  # the trainer is to stop with it, wherever it came from
            pipe.send((True, f"{type(error).__name__}: {error}"))
        else:
            pipe.send((False, answer))


def allow_fd_transfer(process: int | None) -> None:
    """Expandable segments travel as file descriptors, which the receiver takes with `pidfd_getfd`.

    Where Yama restricts tracing to descendants (the usual setting), a child may do that only if it is let.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(process or 0), 0, 0, 0)


@contextmanager
def without_allocator_settings() -> Iterator[None]:
    """A process started meanwhile has the default allocator, whatever this one has."""
    kept = {name: os.environ.pop(name) for name in _ALLOCATOR_SETTINGS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
