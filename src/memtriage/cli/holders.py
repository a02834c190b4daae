"""`memtriage holders`: list the catalogue of known holders, and which of them are installed."""

from __future__ import annotations

from typing import Annotated

import typer

from memtriage.cli.output import answer


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
    from memtriage.catalogue.remarks import REMARKS
    from memtriage.report.holders import render

    here = holders_here(BUILT_IN)
    result = {"schema": 1, "holders": here, "not_detected": REMARKS}
    return answer(result, json, lambda console: render(here, console, every=every))
