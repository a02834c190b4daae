"""`memtriage holders`: list the catalogue of known holders, and which of them are installed."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer


def holders(
    json: Annotated[bool, typer.Option("--json", help="Print the whole catalogue, as JSON.")] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="Include libraries and versions that are not installed."),
    ] = False,
) -> int:
    """List library caches that are known to keep memory."""
    from memtriage.catalogue.catalogue import BUILT_IN
    from memtriage.catalogue.installed import holders_here

    here = holders_here(BUILT_IN)
    if json:
        from memtriage.catalogue.remarks import REMARKS

        said = {"schema": 1, "holders": here, "not_detected": REMARKS}
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        return 0
    from memtriage.report.console import console_for
    from memtriage.report.holders import render

    render(here, console_for(sys.stdout), every=every)
    return 0
