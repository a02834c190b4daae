"""Snapshots as torch writes them, of programs that the allocator's simulator runs."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.recording import DeviceRecording, Recording
from memtriage.snapshots.read import load_snapshot

Frames = list[dict[str, Any]]

MIB: Final = 1 << 20
MODULE: Final = "site-packages/torch/nn/modules/module.py"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def user(line: int, name: str = "train") -> Frames:
    """A line of the script."""
    return [frame("train.py", line, name)]


def forward(line: int) -> Frames:
    """A line in a module's forward."""
    return [
        frame("train.py", line, "forward"),
        frame(MODULE, 1790, "_call_impl"),
        frame(MODULE, 1779, "_wrapped_call_impl"),
        frame("train.py", 90, "train"),
    ]


def placement(line: int) -> Frames:
    """`model.to(device)`."""
    return [frame(MODULE, 1370, "convert"), frame(MODULE, 965, "_apply"), frame("train.py", line, "<module>")]


def optimizer(line: int, name: str = "_multi_tensor_adam") -> Frames:
    """Inside `optimizer.step()`."""
    file = "site-packages/torch/optim/adam.py"
    return [frame(file, 791, name), frame(file, 248, "step"), frame("train.py", line, "train")]


def custom_backward(line: int) -> Frames:
    """The backward of a custom Function, in autograd's thread."""
    return [
        frame("train.py", line, "backward"),
        frame("site-packages/torch/autograd/function.py", 317, "apply"),
    ]


AUTOGRAD: Final[Frames] = []
"""Autograd's own thread runs no Python."""


class Program:
    """Allocates and frees, and records it as torch does: each event has its own time and a stack."""

    def __init__(self, conf: str = "", capacity: int | None = None, device: int = 0) -> None:
        self.device = device
        self.trace: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.clock = 1_000_000
        self._frames: Frames = []
        self._stacks: dict[int, Frames] = {}
        self.simulator = Simulator(
            parse_conf(conf, "2.11.0"), capacity=capacity, hook=self._note, device=device
        )

    def _note(self, event: AllocatorEvent) -> None:
        self.clock += 7
        entry: dict[str, Any] = {
            "action": event.action,
            "addr": event.address,
            "size": event.size,
            "stream": event.stream,
            "time_us": self.clock,
            "frames": self._frames,
            "pool_id": event.pool,
        }
        if event.action == "oom":
            del entry["addr"]
            entry["device_free"] = 0
        self.trace.append(entry)

    def alloc(self, size: int, frames: Frames, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> SimBlock:
        self._frames = list(frames)
        block = self.simulator.malloc(size, stream, pool)
        self._stacks[block.address] = self._frames
        return block

    def fails(self, size: int, frames: Frames) -> None:
        """An allocation that runs out of memory."""
        try:
            self.alloc(size, frames)
        except OutOfMemory:
            return
        raise AssertionError("there was room")

    def free(self, blocks: SimBlock | Iterable[SimBlock], frames: Sequence[dict[str, Any]] = ()) -> None:
        self._frames = list(frames)
        for block in [blocks] if isinstance(blocks, SimBlock) else list(blocks):
            self.simulator.free(block)

    def span(self, name: str) -> None:
        """A named span that lasts an instant."""
        for stage in ("START", "END"):
            self.clock += 3
            self.spans.append({"name": name, "stage": stage, "device": self.device, "time_us": self.clock})

    def step_span(self) -> None:
        self.span("Optimizer.step#AdamW.step")

    def segments(self) -> list[dict[str, Any]]:
        states = {"active": "active_allocated", "awaiting": "active_awaiting_free", "free": "inactive"}
        return [
            {
                "device": self.device,
                "address": segment.address,
                "total_size": segment.size,
                "stream": segment.stream,
                "segment_type": "small" if segment.size <= 2 << 20 else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": segment.page is not None,
                "a_newer_key": 1,
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested,
                        "state": states[block.state],
                        "frames": self._stacks.get(block.address, []) if block.state != "free" else [],
                    }
                    for block in segment.blocks
                ],
            }
            for segment in self.simulator.snapshot()
        ]


def snapshot_of(*programs: Program) -> dict[str, Any]:
    """The snapshot of programs, one per device."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(program.device for program in programs) + 1)]
    for program in programs:
        traces[program.device] = program.trace
    return {
        "segments": [segment for program in programs for segment in program.segments()],
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
        "external_annotations": [span for program in programs for span in program.spans],
    }


def save(raw: Any, path: Path) -> Path:
    path.write_bytes(pickle.dumps(raw, 4))
    return path


def recording_of(raw: Any) -> Recording:
    """What is read from a file with this in it."""
    with tempfile.TemporaryDirectory() as folder:
        return load_snapshot(save(raw, Path(folder) / "one.pickle"))


def read(program: Program) -> DeviceRecording:
    """What is read of the device of a program."""
    return recording_of(snapshot_of(program)).devices[-1]


def train(
    program: Program, steps: int, each_step: Callable[[int], None] = lambda step: None, *, spans: bool = True
) -> list[Any]:
    """A training loop: parameters, then steps of forward, backward, optimizer, zero_grad."""
    weights = [program.alloc(24 * MIB, placement(10)) for _ in range(4)]
    states: list[Any] = []
    for step in range(steps):
        batch = program.alloc(100_000, user(20, "batch"))
        saved = [program.alloc(30 * MIB, forward(30 + layer)) for layer in range(4)]
        gradients = []
        for _ in range(4):
            temporary = program.alloc(30 * MIB, AUTOGRAD)
            gradients.append(program.alloc(24 * MIB, AUTOGRAD))
            program.free([temporary, saved.pop()])
        if not states:
            states = [program.alloc(24 * MIB, optimizer(41, "_init_group")) for _ in range(8)]
        program.free(program.alloc(24 * MIB, optimizer(41)), optimizer(41))
        if spans:
            program.step_span()
        program.free([*gradients, batch])
        each_step(step)
    return weights + states
