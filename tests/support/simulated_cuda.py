"""CUDA that seems to be in use, in a process on a machine without it. Its allocator is the simulator."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import OutOfMemory
from support.raw_snapshot import Frames, Program, snapshot_of

FOREIGN: Final = 500 << 20
"""Bytes on the device that are not the allocator's: those of the context."""


class SimulatedCuda:
    """One device. Call it after seeding: torch then believes that CUDA is initialized."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._failed, self._recording = capacity, 0, False
        self._program = Program(capacity=capacity - FOREIGN)
        self._observers: list[Any] = []
        for name, function in {
            "_cuda_hasPrimaryContext": lambda device: device == 0,
            "_cuda_isHistoryEnabled": lambda: self._recording,
            "_cuda_memoryStats": lambda device: self._stats(),
            "_cuda_memorySnapshot": lambda *_: snapshot_of(self._program),
            "_cuda_attach_out_of_memory_observer": self._observers.append,
        }.items():
            setattr(torch._C, name, function)
        for name, function in {
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "get_allocator_backend": lambda: "native",
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "device": nullcontext,
            "synchronize": lambda device: None,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=capacity),
            "get_per_process_memory_fraction": lambda device: 1.0,
            "mem_get_info": lambda device: (capacity - self._used(), capacity),
            "memory_snapshot": lambda include_traces=True: self._program.segments(),
        }.items():
            setattr(torch.cuda, name, function)
        for name, function in {
            "host_memory_stats_as_nested_dict": dict,
            "_record_memory_history": self._record,
            "_snapshot": lambda: {"device_traces": [[]]},
        }.items():
            setattr(torch.cuda.memory, name, function)

    def allocate(self, size: int, frames: Frames) -> SimBlock:
        """Allocate as torch does, which tells its observers before it raises."""
        try:
            return self._program.alloc(size, frames if self._recording else [])
        except OutOfMemory:
            self._failed += 1
            for observer in self._observers:
                observer(0, size, self._capacity, self._capacity - self._used())
            total, free = self._capacity / (1 << 30), (self._capacity - self._used()) / (1 << 20)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / (1 << 20):.2f} MiB. "
                f"GPU 0 has a total capacity of {total:.2f} GiB of which {free:.2f} MiB is free."
            ) from None

    def free(self, block: SimBlock) -> None:
        self._program.free(block)

    def _record(self, enabled: str | None, **options: Any) -> None:
        self._recording = enabled is not None

    def _used(self) -> int:
        return FOREIGN + self._program.simulator.reserved

    def _stats(self) -> dict[str, Any]:
        simulator = self._program.simulator
        figures = {
            "allocated_bytes": (simulator.allocated, simulator.peak_allocated),
            "reserved_bytes": (simulator.reserved, simulator.peak_reserved),
            "active_bytes": (simulator.active, simulator.active),
            "requested_bytes": (simulator.requested, simulator.requested),
            "inactive_split_bytes": (0, 0),
        }
        nested = {name: {"all": {"current": now, "peak": peak}} for name, (now, peak) in figures.items()}
        return {**nested, "num_alloc_retries": 0, "num_ooms": self._failed}
