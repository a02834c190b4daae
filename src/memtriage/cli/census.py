"""`memtriage census`: asks a running job where its memory is, without stopping it."""

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
            help="The process: one started with `memtriage run --listen`, a launcher whose ranks were, or on "
            "Python 3.14 any training process of yours.",
        ),
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print the answers as JSON, with every holder.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds until all must have answered.")
    ] = 60.0,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Holders to print of each device.")] = 20,
) -> int:
    """Ask a running job for a census: its ledger, and who holds what."""
    from memtriage.session.remote.ask import AskError, ask, ask_all, listening
    from memtriage.session.remote.inject import inject, unable

    if not timeout > 0:
        return _refused(f"--timeout {timeout} is no time; expected more than 0 seconds")
    if rows < 1:
        return _refused(f"--rows {rows} is too few; expected at least 1")
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
