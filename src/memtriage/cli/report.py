"""`memtriage report`: show the report of a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memtriage.cli.output import Refusal
from memtriage.process.collector import collector_paused


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Directory that `memtriage run -o` wrote; the newest run in it is shown. Name the "
            "directories of all nodes to merge them.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Also write a self-contained HTML page.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out paths, host names and arguments.")
    ] = False,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Do not judge again: show what was found in that run.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Write one redacted file to attach to an issue."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all findings, evidence and ledgers.")] = False,
) -> int:
    """Show the report of a finished, killed or running job."""
    with collector_paused():  # of a million marks, which form no cycles, to the end of the process
        return _report(directories, json, html, redact, as_recorded, bundle, full)


def _report(
    directories: list[Path],
    json: bool,
    html: Path | None,
    redact: bool,
    as_recorded: bool,
    bundle: Path | None,
    full: bool,
) -> int:
    from memtriage.diagnose.ranks.merge import context, merge
    from memtriage.report.growth_words import judged_again
    from memtriage.store.locate import RecordError
    from memtriage.store.reader import read_run

    try:
        run = read_run(directories, ahead=True)
    except RecordError as error:
        raise Refusal(error) from None
    if redact or bundle is not None:
        from memtriage.report.redact import redacted

        run = redacted(run)
    if bundle is not None:
        from memtriage.store.bundle import write_bundle

        write_bundle(run, bundle)
        print(f"wrote {bundle}; show it with: memtriage report {bundle}", file=sys.stderr)
    if not as_recorded:
        run.ranks = [judged_again(rank) for rank in run.ranks]
    merged = merge(run)
    known = context(run, merged)
    if html is not None:
        from memtriage.report.run import page

        html.write_text(page.html(run, merged, known), encoding="utf-8")
        print(f"wrote {html}", file=sys.stderr)
    if json:
        from memtriage.report.run.json_file import write_stream

        write_stream(merged, sys.stdout.buffer)
    else:
        from memtriage.report.run.terminal import console_for, render

        render(merged, console_for(sys.stdout), known, record=None if full else directories[0])
    return 0
