"""`memtriage gate`: the predicted peak of a program, against what it was at another commit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from memtriage.cli.diff import command_of, show
from memtriage.cli.output import Refusal, answer
from memtriage.model.units import parse_size, signed, size

if TYPE_CHECKING:
    from rich.console import Console

    from memtriage.model.difference import Side

ABOVE: Final = 3
"""The exit status if the peak is above its limit."""


def gate(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...", help="What memtriage predict takes: SCRIPT.py ARGS..., or FILE.py:FUNCTION."
        ),
    ],
    base: Annotated[str, typer.Option("--base", metavar="REF", help="The commit to compare with.")],
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="Device memory that it may need in all: 24GiB."),
    ] = None,
    tolerance: Annotated[
        str, typer.Option(metavar="SHARE", help="How far the peak may be above that of the base.")
    ] = "1%",
    gpu: Annotated[str, typer.Option(metavar="KIND", help="GPU to predict for.")] = "h200",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Longest time of a prediction.")] = "30m",
    json: Annotated[bool, typer.Option("--json", help="Print the difference as JSON.")] = False,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Also write a comment for the pull request."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.")
    ] = None,
) -> int:
    """Compare the predicted peak with another commit's."""
    import msgspec

    from memtriage.difference.elsewhere import Environment, at_commit, predicted
    from memtriage.difference.table import difference
    from memtriage.model.difference import GateResult
    from memtriage.report import difference as report

    name = " ".join(program)
    try:
        share = _share(tolerance)
        most = None if budget is None else parse_size(budget, "--budget")
        arguments = ["--gpu", gpu, "--timeout", timeout, *command_of(program)]
        show(f"predicting {name} at {base}")
        with at_commit(base) as place:
            before = predicted(place, arguments, show)
        show(f"predicting {name} as it is now")
        after = predicted(Environment(name, Path.cwd()), arguments, show)
    except ValueError as error:
        raise Refusal(error) from None
    found = difference(before, after)
    what, peak, limit = max(_checks(before, after, share, most), key=lambda check: check[1] / check[2])
    above = peak > limit
    verdict = f"{'ABOVE' if above else 'WITHIN'} the limit: {size(peak)} {what}, at most {size(limit)}"
    if above:
        verdict += f" ({signed(peak - limit)})"
    if markdown is not None:
        markdown.write_text(report.markdown(found, verdict), encoding="utf-8")
    if junit is not None:
        junit.write_text(report.junit(found, name, verdict if above else None), encoding="utf-8")

    def render(console: Console) -> None:
        console.print(verdict, style="bold", soft_wrap=True)
        report.render(found, console)

    result = GateResult(**msgspec.structs.asdict(found), limit=limit, peak=peak, exceeded=above)
    answer(result, json, render)
    return ABOVE if above else 0


def _share(given: str) -> float:
    """A share such as `1%` or `0.01`.

    Raises:
        ValueError: it is none.
    """
    try:
        share = float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ValueError(f"invalid --tolerance {given!r}: expected a share such as 1% or 0.01")
    return share


def _checks(before: Side, after: Side, share: float, budget: int | None) -> Iterable[tuple[str, int, int]]:
    """What is checked, in words; how much it is; and how much it may be."""
    yield "allocated", after.total, max(1, int(before.total * (1 + share)))
    if budget is not None:
        needed = after.figures["reserved"] + after.figures["outside the allocator"]
        yield "of device memory", needed, budget
