"""The line `%%memtriage …` in front of a cell: where it is one, and what is left of it for IPython."""

from __future__ import annotations

import pytest

from memtriage.integrations.notebook.header import TakeHeader, chosen_in, find_header
from memtriage.integrations.notebook.options import cell_parser

PARSER = cell_parser()


@pytest.mark.parametrize(
    ("cell", "header"),
    [
        ("%%memtriage\nx = 1", (0, "")),
        ("%%memtriage", (0, "")),
        ("%%memtriage  \t\r\nx = 1", (0, "")),
        ("%%memtriage --quiet --top 3  \nx = 1", (0, "--quiet --top 3")),
        ("%%memtriage\t-q\r\nx = 1", (0, "-q")),
        ("\n  \n%%memtriage -q\nx = 1", (2, "-q")),
        ("%%memtriages\nx = 1", None),
        ("%%memtriage-q\nx = 1", None),
        ("  %%memtriage\nx = 1", None),
        ("%memtriage\nx = 1", None),
        ("x = 1\n%%memtriage", None),
        ("\n \n", None),
        ("", None),
    ],
)
def test_only_the_first_line_with_text_is_the_header(cell: str, header: tuple[int, str] | None) -> None:
    assert find_header(cell.splitlines(keepends=True)) == header


@pytest.mark.parametrize("line", ["%%memtriage --bogus", "%%memtriage 'open", "%%memtriage -h", "x = 1"])
def test_what_runs_nothing_is_left_to_the_magic_itself(line: str) -> None:
    lines = [f"{line}\n", "x = 1\n"]
    assert chosen_in(lines, PARSER) is None
    assert TakeHeader(PARSER, lambda: False)(lines) is lines


@pytest.mark.parametrize(
    ("cell", "left"),
    [
        ("%%memtriage -q\nx = 1\nx\n", "# %%memtriage -q\nx = 1\nx\n"),
        ("\n\n%%memtriage\nx = 1\n", "\n\n# %%memtriage\nx = 1\n"),
        ("%%memtriage", "# %%memtriage"),
        ("%%memtriage\n%%time\nx = 1\n", "%%time\nx = 1\n"),
        ("\n%%memtriage -q\n%%time\n", "\n%%time\n"),
        ("%%memtriage\n%time 1\n", "# %%memtriage\n%time 1\n"),
    ],
)
def test_the_line_becomes_a_comment_but_above_another_magic(cell: str, left: str) -> None:
    take = TakeHeader(PARSER, lambda: False)
    assert "".join(take(cell.splitlines(keepends=True))) == left
    assert take.has_side_effects


def test_inside_a_running_cell_it_is_a_magic_as_any_other() -> None:
    lines = ["%%memtriage -q\n", "x = 1\n"]
    assert TakeHeader(PARSER, lambda: True)(lines) is lines
