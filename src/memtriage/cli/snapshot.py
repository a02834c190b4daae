"""`memtriage snapshot`: find leaks, fragmentation and errors in a PyTorch memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtriage.cli.diff import write
from memtriage.cli.output import Refusal, answer

if TYPE_CHECKING:
    from memtriage.model.recording import Recording


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
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="OUT", help="Also write a trace for ui.perfetto.dev.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OTHER", help="Show what changed: memtriage diff FILE OTHER."),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Replay FILE with other allocator settings.")
    ] = False,
) -> int:
    """Find leaks and fragmentation in a memory snapshot."""
    from memtriage.model.recording import SnapshotError
    from memtriage.snapshots.read import load_snapshot

    if compare is not None and what_if:
        raise Refusal("use only one of --compare and --what-if")
    try:
        recording = load_snapshot(file)
        other = None if compare is None else load_snapshot(compare)
    except SnapshotError as error:
        raise Refusal(error) from None
    _write_files(recording, html, perfetto)
    if what_if:
        return _what_if(recording, json)
    if other is not None:
        from memtriage.difference.sources import of_snapshot

        return write(of_snapshot(recording), of_snapshot(other), as_json=json)
    from memtriage.report.snapshot.json_form import as_json
    from memtriage.report.snapshot.terminal import render

    return answer(as_json(recording), json, lambda console: render(recording, console))


def _write_files(recording: Recording, html: Path | None, perfetto: Path | None) -> None:
    if html is not None:
        from memtriage.report.html.shell import write_page
        from memtriage.report.snapshot import page

        write_page(page.html(recording), html)
    if perfetto is not None:
        from memtriage.report.snapshot.perfetto import write_trace

        write_trace(recording, perfetto)


def _what_if(recording: Recording, json: bool) -> int:
    from memtriage.allocator.what_if import scenarios
    from memtriage.report.snapshot.what_if import as_json, render

    outcomes = [(device.device, scenarios(device, recording.settings)) for device in recording.devices]
    return answer(as_json(outcomes), json, lambda console: render(outcomes, console))
