"""`memtriage doctor`: check versions, devices, limits and settings that matter for memory."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from memtriage.cli.output import answer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> int:
    """Check versions, devices, limits and settings."""
    from memtriage.machine.check import check_machine
    from memtriage.report.machine_text import render

    facts = list(check_machine(os.environ))
    return answer({"schema": 1, "facts": facts}, json, lambda console: render(facts, console))
