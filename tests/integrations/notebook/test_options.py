"""The options of the magics: what they mean, what is refused, and the help that tells of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

pytest.importorskip("IPython")

from IPython.core.error import UsageError

from memtriage.integrations.notebook.options import (
    cell_parser,
    free_parser,
    line_parser,
    parse,
)

CELL_USAGE = "usage: %%memtriage [-h] [--json VAR] [--no-html] [-q] [--top N] [--keep-traceback] [-o DIR]"
CELL_DEFAULTS = {
    "help": False, "json": None, "no_html": False, "quiet": False, "top": 12,
    "keep_traceback": False, "directory": None,
}  # fmt: skip
LINE_DEFAULTS = {"help": False, "json": None, "no_html": False, "top": 12}
FREE_DEFAULTS = {"help": False, "json": None, "no_html": False, "out": False}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("parser", "line", "options"),
    [
        (cell_parser, "", CELL_DEFAULTS),
        (
            cell_parser,
            "--json told --no-html -q --top 3 --keep-traceback -o 'my runs'",
            {
                "help": False, "json": "told", "no_html": True, "quiet": True, "top": 3,
                "keep_traceback": True, "directory": "my runs",
            },
        ),
        (cell_parser, "--quiet -h", {**CELL_DEFAULTS, "quiet": True, "help": True}),
        (line_parser, "", LINE_DEFAULTS),
        (line_parser, "--top 1 --json _x", {**LINE_DEFAULTS, "top": 1, "json": "_x"}),
        (line_parser, "--no-html --help", {**LINE_DEFAULTS, "no_html": True, "help": True}),
        (free_parser, "", FREE_DEFAULTS),
        (free_parser, "--out --json freed", {**FREE_DEFAULTS, "out": True, "json": "freed"}),
    ],
)  # fmt: skip
def test_a_line_is_read_as_a_command_s_options(
    parser: Callable[[], argparse.ArgumentParser], line: str, options: dict[str, object]
) -> None:
    assert vars(parse(parser(), line)) == options


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--top 0", "argument --top: '0' is not a number of rows; expected 1 or more"),
        ("--top ²", "argument --top: '²' is not a number of rows; expected 1 or more"),
        ("--top", "argument --top: expected one argument"),
        ("--json 1x", "argument --json: '1x' is not a variable name"),
        ("--keep", "unrecognized arguments: --keep"),
        ("x", "unrecognized arguments: x"),
    ],
)
def test_a_wrong_line_is_refused_with_its_usage(line: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(cell_parser(), line)
    assert str(raised.value) == f"%%memtriage: {problem}\n{CELL_USAGE}"


def test_an_open_quotation_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^%memtriage: No closing quotation$"):
        parse(line_parser(), "--json 'x")
