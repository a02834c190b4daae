"""`memtriage plan`: find the cheapest set of changes with which a training step fits a budget."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memtriage.cli.trace_options import NamedProgram, traces_a_program


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
    world_size: Annotated[
        int, typer.Option(metavar="N", help="GPUs of the job; above 1, FSDP2 is tried too.")
    ] = 1,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUNG",
            help="Also try 'torch.compile', 'activation budget', 'LoRA', 'QLoRA' or 'shorter inputs'.",
        ),
    ] = None,
) -> int:
    """Find the cheapest changes that fit a memory budget."""
    import msgspec

    from memtriage.model.plan import Plan

    options = {"budget": budget, "world_size": world_size, "allow": allow or []}
    result = program.trace("plan", options, Plan)
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        from memtriage.report.console import console_for
        from memtriage.report.plan_text import render

        render(result, console_for(sys.stdout))
    return 0
