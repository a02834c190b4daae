"""`memtriage.plan`: from a build function and a budget to a plan."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from memtriage.allocator.settings import parse_conf, parse_version
from memtriage.model.plan import Cheaper, PassedOver, Plan, PlanStep, SizedProgram
from memtriage.model.units import parse_size
from memtriage.planning.changes import Change, Changes, Rung
from memtriage.planning.evaluate import Evaluated, Evaluator
from memtriage.planning.ladder import ladder
from memtriage.planning.search import LadderSearch
from memtriage.prediction.build import Build
from memtriage.prediction.gpu_kinds import GpuKind, machine
from memtriage.prediction.watch import TracedProgram

MARGIN: Final = 0.05
"""Share of the budget that a plan leaves free (M4: the first change that fits with 5 % to spare)."""
STEPS: Final = 2
"""Steps that are traced: the second finds the optimizer's states in place."""

_NOT_FOR_SCRIPTS: Final = "it changes the program: give a build function instead of a script"
_AS_IT_IS: Final = (
    "a script is planned as it is: only settings of the allocator are tried; for changes of the program give "
    "a build function (FILE.py:FUNCTION)"
)


def plan(
    build: Build | TracedProgram,
    budget: int | str,
    *,
    allocator_conf: str | None = "",
    gpu: str = "h200",
    torch_version: str | None = None,
    world_size: int = 1,
    allow: Iterable[str] = (),
) -> Plan:
    """Find the cheapest set of changes with which a training step fits a budget. Sizes in bytes.

    Every candidate is predicted as by `predict`: the build function is run many times, each time with other
    changes.

    Args:
        build: returns `(model, optimizer, step)`; `step()` runs one optimizer step. Smaller micro-batches are
            tried where `build` or `step` has a keyword for the batch, such as `micro_batch=16`.
        budget: bytes that the process may use of the device, including those outside the allocator; or text
            such as `80GiB`. 5 % of it stay free.
        allocator_conf, gpu, torch_version: as in `predict`.
        world_size: GPUs of the job; with several, FSDP2 is tried, too. The budget is per GPU.
        allow: rungs that are only tried if named here: `LoRA`, because it changes the task.

    Raises:
        ValueError: an argument is out of range, or the program itself cannot be predicted; the text says what
            to change. A change that makes the program fail is passed over.

    Limits: those of `predict`. 8-bit and offloaded optimizers are simulated by the states that they keep on
    the device. Speed is judged by counting operations, not by time.
    """
    begun = time.perf_counter()
    size = parse_size(budget, "budget")
    kind = machine(gpu)
    version = parse_version(torch_version)
    parse_conf(allocator_conf or "", version)
    requested = _requested(ladder("", world_size), allow)
    room = int(size * (1 - MARGIN)) - kind.outside
    if room <= 0:
        raise ValueError(
            f"budget={size}: {kind.outside} bytes lie outside the allocator before the first tensor "
            f"({kind.name}), and {MARGIN:.0%} stay free; expected more than these"
        )
    evaluator = Evaluator(build, kind, version, allocator_conf, STEPS, room, world_size)
    rungs = ladder(evaluator.conf(), world_size)
    settings_only = isinstance(build, TracedProgram)
    if settings_only:
        rungs = tuple(
            rung if rung.configures else replace(rung, offered=lambda facts: _NOT_FOR_SCRIPTS, on_request="")
            for rung in rungs
        )
    result = LadderSearch(evaluator, rungs, requested).run(evaluator.facts())
    before = evaluator.of(())
    after = result.evaluated
    steps = _steps(evaluator, result.changes, rungs)
    return Plan(
        budget=size,
        margin=MARGIN,
        fits=after.fits,
        short_by=0 if after.fits else max(1, after.peak.needs - int(size * (1 - MARGIN))),
        outside_allocator=kind.outside,
        before=before.peak,
        after=after.peak,
        steps=steps,
        next_cheaper=None if result.cheaper is None else _cheaper(evaluator, result.cheaper, size),
        passed_over=result.passed_over,
        settings_only=settings_only,
        traces=evaluator.traces,
        seconds=time.perf_counter() - begun,
        notes=[
            *evaluator.notes,
            *([_AS_IT_IS] if settings_only else []),
            *_notes(kind, size, after, result.passed_over, world_size),
        ],
    )


