"""`memtriage doctor`: check versions, devices, limits and settings that matter for memory."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> int:
    """Check versions, devices, limits and settings."""
    from memtriage.machine.check import check_machine

    facts = list(check_machine(os.environ))
    if json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "facts": facts}) + b"\n")
        return 0
    from memtriage.report.console import console_for
    from memtriage.report.machine_text import render

    render(facts, console_for(sys.stdout))
    return 0
