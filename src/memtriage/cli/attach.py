"""`memtriage attach`: the verdict on a job that runs already, from outside."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memtriage.cli.output import Refusal
from memtriage.model.units import parse_duration
from memtriage.process.messages import complain


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="A training process, or its launcher.")],
    for_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Watch for a time, such as 60s or 5m.")
    ] = "60s",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Watch all ranks of the job on this node.")
    ] = False,
) -> int:
    """Judge a running job from outside, without changing it."""
    try:
        seconds = parse_duration(for_, "--for")
    except ValueError as error:
        raise Refusal(error) from None
    import psutil

    from memtriage.outside.answer import why_refused
    from memtriage.outside.elsewhere import run_there
    from memtriage.outside.memory import OtherBuildError, OutsideError
    from memtriage.session.attach import attach as watch_from_outside
    from memtriage.session.job_ranks import ranks_of

    existed = psutil.pid_exists(pid)
    pids = ranks_of(pid) if all_ranks else [pid]
    try:
        report, context = watch_from_outside(pids, seconds, lambda line: complain("memtriage attach", line))
    except OtherBuildError as error:
        flags = [name for name, given in (("--json", json), ("--all-ranks", all_ranks)) if given]
        again = ["attach", str(pid), "--for", for_, *flags]
        status = None if error.python is None else run_there(error.python, pid, again)
        if status is None:
            raise Refusal(error) from None
        return status
    except OutsideError as error:
        why = why_refused(error, pid, "attach") if existed else f"there is no process {pid}"
        raise Refusal(why) from None
    if json:
        from memtriage.report.run.json_file import write_stream

        write_stream(report, sys.stdout.buffer)
        return 0
    from memtriage.report.run.terminal import console_for, render

    render(report, console_for(sys.stdout), context)
    return 0
