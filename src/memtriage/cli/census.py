"""`memtriage census`: show what keeps memory alive in a running job, without stopping it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memtriage.process.messages import complain


def census(
    pid: Annotated[
        int,
        typer.Option(
            "--pid",
            metavar="N",
            help="Process started with `memtriage run --listen`, or the launcher of such processes. On "
            "Python 3.14 or newer: any training process of yours.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print every holder, as JSON.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up after so many seconds.")
    ] = 60.0,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Show N holders per device.")] = 20,
) -> int:
    """Show what keeps memory alive in a running job."""
    from memtriage.session.remote.ask import AskError, ask, ask_all, listening
    from memtriage.session.remote.inject import inject, unable

    if not timeout > 0:
        return _refused(f"invalid --timeout {timeout}: expected more than 0 seconds")
    if rows < 1:
        return _refused(f"invalid --rows {rows}: expected at least 1")
    try:
        pids = listening(pid)
        if not pids and (why := unable(pid)) is not None:
            return _refused(why)
    except AskError as error:
        return _refused(str(error))
    answers, failed = ask_all(pids or [pid], timeout, ask if pids else inject)
    for unanswered in failed:
        _refused(unanswered.why)
    if not answers:
        return 2
    from memtriage.report.census_text import as_json, render
    from memtriage.report.console import console_for

    if json:
        sys.stdout.buffer.write(as_json(answers, failed))
    else:
        render(answers, console_for(sys.stdout), rows)
    return 0


def _refused(text: str) -> int:
    complain("memtriage census", text)
    return 2
