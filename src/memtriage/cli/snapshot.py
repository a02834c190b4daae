"""`memtriage snapshot`: find leaks, fragmentation and errors in a PyTorch memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtriage.cli.output import Refusal, answer


def snapshot(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="File of torch.cuda.memory._dump_snapshot(), also as .gz, .xz or .zst.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Also write a self-contained HTML page.")
    ] = None,
) -> int:
    """Find leaks and fragmentation in a memory snapshot."""
    from memtriage.model.recording import SnapshotError
    from memtriage.snapshots.read import load_snapshot

    try:
        recording = load_snapshot(file)
    except SnapshotError as error:
        raise Refusal(error) from None
    if html is not None:
        from memtriage.report.snapshot import page

        html.write_text(page.html(recording), encoding="utf-8")
    from memtriage.report.snapshot.json_form import as_json
    from memtriage.report.snapshot.terminal import render

    return answer(as_json(recording), json, lambda console: render(recording, console))
