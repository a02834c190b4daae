"""`memtriage.predict`: from a build function to a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from memtriage.allocator.settings import NEWEST, OLDEST, parse_conf, parse_version
from memtriage.model.prediction import PredictedStep, Prediction
from memtriage.predict.build import BuildError, failure
from memtriage.predict.machines import Machine, machine
from memtriage.predict.owners import owners_at
from memtriage.predict.simulate import phase_at, replay
from memtriage.predict.trace import Trace, trace

MEASURED_ON: Final = "NVIDIA H200"
STEADY_STEPS: Final = 2
"""From this step on the optimizer's states are there before the step begins."""


def predict(
    build: Callable[[Any], Any],
    *,
    steps: int = STEADY_STEPS,
    allocator_conf: str = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
) -> Prediction:
    """See `memtriage.predict`."""
    begun = time.perf_counter()
    kind = machine(gpu)
    version = parse_version(torch_version)
    settings = parse_conf(allocator_conf, version)
    if steps < 1:
        raise ValueError(f"steps={steps}; expected at least 1, and 2 for a step in steady state")
    if (world_size, rank) != (1, 0):
        raise ValueError(
            f"world_size={world_size}, rank={rank}; expected 1 and 0: jobs of one process are predicted"
        )
    found = traced(build, kind, version, steps)
    counters = replay(found.recording, settings, kind.memory, steps)
    last = counters[-1]
    return Prediction(
        peak_allocated=last.peak_allocated,
        peak_reserved=last.peak_reserved,
        peak_phase=phase_at(found.recording, last.peak_event),
        by_owner=owners_at(found, last),
        outside_allocator=kind.outside,
        steps=[
            PredictedStep(
                peak_allocated=each.peak_allocated,
                peak_reserved=each.peak_reserved,
                end_allocated=each.end_allocated,
            )
            for each in counters
        ],
        seconds=time.perf_counter() - begun,
        notes=[*found.notes, *_notes(kind, version, steps, last.peak_reserved)],
    )


def traced(build: Callable[[Any], Any], kind: Machine, version: tuple[int, int], steps: int) -> Trace:
    """What the program allocates.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
    """
    try:
        return trace(build, kind, version, steps)
    except BuildError:
        raise
    except Exception as error:
        raise failure(error) from error


def _notes(kind: Machine, version: tuple[int, int], steps: int, reserved: int) -> list[str]:
    notes = []
    if not kind.measured:
        notes.append(f"what lies outside the allocator was measured on an {MEASURED_ON}, not on {kind.name}")
    if not OLDEST <= version <= NEWEST:
        notes.append(f"torch {version[0]}.{version[1]} is not among the versions that were read")
    if steps < STEADY_STEPS:
        notes.append("the first step lacks what the optimizer makes in it: predict two for a steady state")
    if reserved + kind.outside > kind.memory:
        notes.append(
            f"this does not fit {kind.name}: the allocator would flush its cache, and be out of memory if "
            "that is not enough"
        )
    return notes
