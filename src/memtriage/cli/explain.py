"""`memtriage explain`: explain an error text or a log, or show an entry of the playbook."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from memtriage.process.messages import complain

if TYPE_CHECKING:
    from memtriage.messages.log_file import LogReading
    from memtriage.playbook.entries import PlaybookEntry

_ENTRY: Final = re.compile(r"[Mm]\d{1,3}")
_SIZE: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\d{1,2})?)([mMbB]?)")
_SUFFIXES: Final = {"": 1, "m": 10**6, "b": 10**9}


class _InputError(Exception):
    """The input cannot be read; the text says why."""


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|-|M1...M21]",
            help="A log or an error text; `-` or nothing reads standard input. M1 to M21: an entry of the "
            "playbook.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print every fact, action and event.")] = False,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Sizes that explain the failed request: batch=8,seq=2048,vocab=151936. Add "
            "params=7e9,ranks=8 for the savings of sharding.",
        ),
    ] = "",
) -> int:
    """Explain an out-of-memory error or a log."""
    try:
        sizes = parse_shapes(shapes)
        named = what is not None and _ENTRY.fullmatch(what) is not None and not Path(what).exists()
        entry = _entry(what.upper()) if named and what is not None else None
        reading = _read(what) if entry is None else None
    except (_InputError, OSError) as error:
        reason = f"{what}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        complain("memtriage explain", reason)
        return 2
    from memtriage.report import explanation as page
    from memtriage.report.console import console_for

    if entry is not None:
        if json:
            page.write_entry_json(entry, sys.stdout.buffer)
        else:
            page.render_entry(entry, console_for(sys.stdout))
        return 0
    assert reading is not None
    from memtriage.messages.explain import explain_reading

    explanation = explain_reading(reading, sizes)
    if json:
        page.write_json(explanation, sys.stdout.buffer)
    else:
        page.render(explanation, console_for(sys.stdout), full=full)
    return 0


def parse_shapes(text: str) -> dict[str, int]:
    """Sizes by name, from `batch=8,seq=2048`. Numbers may be written 7e9, 7b, 350m, 151_936.

    Raises:
        _InputError: naming the part that is no such pair.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        number = _SIZE.fullmatch(value.strip())
        if not name.strip() or number is None:
            raise _InputError(f"invalid --shapes {part!r}: use NAME=SIZE, such as batch=8")
        sizes[name.strip().lower()] = round(float(number[1].replace("_", "")) * _SUFFIXES[number[2].lower()])
    return sizes


def _read(what: str | None) -> LogReading:
    from memtriage.messages.log_file import read_log, read_text

    if what is None or what == "-":
        if sys.stdin is None or (what is None and sys.stdin.isatty()):
            raise _InputError("no input: name a file or pipe a text (`-` reads what you type)")
        return read_log(sys.stdin.buffer)
    path = Path(what)
    try:
        stream = path.open("rb")
    except (OSError, ValueError):
        # Likelier the message itself than the name of a file.
        if any(space in what.strip() for space in " \n"):
            return read_text(what)
        raise
    with stream:
        return read_log(stream)


def _entry(name: str) -> PlaybookEntry:
    from memtriage.playbook.entries import PLAYBOOK

    if name not in PLAYBOOK:
        raise _InputError(f"no entry {name} in the playbook: it has M1 to M{len(PLAYBOOK)}")
    return PLAYBOOK[name]
