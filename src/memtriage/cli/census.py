"""`memtriage census`: show what keeps memory alive in a running job."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from memtriage.cli.output import Refusal, answer
from memtriage.process.messages import complain

if TYPE_CHECKING:
    from memtriage.model.asked import Answer

INCOMPLETE_STATUS: Final = 4
_LONGEST_PAUSE_S: Final = 60


def census(
    pid: Annotated[
        int,
        typer.Option(
            "--pid",
            metavar="N",
            help="A training process, or a launcher whose ranks listen.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print every holder, as JSON.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up after SECONDS.")
    ] = 60.0,
    pause: Annotated[
        str, typer.Option("--pause", metavar="[=TIME]", help="Stop the process for up to TIME (50ms).")
    ] = "",
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Show N holders per device.")] = 20,
) -> int:
    """Show what keeps memory alive in a running job."""
    written = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", pause)
    pause_s = float(written[1]) / (1000 if written[2] == "ms" else 1) if written else 0.0
    if pause and not 0 < pause_s <= _LONGEST_PAUSE_S:
        raise Refusal(f"invalid --pause={pause}: use 50ms, or another time up to {_LONGEST_PAUSE_S} s")
    from memtriage.session.remote.ask import AskError, ask, ask_all, listening

    if not timeout > 0:
        raise Refusal(f"invalid --timeout {timeout}: expected more than 0 seconds")
    if rows < 1:
        raise Refusal(f"invalid --rows {rows}: expected at least 1")
    try:
        pids = listening(pid)
    except AskError as error:
        raise Refusal(error) from None
    if pids:
        answers, failed = ask_all(pids, timeout, ask)
    else:
        from memtriage.outside.memory import OtherBuildError

        try:
            answers, failed = ask_all([pid], timeout, partial(_read, pause_s=pause_s))
        except OtherBuildError as error:
            from memtriage.outside.elsewhere import run_there

            given = (("--json", json), (f"--pause={pause}", pause))
            flags = [name for name, value in given if value]
            options = ["--timeout", str(timeout), "--rows", str(rows), *flags]
            arguments = ["census", "--pid", str(pid), *options]
            status = None if error.python is None else run_there(error.python, pid, arguments)
            if status is None:
                raise Refusal(error) from None
            return status
    for unanswered in failed:
        complain("memtriage census", unanswered.why)
    if not answers:
        return 2
    from memtriage.report.census_text import as_json, render

    answer(as_json(answers, failed), json, lambda console: render(answers, console, rows))
    return INCOMPLETE_STATUS if any(answer.incomplete for answer in answers) else 0


def _read(pid: int, timeout_s: float, *, pause_s: float) -> Answer:
    """Read a process that does not listen from outside, in the form of `ask_one`."""
    from memtriage.outside.answer import read_answer
    from memtriage.outside.memory import OtherBuildError, OutsideError
    from memtriage.session.remote.ask import AskError

    try:
        return read_answer(pid, timeout_s, pause_s=pause_s)
    except OtherBuildError:
        raise
    except OutsideError as error:
        raise AskError(str(error)) from None
