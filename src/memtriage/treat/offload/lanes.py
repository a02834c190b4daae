"""The two ways between the host and one device: down and up, each with its own stream.

On a CPU "device" there are no streams: every copy is done when the call returns, and there is nothing to wait
for. The callers are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """The way to a CPU "device"."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def here(self) -> torch.cuda.Event | None:
        """The work given so far to the stream that is current in this thread."""
        return None

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Let both ways wait for that work; the host does not."""

    def settle(self) -> None:
        """Let the stream that is current in this thread wait for both ways; the host does not."""

    def down(self) -> AbstractContextManager[Any]:
        """Copies inside the block go the way down."""
        return nullcontext()

    def up(self) -> AbstractContextManager[Any]:
        """Copies inside the block go the way up."""
        return nullcontext()


class CudaLane(Lane):
    """The ways to a CUDA device, a stream each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def here(self) -> torch.cuda.Event | None:
        # Whoever waits for it sleeps: spinning would take a core away from the kernel.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._down.wait_event(event)
            self._up.wait_event(event)

    def settle(self) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._down)
        current.wait_stream(self._up)

    def down(self) -> AbstractContextManager[Any]:
        way: AbstractContextManager[Any] = torch.cuda.stream(self._down)
        return way

    def up(self) -> AbstractContextManager[Any]:
        way: AbstractContextManager[Any] = torch.cuda.stream(self._up)
        return way


def lane_to(device: torch.device) -> Lane:
    """The lane for a device of type `cuda` or `cpu`."""
    return CudaLane(device) if device.type == "cuda" else Lane(device)
