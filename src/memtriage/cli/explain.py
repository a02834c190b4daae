"""`memtriage explain`: explain an error text or a log, or show an entry of the playbook."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import to_builtins

from memtriage.cli.output import Refusal, answer

if TYPE_CHECKING:
    from memtriage.messages.log_file import LogReading
    from memtriage.playbook.entries import PlaybookEntry

_ENTRY: Final = re.compile(r"[Mm]\d{1,3}")
_SIZE: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\d{1,2})?)([mMbB]?)")
_SUFFIXES: Final = {"": 1, "m": 10**6, "b": 10**9}


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
    from memtriage.report import explanation as page

    sizes = parse_shapes(shapes)
    if what is not None and _ENTRY.fullmatch(what) is not None and not Path(what).exists():
        entry = _entry(what.upper())
        form = {"schema": 1, **to_builtins(entry)}
        return answer(form, json, lambda console: page.render_entry(entry, console))
    reading = _read(what)
    from memtriage.messages.explain import explain_reading

    explanation = explain_reading(reading, sizes)
    return answer(explanation, json, lambda console: page.render(explanation, console, full=full))


def parse_shapes(text: str) -> dict[str, int]:
    """Sizes by name, from `batch=8,seq=2048`. Numbers may be written 7e9, 7b, 350m, 151_936.

    Raises:
        Refusal: naming the part that is no such pair.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        number = _SIZE.fullmatch(value.strip())
        if not name.strip() or number is None:
            raise Refusal(f"invalid --shapes {part!r}: use NAME=SIZE, such as batch=8")
        sizes[name.strip().lower()] = round(float(number[1].replace("_", "")) * _SUFFIXES[number[2].lower()])
    return sizes


def _read(what: str | None) -> LogReading:
    from memtriage.messages.log_file import read_log, read_text

    if what is None or what == "-":
        if sys.stdin is None or (what is None and sys.stdin.isatty()):
            raise Refusal("no input: name a file or pipe a text (`-` reads what you type)")
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
        raise Refusal(f"no entry {name} in the playbook: it has M1 to M{len(PLAYBOOK)}")
    return PLAYBOOK[name]
