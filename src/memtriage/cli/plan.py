"""`memtriage plan`: find the cheapest set of changes with which a training step fits a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from memtriage.cli.output import answer
from memtriage.cli.trace_options import NamedProgram, traces_a_program
from memtriage.model.target import TraceTarget
from memtriage.model.units import parse_size


@traces_a_program
def plan(
    program: NamedProgram,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Device memory for the whole process: 80GiB, 24000MB or bytes.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--world-size", metavar="N", help="GPUs of the job; above 1, FSDP2 is tried too."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUNG",
            help="Also try 'LoRA', which changes the task.",
        ),
    ] = None,
    maximize: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Instead, find the largest that fits: 'batch', 'seq' or 'batch,seq'."
        ),
    ] = None,
) -> int:
    """Find the cheapest changes that fit a memory budget."""
    from memtriage.model.plan import Plan
    from memtriage.report.plan_text import render

    world_size = program.ranks(ranks) or 1
    if maximize is not None:
        if allow:
            raise ValueError("use only one of --maximize and --allow")
        return _maximize(program, parse_size(budget, "budget"), maximize, world_size, as_json=json)

    options = {"budget": budget, "world_size": world_size, "allow": allow or []}
    result = program.trace("plan", options, Plan)
    return answer(result, json, lambda console: render(result, console))


def _maximize(program: NamedProgram, budget: int, maximize: str, world_size: int, *, as_json: bool) -> int:
    from memtriage.model.plan import SizedProgram
    from memtriage.planning.maximize import NAMES
    from memtriage.planning.maximize import maximize as search
    from memtriage.report.plan_text import render_maximum

    wanted = maximize.split(",")
    if not set(wanted) <= NAMES.keys() or len(set(wanted)) < len(wanted):
        raise ValueError(f"invalid --maximize {maximize!r}: expected batch, seq, or batch,seq")

    def trace(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
        sized = replace(program, target=target)
        return sized.trace("sized", {"world_size": world_size, **options}, SizedProgram)

    found = search(program.target, budget, sorted(wanted), trace)
    return answer(found, as_json, lambda console: render_maximum(found, console))
