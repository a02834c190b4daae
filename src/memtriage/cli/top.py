"""`memtriage top`: follow a running job, from its record alone."""

from __future__ import annotations

import sys
from pathlib import Path
from time import time
from typing import Annotated, Final

import typer

from memtriage.cli.output import Refusal, answer

_LEAST_S: Final = 0.2


def top(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Directory that `memtriage run -o` writes; the newest run in it is followed. Name the "
            "directories of all nodes to merge them.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON and exit.")] = False,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="Sort ranks by COLUMN, such as growth.")
    ] = "rank",
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Refresh every SECONDS.")] = 1.0,
) -> int:
    """Follow a running job in the terminal."""
    from memtriage.diagnose.ranks.live import live_view
    from memtriage.report.console import console_for
    from memtriage.report.top_text import BY_KEY, as_json, follow, render

    if sort not in BY_KEY:
        raise Refusal(f"invalid --sort {sort!r}: use one of {', '.join(BY_KEY)}")
    if not every >= _LEAST_S:
        raise Refusal(f"invalid --every {every}: expected at least {_LEAST_S} seconds")
    if missing := next((path for path in directories if not path.exists()), None):
        raise Refusal(f"{missing}: no such file or directory")
    if not (once or json) and sys.stdout.isatty():
        follow(lambda: live_view(directories, time()), console_for(sys.stdout), BY_KEY[sort], every)
        return 0
    view = live_view(directories, time())
    if view.waiting is not None:
        raise Refusal(view.waiting)
    return answer(as_json(view), json, lambda console: render(view, console, BY_KEY[sort]))
