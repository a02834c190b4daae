"""`memtriage.predict`: from a build function to a prediction."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypedDict, Unpack

from msgspec import UNSET, convert

from memtriage.allocator.settings import NEWEST, OLDEST, parse_conf, parse_version
from memtriage.model.prediction import HostCourse, PredictedStep, Prediction
from memtriage.model.units import size
from memtriage.prediction.build import Build
from memtriage.prediction.distributed import nccl
from memtriage.prediction.distributed.broadcasts import Broadcasts
from memtriage.prediction.gpu_kinds import NO_GPU, GpuKind, machine
from memtriage.prediction.host.replay import highest as highest_stretch
from memtriage.prediction.host.replay import host_course
from memtriage.prediction.owners import owners_at, peak_table
from memtriage.prediction.simulate import StepCounters, phase_at, phase_peaks, replay
from memtriage.prediction.trace import Trace, trace
from memtriage.prediction.watch import TracedProgram

MEASURED_ON: Final = "NVIDIA H200"
STEADY_STEPS: Final = 2
"""The first step that begins with the optimizer's states in place."""

_MUCH_MORE: Final = 1.01
"""An earlier step is named if its peak is above the settled one by this factor: peaks may be off by less."""
_PACKAGES: Final = (
    *("torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "diffusers", "timm"),
    *("lightning", "deepspeed", "torchvision", "torchao", "bitsandbytes"),
)
"""Their versions change what a step allocates."""
_TRIES: Final = (
    "cuDNN chooses convolutions by trial (torch.backends.cudnn.benchmark): the first call of each shape "
    "takes a workspace that may be gigabytes, at most what is free, and never fails for lack of it; the "
    "peaks do not include these trials, and cuDNN may choose other workspaces"
)


class TraceOptions(TypedDict, total=False):
    """Options of every prediction.

    Attributes:
        allocator_conf: None for the settings of the environment and the program; by default none.
        gpu, world_size, rank, torch_version: as for `memtriage.predict`.
        explain: also return the instant of the peak by module and line, and what it depends on.
        progress: called when a step begins, with its number, from 1, and how many are traced.
        host: also follow the host's memory (a script's to its end), and call this with the result.
        broadcasts: what rank 0 sends to the others.
    """

    allocator_conf: str | None
    gpu: str
    world_size: int
    rank: int
    torch_version: str | None
    explain: bool
    progress: Callable[[int, int], None] | None
    host: Callable[[HostCourse], None] | None
    broadcasts: Broadcasts


def predict_program(
    build: Build | TracedProgram,
    *,
    steps: int = STEADY_STEPS,
    **options: Unpack[TraceOptions],
) -> Prediction:
    """See `memtriage.predict`.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
        ValueError: another argument cannot be used.
    """
    begun = time.perf_counter()
    if steps < 1:
        raise ValueError(f"steps={steps}; expected at least 1, and 2 for a step in steady state")
    _, _, prediction = trace_steps(build, steps, **options)
    prediction.seconds = time.perf_counter() - begun
    return prediction


def trace_steps(
    program: Build | TracedProgram,
    steps: int,
    *,
    allocator_conf: str | None = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
    explain: bool = False,
    progress: Callable[[int, int], None] | None = None,
    host: Callable[[HostCourse], None] | None = None,
    broadcasts: Broadcasts | None = None,
) -> tuple[Trace, int, Prediction]:
    """Trace steps; return the trace, bytes of the GPU's memory, and their prediction without its seconds.

    Raises:
        BuildError: as `predict_program`.
        ValueError: an option cannot be used.
    """
    kind = machine(gpu)
    version = parse_version(torch_version)
    parse_conf(allocator_conf or "", version)
    traced = trace(
        program,
        kind,
        version,
        steps,
        world_size,
        rank,
        explain,
        allocator_conf,
        progress,
        host is not None,
        broadcasts,
    )
    prediction = _prediction_of(traced, kind, version, world_size, explain)
    if host is not None and traced.host is not None:
        course = host_course(traced.host)
        prediction.host = highest_stretch(course.stretches)
        host(course)
    return traced, kind.memory, prediction


def _prediction_of(
    traced: Trace, kind: GpuKind, version: tuple[int, int], world_size: int, explain: bool
) -> Prediction:
    """The prediction of the traced steps, without its seconds."""
    counters = replay(traced.recording, traced.settings, kind.memory, traced.steps)
    # Steps of a script may differ. The first begins without the optimizer's states.
    settled = (counters[1:] or counters) if traced.varies else counters[-1:]
    settled = settled or [StepCounters(0, 0, 0, 0)]  # the host is followed, and nothing else was asked for
    highest = max(settled, key=lambda step: step.peak_allocated)
    reserved = max(step.peak_reserved for step in settled)
    outside = 0 if kind is NO_GPU else kind.outside + nccl.outside(traced.communicators)
    phase = phase_at(traced.recording, highest.peak_event)
    predicted = Prediction(
        peak_allocated=highest.peak_allocated,
        peak_reserved=reserved,
        peak_phase=phase,
        by_owner=owners_at(traced, highest),
        outside_allocator=outside,
        steps=[convert(counter, PredictedStep, from_attributes=True) for counter in counters],
        cudnn_trials_bound=kind.memory - kind.outside if traced.cudnn_tries else UNSET,
        compile_trials=UNSET if traced.compile_trials is None else traced.compile_trials,
        seconds=0.0,
        notes=[*traced.notes, *_higher_before(counters, highest, traced.compile_trials or 0)],
    )
    if traced.cudnn_tries:
        predicted.notes.append(_TRIES)
    if kind is not NO_GPU:
        predicted.notes += _notes(kind, version, traced.steps, reserved + outside)
        predicted.notes += nccl.notes(world_size, traced.communicators, traced.held)
    if explain:
        predicted.peak_table = peak_table(traced, highest.peak_allocated, highest.peak_event)
        peaks = {}
        if highest in counters:
            step = counters.index(highest)
            peaks = phase_peaks(traced.recording, traced.settings, kind.memory, step, traced.steps)
        predicted.other_peaks = {
            name: peak_table(traced, *peak) for name, peak in peaks.items() if name != phase
        }
        predicted.context = _context(traced, kind, version, world_size)
    return predicted


def _context(traced: Trace, kind: GpuKind, version: tuple[int, int], world_size: int) -> dict[str, str]:
    """What the figures depend on besides the program."""
    versions = [(name, getattr(sys.modules.get(name), "__version__", None)) for name in _PACKAGES]
    return {
        "python": platform.python_version(),
        **{name: str(of_package) for name, of_package in versions if of_package is not None},
        "version of torch predicted for": ".".join(map(str, version)),
        "GPU": kind.name,
        "allocator settings": traced.conf,
        "ranks": str(world_size),
        **{f"input of {model}": given for model, given in traced.inputs.items()},
    }


def _higher_before(counters: list[StepCounters], settled: StepCounters, trials: int) -> list[str]:
    """A line about an earlier step that allocates more than the settled ones.

    Trials of kernels are not counted: they have a row of their own.
    """
    number, step = max(enumerate(counters, 1), key=lambda pair: pair[1].peak_allocated, default=(0, settled))
    if step.peak_allocated <= _MUCH_MORE * settled.peak_allocated + trials:
        return []
    return [
        f"step {number} allocates {size(step.peak_allocated)} at its peak, more than the settled steps "
        f"({size(settled.peak_allocated)})"
    ]


def _notes(kind: GpuKind, version: tuple[int, int], steps: int, needed: int) -> list[str]:
    notes = []
    if not kind.measured:
        notes.append(f"memory outside the allocator was measured on an {MEASURED_ON}, not on {kind.name}")
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


def predict(
    build: Callable[[Any], Any],
    *,
    steps: int = 2,
    allocator_conf: str = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
) -> Prediction:
    """Predict the peak memory of a training step without a GPU. Sizes in bytes.

    `build(device)` and its steps run with fake tensors: they have no data and look like CUDA tensors.

    Args:
        build: returns `(model, optimizer, step)`; `step()` runs one optimizer step.
        steps: how many are traced; the peaks are those of the last one. The first begins without the
            optimizer's states.
        allocator_conf: as in `PYTORCH_CUDA_ALLOC_CONF`, e.g. `expandable_segments:True`.
        gpu: kind of GPU: `h200`, `h100`, `a100`, `l4`, ...
        world_size, rank: ranks of the job (DDP, FSDP2, ...), and the one that is predicted.
        torch_version: version whose allocator and kernels are simulated, e.g. `2.11.0`; by default the
            installed one.

    Raises:
        ValueError: an argument is out of range, `build` returns something else, or the program raises; the
            text says what to change.

    Limits: one process on one GPU; `torch.compile` needs Triton, else it is traced as eager; kernels from
    outside PyTorch that are neither Python nor Triton need a shape function.
    """
    return predict_program(
        build,
        steps=steps,
        allocator_conf=allocator_conf,
        gpu=gpu,
        world_size=world_size,
        rank=rank,
        torch_version=torch_version,
    )
