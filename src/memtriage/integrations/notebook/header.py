"""The line `%%memtriage …` at the start of a cell, which is removed before IPython reads the cell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Final

from IPython.core.error import UsageError

from memtriage.integrations.notebook.options import parse

_LINE: Final = re.compile(r"%%memtriage(?:[ \t]+(?P<options>.*?))?[ \t]*\r?\n?")


def find_header(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return where the line is, and its options; None where the first line with text is another."""
    for at, line in enumerate(lines):
        if line.strip():
            match = _LINE.fullmatch(line)
            return None if match is None else (at, match["options"] or "")
    return None


def chosen_in(lines: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """Return the options in the first line; None where there is no such line, or nothing to run under it."""
    header = find_header(lines)
    if header is None:
        return None
    try:
        chosen: argparse.Namespace = parse(parser, header[1])
    except UsageError:
        return None  # the magic itself says so, and runs nothing
    return None if chosen.help else chosen


class TakeHeader:
    """An input transformer of IPython: the line becomes a comment, so that lines keep their numbers.

    Not inside of a running cell: there the line is a magic below another one (`%%time`).

    Args:
        parser: of the options.
        inside: whether a cell is running.
    """

    has_side_effects: Final = True
    """Keeps a terminal from asking it whether the typed cell is complete: as a magic it goes on to an empty
    line."""

    def __init__(self, parser: argparse.ArgumentParser, inside: Callable[[], bool]) -> None:
        self._parser = parser
        self._inside = inside

    def __call__(self, lines: list[str]) -> list[str]:
        if self._inside() or chosen_in(lines, self._parser) is None:
            return lines
        header = find_header(lines)
        assert header is not None
        at = header[0]
        rest = lines[at + 1 :]
        if rest and rest[0].startswith("%%"):  # another magic, which must come first
            return lines[:at] + rest
        return [*lines[:at], f"# {lines[at]}", *rest]
