"""`memtriage top`: a run in progress, from its record alone."""

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
            help="What `memtriage run -o` writes: all runs (the newest is followed), a run, a restart, or "
            "one rank's file. Several node-local directories are merged.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print where the run stands as JSON, and exit.")
    ] = False,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="The column to sort ranks by, e.g. growth.")
    ] = "rank",
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Seconds between two looks at the record.")
    ] = 1.0,
) -> int:
    """Follow a run in progress on a live screen: ranks, growth, ledger, findings."""
    from memtriage.diagnose.ranks.live import LiveRun
    from memtriage.report.top.words import BY_KEY

    if sort not in BY_KEY:
        return _refused(f"--sort {sort!r} is no column; expected one of {', '.join(BY_KEY)}")
    if not every >= _LEAST_S:
        return _refused(f"--every {every} is too short; expected at least {_LEAST_S} seconds")
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
            "the live screen needs Textual, which is not installed: pip install 'memtriage[top]' "
            "(or `memtriage top --once DIR` for one table)"
        )
    from memtriage.report.top.screen import TopScreen

    TopScreen(run, every, BY_KEY[sort]).run()
    return 0


def _refused(text: str) -> int:
    complain("memtriage top", text)
    return 2
