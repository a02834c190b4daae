"""What a function allocates on a GPU that a trace stands in for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, AllocationTrace, Lifetimes
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


def recorded(text: str) -> tuple[AllocationTrace, dict[str, int]]:
    """Record lifetimes that are written down; returns them, and the numbers of blocks by name.

    A line each: `+ NAME BYTES` and `- NAME` allocate and free, `scratch BYTES` is a buffer in an operator,
    `empty` empties the cache, `stream N`, `pool N`, `state_of N` and `grad 0` hold for what is allocated next
    (-1: none), `use NAME STREAM` and `passed STREAM` are `record_stream` and its end, `keep POOL` and
    `restore KEPT NAME...` keep the state of a private pool and put it back, and `PHASE STEP` begins a phase.
    """
    records = [True]
    lifetimes = Lifetimes(lambda: records[0])
    held: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for what, *words in filter(None, map(str.split, text.splitlines())):
        if what == "+":
            held[words[0]] = storage = torch.UntypedStorage(int(words[1]), device="meta")
            lifetimes.see(storage, words[0])
            numbers[words[0]] = len(lifetimes.recording.blocks) - 1
            del storage
        elif what == "-":
            del held[words[0]]
        elif what == "scratch":
            lifetimes.release(lifetimes.scratch([int(words[0])], "scratch"))
        elif what == "empty":
            lifetimes.cache_emptied()
        elif what in ("stream", "pool", "state_of"):
            value = int(words[0])
            setattr(lifetimes, what, None if value < 0 else value)
        elif what == "grad":
            records[0] = bool(int(words[0]))
        elif what == "use":
            lifetimes.used_on(held[words[0]], int(words[1]))
        elif what == "passed":
            lifetimes.stream_passed(int(words[0]))
        elif what == "keep":
            lifetimes.keep_pool(int(words[0]))
        elif what == "restore":
            lifetimes.put_back(int(words[0]), [held[name]._cdata for name in words[1:]])
        else:
            lifetimes.enter(what, int(words[0]))
    lifetimes.close()
    return lifetimes.recording, numbers
