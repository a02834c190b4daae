"""`memtriage diff`: why one run, prediction or snapshot needs more memory than another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from memtriage.cli.output import Refusal, answer


def diff(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B",
            help="Two folders of memtriage run, two files of predict --json or plan --json, or two memory "
            "snapshots. With --env: what memtriage predict takes, after --.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the difference as JSON.")] = False,
    env: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--env", metavar="OLD NEW", help="Predict a program with two Pythons, and compare that."
        ),
    ] = None,
) -> int:
    """Explain why B needs more memory than A."""
    from memtriage.difference.elsewhere import of_python, predicted
    from memtriage.difference.sources import read

    try:
        if env is not None:
            if not sides:
                raise ValueError("nothing to predict: use --env OLD NEW -- SCRIPT.py or FILE.py:FUNCTION")
            places = [of_python(each) for each in env]
            before, after = (predicted(place, command_of(sides), show) for place in places)
        else:
            if sides is None or len(sides) != 2:
                raise ValueError(f"expected two files or folders, not {len(sides or ())}")
            before, after = (read(Path(side)) for side in sides)
        if before.of != after.of:
            raise ValueError(
                f"{before.name} is a {before.of}, {after.name} a {after.of}: expected two of a kind"
            )
    except ValueError as error:
        raise Refusal(error) from None
    return write(before, after, as_json=json)


def command_of(program: list[str]) -> list[str]:
    """The arguments of `memtriage predict`: all of them if they begin with an option of it, else what names a
    program, and that one's own."""
    if program[0].startswith("-") and program[0] != "-m":
        return program
    named = program[:2] if program[0] == "-m" else program[:1]
    own = program[len(named) :]
    return [*named, "--", *own] if own else named


def show(line: str) -> None:
    """Print a line of progress."""
    print(f"memtriage: {line}", file=sys.stderr, flush=True)


def write(before: Any, after: Any, *, as_json: bool) -> int:
    """Print the difference of two sides."""
    from memtriage.difference.table import difference
    from memtriage.report.difference import render

    found = difference(before, after)
    return answer(found, as_json, lambda console: render(found, console))
