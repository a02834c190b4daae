"""The options of the magics: parsed as a command's are, and shown in their help."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, Final, NoReturn

from IPython.core.error import UsageError

CELL: Final = "%%memtriage"
LINE: Final = "%memtriage"
FREE: Final = "%memtriage_free"

_MOST_HOLDERS: Final = 12


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().strip()}")


def _parser(prog: str, description: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this, and run nothing")
    return parser


def _variable(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows; expected 1 or more")
    return int(text)


def _with_output(parser: _Parser, what: str) -> None:
    parser.add_argument("--json", metavar="VAR", type=_variable, help=f"put {what} into the variable VAR")
    parser.add_argument("--no-html", action="store_true", help="show plain text")


def cell_parser() -> argparse.ArgumentParser:
    """`%%memtriage`."""
    parser = _parser(
        CELL,
        "Watch this cell, and show after its own output what it did to memory: what it left, what grows "
        "and\nwhat keeps it alive, an out-of-memory error with its cause. The cell runs as it would without "
        "this line.",
    )
    _with_output(parser, "the result (a dict: what `memtriage run --json` writes, and `cell`)")
    parser.add_argument("-q", "--quiet", action="store_true", help="show nothing")
    parser.add_argument(
        "--top", metavar="N", type=_count, default=_MOST_HOLDERS, help=f"rows of a list ({_MOST_HOLDERS})"
    )
    parser.add_argument(
        "--keep-traceback",
        action="store_true",
        help="after an out-of-memory error leave its traceback, for %%debug; otherwise its memory is freed",
    )
    parser.add_argument("-o", metavar="DIR", dest="directory", help="keep the record, for `memtriage report`")
    return parser


def line_parser() -> argparse.ArgumentParser:
    """`%memtriage`."""
    parser = _parser(
        LINE, "Show what holds memory now: the ledgers of the devices and of the host, and holders."
    )
    _with_output(parser, "the ledgers and holders (a dict)")
    parser.add_argument(
        "--top", metavar="N", type=_count, default=_MOST_HOLDERS, help=f"holders to list ({_MOST_HOLDERS})"
    )
    return parser


def free_parser() -> argparse.ArgumentParser:
    """`%memtriage_free`."""
    parser = _parser(
        FREE,
        "Release the last error's traceback, which keeps the variables of every function that the error "
        "ended.\n%tb and %debug have nothing to show afterwards.",
    )
    parser.add_argument("--out", action="store_true", help="and empty Out (and _, __, ___)")
    _with_output(parser, "what was freed (a dict)")
    return parser


def parse(parser: argparse.ArgumentParser, line: str) -> Any:
    """Return the options in a line.

    Raises:
        UsageError: the line is wrong.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error}") from None
    return parser.parse_args(words)
