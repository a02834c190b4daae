"""`memtriage.predict`: from a build function to a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import UNSET

from memtriage.allocator.settings import NEWEST, OLDEST, parse_conf, parse_version
from memtriage.model.prediction import PredictedStep, Prediction
from memtriage.predict.against import compare, read_device
from memtriage.predict.build import BuildError, failure
from memtriage.predict.distributed import nccl
from memtriage.predict.distributed.world import check_world
from memtriage.predict.machines import Machine, machine
from memtriage.predict.owners import owners_at
from memtriage.predict.peak_table import peak_table
from memtriage.predict.simulate import phase_at, replay
from memtriage.predict.trace import Build, Trace, trace
from memtriage.predict.watch import Program

MEASURED_ON: Final = "NVIDIA H200"
STEADY_STEPS: Final = 2
"""From this step on the optimizer's states are there before the step begins."""


_TRIES: Final = (
    "cuDNN chooses convolutions by trial (torch.backends.cudnn.benchmark): the first call of each shape "
    "takes a workspace that may be gigabytes, at most what is free, and never fails for want of it; the "
    "peaks lack these trials, and the workspaces of what cuDNN chose may be others"
)


def predict(
    build: Build | Program,
    *,
    steps: int = STEADY_STEPS,
    allocator_conf: str | None = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
    explain: bool = False,
    against: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """See `memtriage.predict`.

    Args:
        build: a build function, or another program.
        allocator_conf: None for the settings that the environment and the program set.
        explain: also the instant of the peak by module.
        against: also the record below this directory beside it.
        progress: called with the number of each step that begins, from 1, and how many are wanted.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
        ValueError: another argument cannot be used.
    """
    begun = time.perf_counter()
    kind = machine(gpu)
    version = parse_version(torch_version)
    parse_conf(allocator_conf or "", version)
    if steps < 1:
        raise ValueError(f"steps={steps}; expected at least 1, and 2 for a step in steady state")
    # Read first: what is wrong with it is to be known before the trace.
    recorded = None if against is None else read_device(against, rank)
    found = traced(build, kind, version, steps, world_size, rank, explain, allocator_conf, progress)
    counters = replay(found.recording, found.settings, kind.memory, found.steps)
    # Steps of a script may differ. The first lacks what the optimizer makes in it.
    settled = (counters[1:] or counters) if found.varies else counters[-1:]
    highest = max(settled, key=lambda each: each.peak_allocated)
    reserved = max(each.peak_reserved for each in settled)
    outside = kind.outside + nccl.outside(found.communicators)
    return Prediction(
        peak_allocated=highest.peak_allocated,
        peak_reserved=reserved,
        peak_phase=phase_at(found.recording, highest.peak_event),
        by_owner=owners_at(found, highest),
        outside_allocator=outside,
        steps=[
            PredictedStep(
                peak_allocated=each.peak_allocated,
                peak_reserved=each.peak_reserved,
                end_allocated=each.end_allocated,
            )
            for each in counters
        ],
        cudnn_trials_bound=kind.memory - kind.outside if found.cudnn_tries else UNSET,
        seconds=time.perf_counter() - begun,
        notes=[
            *found.notes,
            *([_TRIES] if found.cudnn_tries else []),
            *_notes(kind, version, steps, reserved + outside),
            *nccl.notes(world_size, found.communicators, found.held),
        ],
        peak_table=peak_table(found, highest) if explain else UNSET,
        against=UNSET
        if recorded is None
        else compare(found, found.settings, kind.memory, found.steps, outside, *recorded),
    )


def traced(
    build: Build | Program,
    kind: Machine,
    version: tuple[int, int],
    steps: int,
    world_size: int = 1,
    rank: int = 0,
    explain: bool = False,
    allocator_conf: str | None = "",
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """What the program allocates, as one rank of `world_size`.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
        ValueError: there is no such rank, or no process group can be made for it.
    """
    check_world(world_size, rank)
    try:
        return trace(build, kind, version, steps, world_size, rank, explain, allocator_conf, progress)
    except BuildError:
        raise
    except Exception as error:
        raise failure(error) from error


def _notes(kind: Machine, version: tuple[int, int], steps: int, needed: int) -> list[str]:
    notes = []
    if not kind.measured:
        notes.append(f"what lies outside the allocator was measured on an {MEASURED_ON}, not on {kind.name}")
    if not OLDEST <= version <= NEWEST:
        notes.append(f"torch {version[0]}.{version[1]} is not among the versions that were read")
    if steps < STEADY_STEPS:
        notes.append("the first step lacks what the optimizer makes in it: predict two for a steady state")
    if needed > kind.memory:
        notes.append(
            f"this does not fit {kind.name}: the allocator would flush its cache, and be out of memory if "
            "that is not enough"
        )
    return notes
