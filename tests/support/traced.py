"""What a function allocates on a GPU that a trace stands in for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE
from memtriage.prediction.trace import Trace, trace

UNSTEPPED = "no optimizer stepped in the step: its states are not part of the figures"
FORWARD_ALONE = "the step ran neither backward nor an optimizer: this is the memory of forward alone"


@dataclass(frozen=True, slots=True)
class Traced:
    """A function that ran as the one step of a trace.

    Attributes:
        answer: what it returned.
        made: operator and bytes of each block that it allocated, in order, and the owner where that is fixed.
        most: most bytes that these blocks had at once.
        notes: that the trace made of it.
        trace: everything that was traced.
    """

    answer: Any
    made: str
    most: int
    notes: list[str]
    trace: Trace


def traced(
    run: Callable[[Any], Any], gpu: str = "h200", version: tuple[int, int] = (2, 13), **options: Any
) -> Traced:
    """Trace a function of the device as the only step of a program whose model is one number."""
    answers: list[Any] = []

    def build(device: Any) -> Any:
        weight = torch.nn.Parameter(torch.empty(1, device=device))
        model = torch.nn.ParameterList([weight])
        return model, torch.optim.SGD([weight]), lambda: answers.append(run(device))

    found = trace(build, machine(gpu), version, 1, **options)
    recording = found.recording
    live: dict[int, int] = {}
    made: list[str] = []
    most = 0
    for event in recording.events[recording.starts(1)[0] :]:
        if event.size == FREE:
            live.pop(event.block, None)
            continue
        block = recording.blocks[event.block]
        owner = f" {block.owner}" if block.owner else ""
        made.append(f"{block.op.removeprefix('aten::')} {event.size}{owner}")
        live[event.block] = event.size
        most = max(most, sum(live.values()))
    notes = [note for note in found.notes if note not in (UNSTEPPED, FORWARD_ALONE)]
    return Traced(answers[0], ", ".join(made), most, notes, found)
