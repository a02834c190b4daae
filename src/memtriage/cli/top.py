"""`memtriage top`: follow a running job on a live screen, from its record alone."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from memtriage.process.messages import complain

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
    """Follow a running job on a live screen."""
    from memtriage.diagnose.ranks.live import LiveRun
    from memtriage.report.top.words import BY_KEY

    if sort not in BY_KEY:
        return _refused(f"invalid --sort {sort!r}: use one of {', '.join(BY_KEY)}")
    if not every >= _LEAST_S:
        return _refused(f"invalid --every {every}: expected at least {_LEAST_S} seconds")
    if missing := next((path for path in directories if not path.exists()), None):
        return _refused(f"{missing}: no such file or directory")
    run = LiveRun(directories)
    if once or json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        view = run.refresh()
        if view.waiting is not None:
            return _refused(view.waiting)
        from memtriage.report.console import console_for
        from memtriage.report.top import text as top_text

        if json:
            sys.stdout.buffer.write(top_text.as_json(view))
        else:
            top_text.render(view, console_for(sys.stdout), BY_KEY[sort])
        return 0
    if find_spec("textual") is None:
        return _refused(
            "the live screen needs Textual: pip install 'memtriage[top]', or use `memtriage top --once DIR`"
        )
    from memtriage.report.top.screen import TopScreen

    TopScreen(run, every, BY_KEY[sort]).run()
    return 0


def _refused(text: str) -> int:
    complain("memtriage top", text)
    return 2
