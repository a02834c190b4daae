"""`memtriage.horizon`: whether a run of many steps will run out of memory, and at which step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Unpack

from memtriage.model.prediction import Horizon, HorizonPoint, Prediction
from memtriage.model.units import count
from memtriage.prediction.api import TraceOptions, trace_steps
from memtriage.prediction.build import BuildError
from memtriage.prediction.drawn import Draws
from memtriage.prediction.many_steps.course import StepOutcome
from memtriage.prediction.many_steps.derive import derive
from memtriage.prediction.many_steps.programs import ShapedBuild, ShapedScript
from memtriage.prediction.many_steps.routed import NotRoutedError, RoutedSteps
from memtriage.prediction.many_steps.run import LongRun, MemoryLimits, RunEnd
from memtriage.prediction.many_steps.shapes import (
    FIRST_STEPS,
    NOTHING,
    RunShapes,
    Shape,
    inputs_of,
    run_shapes,
)
from memtriage.prediction.many_steps.step_trace import StepTrace, cut
from memtriage.prediction.many_steps.variants import variants
from memtriage.prediction.routing import Routing, read_routing
from memtriage.prediction.trace import Trace

EQUALLY: Final = "a router is taken to choose each expert equally often"
POINTS: Final = 40
"""Steps of the run whose counters are kept."""
VARIED_AT_MOST: Final = 20_000_000
"""Variants are only tried if the run has at most this many events (about 20 seconds in the simulator)."""


def horizon(
    build: Callable[[Any], Any],
    lengths: Iterable[Any] | Mapping[Any, int] | None = None,
    *,
    steps: int | None = None,
    limit: int | None = None,
    routing: str | os.PathLike[str] | None = None,
    allocator_conf: str = "",
    gpu: str = "h200",
    world_size: int = 1,
    rank: int = 0,
    torch_version: str | None = None,
) -> Horizon:
    """Predict whether a run whose batches differ will run out of memory, and at which step. Sizes in bytes.

    Each distinct shape is traced once. The allocator is simulated over all steps in order, so fragmentation
    carries over from step to step. Above 32 distinct shapes a sample is traced, the others are derived from
    it, and `error` says how far off five of them are.

    Args:
        build: returns `(model, optimizer, step)`, as for `predict`; `step` takes an entry of `lengths`.
        lengths: the argument of each step, in order: a number, a tuple (its parts are passed one by one), or
            a batch of a `DataLoader`. A mapping says how often each comes, in a random order. None if `step`
            takes no argument.
        steps: how many; by default as many as `lengths` has. If more, `lengths` is repeated.
        limit: bytes that the process may reserve, as by `torch.cuda.set_per_process_memory_fraction`; by
            default what the GPU has.
        routing: JSON file that says how often routers choose each expert, as for `--routing`.
        allocator_conf, gpu, world_size, rank, torch_version: as for `predict`.

    Raises:
        ValueError: as for `predict`, or `lengths` is empty, or `step` does not take its entries, or `routing`
            is not read.

    Where sizes follow from a random choice among experts, and all steps have one shape, eight steps are
    traced, and each step of the run gets choices of its own: every expert is equally likely, or as `routing`
    says.

    Limits: occasional work between steps (evaluation, checkpoints) is not part of the run. Sizes that depend
    on the contents of a batch otherwise are those of the first batch of its shape.
    """
    program = ShapedBuild(build, inputs_of(lengths, steps))
    program.routing = None if routing is None else read_routing(Path(routing))
    prediction = horizon_of_program(
        program,
        len(program.run_shapes.shapes),
        limit=limit,
        allocator_conf=allocator_conf,
        gpu=gpu,
        world_size=world_size,
        rank=rank,
        torch_version=torch_version,
    )
    assert isinstance(prediction.horizon, Horizon)
    return prediction.horizon


def horizon_of_program(
    program: ShapedBuild | ShapedScript,
    steps: int,
    *,
    limit: int | None = None,
    **options: Unpack[TraceOptions],
) -> Prediction:
    """The prediction of the traced steps, with the horizon of `steps`; see `horizon`, `predict_program`."""
    begun = time.perf_counter()
    if limit is not None and limit <= 0:
        raise ValueError(f"limit={limit}; expected bytes that the process may reserve")
    planned = program.run_shapes
    wanted = steps if planned is None else len(planned.traced)
    traced, gpu_memory, prediction = trace_steps(program, wanted, **options)
    known = program.run_shapes or _all_the_same(traced, steps)
    run, error = run_of(traced, known)
    notes = _notes(known, error)
    if traced.draws is not None and known.routed(traced.draws):
        run, remarks = _drawn_again(run, traced, traced.draws, known, program.routing)
        notes += remarks
    memory = MemoryLimits(traced.settings, gpu_memory, gpu_memory - prediction.outside_allocator, limit)
    prediction.horizon = _horizon(run, memory, error, len(set(known.shapes)))
    prediction.seconds = time.perf_counter() - begun
    prediction.notes += notes
    return prediction


def run_of(traced: Trace, known: RunShapes) -> tuple[LongRun, float | None]:
    """The steps of the run, and the relative error of the derived ones."""
    building, *steps = cut(traced.recording, traced.steps)
    before = [building, *steps[: known.first]]
    step_of: dict[Shape, StepTrace] = {}
    for number, shape in enumerate(known.traced):
        if number >= known.first:
            step_of[shape] = steps[number].settled(number)  # the largest is traced twice: keep the second
    choice = known.choice
    if not choice.derived:
        return LongRun(before, step_of, known.shapes), None
    sample = {shape: step_of[shape] for shape in choice.traced}
    error = max(
        abs(step.peak() - step_of[shape].peak()) / step_of[shape].peak()
        for shape, step in derive(sample, choice.checked).items()
    )
    step_of.update(derive({**sample, **{shape: step_of[shape] for shape in choice.checked}}, choice.derived))
    return LongRun(before, step_of, known.shapes), error


def _drawn_again(
    run: LongRun, traced: Trace, draws: Draws, known: RunShapes, routing: Routing | None
) -> tuple[LongRun, list[str]]:
    """The run with draws of its own in each later step, and what is to be said of it."""
    _, *steps = cut(traced.recording, traced.steps)
    later = {number: step.settled(number) for number, step in enumerate(steps) if number >= known.first}
    try:
        routed = RoutedSteps(later, draws)
        if not routed.drawn:
            return run, []
        shape = known.choice.traced[0]
        step_of = {
            replace(shape, numbers=(*shape.numbers, number)): step
            for number, step in enumerate(routed.drawn_again(len(known.shapes) - known.first))
        }
    except NotRoutedError as error:
        return run, [
            f"random numbers decide what a step allocates, and could not be drawn again ({error}): all steps "
            "are taken as one that was traced"
        ]
    return LongRun(run.before, step_of, [*known.shapes[: known.first], *step_of]), [
        f"sizes follow from {count(routed.drawn, 'number')} that every step draws at random, such as the "
        f"tokens of an expert: {EQUALLY if routing is None else routing.text()}; "
        f"{count(len(later), 'step')} were traced, the others derived, {routed.error:.2%} off at most in "
        "what the step asks for at its peak"
    ]


def _all_the_same(traced: Trace, steps: int) -> RunShapes:
    """The run of a script without a `DataLoader`, whose steps are all the same.

    Raises:
        BuildError: they are not.
    """
    planned = run_shapes([NOTHING.shape] * steps)
    if traced.draws is not None and planned.routed(traced.draws):
        return planned
    _, *cut_steps = cut(traced.recording, traced.steps)
    later = [step.settled(number) for number, step in enumerate(cut_steps)][FIRST_STEPS:]
    if traced.steps < steps and any(step.differs(later[0]) for step in later[1:]):
        raise BuildError(
            f"the steps of this program differ, and it takes its batches from no torch DataLoader, so those "
            f"of {steps} steps are not known; expected a DataLoader, or memtriage.horizon(build, lengths=...)"
        )
    if traced.steps >= steps:
        return RunShapes([NOTHING.shape] * steps, steps, run_shapes([]).choice)
    return planned


def _horizon(run: LongRun, memory: MemoryLimits, error: float | None, shapes: int) -> Horizon:
    course = run.course(memory.unlimited)
    outcomes = list(course.run(run.steps()))[1:]
    peak = max(outcomes, key=lambda outcome: outcome.peak_reserved)
    peak_step = outcomes.index(peak) + 1
    peaks = sorted(outcome.peak_allocated for outcome in outcomes)
    end = run.end(memory) if peak.peak_reserved > memory.reservable else RunEnd(None)
    failed = end.failed
    result = Horizon(
        steps=len(outcomes),
        peak_reserved=peak.peak_reserved,
        peak_allocated=peaks[-1],
        allocated_p50=_quantile(peaks, 0.5),
        allocated_p99=_quantile(peaks, 0.99),
        allocated_p999=_quantile(peaks, 0.999),
        peak_step=peak_step,
        peak_shape=run.shapes[peak_step - 1].text,
        full_at=end.full_at,
        full_shape=run.shapes[end.full_at - 1].text if end.full_at else None,
        full_operator=None if failed is None else failed.operator,
        full_asked=None if failed is None else failed.error.requested,
        flushed_at=end.flushed_at,
        memory=memory.reservable,
        shapes=shapes,
        error=error,
        course=_points(outcomes),
        variants=[],
    )
    if course.simulated <= VARIED_AT_MOST:
        result.variants = list(variants(run, memory, end.full_at is not None))
    return result


def _quantile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that this share of them does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _points(outcomes: Sequence[StepOutcome]) -> list[HorizonPoint]:
    """Some steps of the run: those that reserve more than any before, and others at even distances."""
    highest, rises = 0, []
    for number, outcome in enumerate(outcomes):
        if outcome.peak_reserved > highest:
            highest = outcome.peak_reserved
            rises.append(number)
    stride = max(1, len(rises) * 2 // POINTS)
    kept = {*rises[::stride], *rises[-1:], *range(0, len(outcomes), max(1, len(outcomes) * 2 // POINTS))}
    return [
        HorizonPoint(
            step=number + 1,
            peak_allocated=outcomes[number].peak_allocated,
            peak_reserved=outcomes[number].peak_reserved,
            stranded=outcomes[number].stranded,
        )
        for number in sorted(kept)
    ]


def _notes(known: RunShapes, error: float | None) -> list[str]:
    choice = known.choice
    notes = [
        "the horizon has the steps alone: evaluation and checkpoints between them are left out, and a size "
        "that depends on what a batch contains is that of the first batch of its shape"
    ]
    if error is not None:
        traced = len(choice.traced) + len(choice.checked)
        notes.append(
            f"{traced} of {traced + len(choice.derived)} inputs were traced, the others derived; "
            f"{len(choice.checked)} that were both differ by {error:.2%} at most in what the step asks for "
            "at its peak"
        )
    return notes