def needs_of(
    build: Build | TracedProgram,
    *,
    allocator_conf: str | None = "",
    gpu: str = "h200",
    torch_version: str | None = None,
    world_size: int = 1,
    arguments: dict[str, dict[str, int]] | None = None,
) -> SizedProgram:
    """What a program needs as it is, or with other keyword arguments of `build` and `step`.

    Args:
        build: the program.
        allocator_conf, gpu, torch_version, world_size: as for `memtriage.plan`.
        arguments: for `build` and for `step`; without them the result says which there are.
    """
    kind, version = machine(gpu), parse_version(torch_version)
    parse_conf(allocator_conf or "", version)
    evaluator = Evaluator(build, kind, version, allocator_conf, STEPS, kind.memory, world_size)
    if arguments is not None:
        sized = Change(
            rung="size",
            action=f"{arguments}",
            speed="",
            maths="different",
            code={},
            build_arguments=arguments["build"],
            step_arguments=arguments["step"],
        )
        return SizedProgram(needs=evaluator.of((sized,)).peak.needs, notes=list(evaluator.notes))
    facts = evaluator.facts()
    knobs = {"batch": facts.batch, "seq": facts.length}
    return SizedProgram(
        needs=evaluator.of(()).peak.needs,
        keywords={name: (knob.of, knob.name, knob.value) for name, knob in knobs.items() if knob is not None},
        notes=list(evaluator.notes),
    )


def _requested(rungs: tuple[Rung, ...], allow: Iterable[str]) -> frozenset[str]:
    requested = frozenset(allow)
    there = [rung.name for rung in rungs if rung.on_request]
    unknown = requested.difference(there)
    if unknown:
        raise ValueError(f"allow={sorted(unknown)}; expected some of {there}")
    return requested


def _steps(evaluator: Evaluator, changes: Changes, rungs: tuple[Rung, ...]) -> list[PlanStep]:
    """The changes one after the other, each simulated on top of those before it."""
    playbook = {rung.name: rung.playbook for rung in rungs}
    steps = []
    for number, change in enumerate(changes):
        before, after = evaluator.of(changes[:number]), evaluator.of(changes[: number + 1])
        slowdown = after.work / before.work - 1 if change.counts_work and before.work else None
        steps.append(
            PlanStep(
                rung=change.rung,
                playbook=playbook[change.rung],
                action=change.action,
                saves=before.peak.needs - after.peak.needs,
                after=after.peak,
                slowdown=slowdown,
                speed=change.speed if slowdown is None else f"{change.speed}: {_counted(slowdown, after)}",
                maths=change.maths,
                maths_note=change.maths_note,
                simulated_by=change.simulated_by,
                code=dict(change.code),
            )
        )
    return steps


def _counted(slowdown: float, after: Evaluated) -> str:
    text = (
        f"{abs(slowdown):.0%} {'more' if slowdown >= 0 else 'fewer'} operations in matrix products, "
        "convolutions and attention, counted in the trace"
    )
    if after.uncounted:
        text += f" (without {', '.join(sorted(after.uncounted))})"
    return text


def _cheaper(evaluator: Evaluator, changes: Changes, budget: int) -> Cheaper:
    needs = evaluator.of(changes).peak.needs
    return Cheaper(actions=[change.action for change in changes], needs=needs, over_budget=needs - budget)


def _notes(
    kind: GpuKind, budget: int, after: Evaluated, passed: list[PassedOver], world_size: int
) -> list[str]:
    notes = []
    if not kind.measured:
        notes.append(f"memory outside the allocator was not measured on {kind.name}")
    if world_size > 1:
        notes.append("what NCCL allocates outside the allocator is not part of the figures")
    if budget > kind.memory:
        notes.append(f"the budget is more than {kind.name} has: {kind.memory} bytes")
    if after.fits and after.peak.reserved + kind.outside > budget:
        notes.append(
            "to stay within the budget the allocator will return cached memory to the driver and "
            "request it again, which costs time"
        )
    if not after.fits:
        asked = [over.rung for over in passed if over.outcome == "on request"]
        if asked:
            notes.append(f"on request there are also: {', '.join(asked)}")
    return notes
