"""The forms that reports are made of."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from rich.text import Text

from memtriage.report.console import Page, console_for, widths
from support.printed import printed


def shown(draw: Callable[[Page], object], width: int = 80, encoding: str = "utf-8") -> str:
    return printed(lambda draw, console: draw(Page(console)), draw, width=width, encoding=encoding)


def test_later_lines_hang_below_the_text_by_default() -> None:
    def hanging(hang: int | None) -> str:
        return shown(lambda page: page.hanging("key: ", "some words that wrap", hang=hang), 20)

    assert hanging(None) == "key: some words that\n     wrap\n"
    assert hanging(2) == "key: some words that\n  wrap\n"


def test_a_raw_line_is_not_wrapped() -> None:
    text = shown(lambda page: page.raw("some words that are longer than that  "), 20)
    assert text == "some words that are longer than that\n"


def test_values_of_a_field_stand_beside_its_label_or_below_it_where_there_is_no_room() -> None:
    def lines(width: int, *values: str) -> list[str]:
        return shown(lambda page: page.field("label", *values, labels=10), width).splitlines()

    assert lines(80, "one", "two") == ["  label   one", "          two"]
    assert lines(20, "one", "two") == ["  label   one", "          two"]
    assert lines(20, "one", "some words") == ["  label   one", "          some words"]
    assert lines(20, "one", "- some words") == ["  label", "    one", "    - some words"]


def figures(page: Page) -> None:
    page.named("stranded", "577.1 MiB", words="free, but pinned by live blocks")
    page.named("parameter", "1.0 GiB", "12.5%")
    page.sized(["1.0 GiB", "12.5 MiB"], "train.py:3 in step")


def test_figures_are_in_columns_beside_words_or_on_lines_of_their_own() -> None:
    assert shown(figures).splitlines() == [
        "  stranded               577.1 MiB  free, but pinned by live blocks",
        "  parameter                1.0 GiB   12.5%",
        "       1.0 GiB    12.5 MiB  train.py:3 in step",
    ]
    assert shown(figures, 40).splitlines() == [
        "  stranded               577.1 MiB",
        "      free, but pinned by live blocks",
        "  parameter",
        "                         1.0 GiB   12.5%",
        "       1.0 GiB    12.5 MiB",
        "      train.py:3 in step",
    ]


def test_cells_of_a_table_may_have_several_lines() -> None:
    rows = [[Text(cell) for cell in row] for row in (("name", "size"), ("a long\none", "1"), ("b", "12345"))]
    assert widths(rows) == [6, 5]
    assert shown(lambda page: page.table(rows, [True, False])).splitlines() == [
        "name     size",
        "a long      1",
        "one",
        "b       12345",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "width"), [("", 100), ("80", 80), ("39", 40), ("40", 40), ("many", 100), ("-5", 100)]
)
def test_a_file_is_as_wide_as_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console_for(io.StringIO()).width == width


@pytest.mark.parametrize(
    ("environment", "colors"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colors_in_a_file(environment: dict[str, str], colors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # of another test
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console_for(io.StringIO()).is_terminal == colors
    assert console_for(Terminal()).is_terminal


def told(page: Page) -> None:
    page.line(f"{page.ascii_only}{page.dot}größer \x1b[2J\x9b31m [bold]y[/bold] :smile:")


def test_names_move_no_cursor_make_no_markup_and_are_ascii_where_the_stream_is() -> None:
    assert shown(told, encoding="ascii") == (
        r"True - gr\xf6\xdfer \x1b[2J\x9b31m [bold]y[/bold] :smile:" + "\n"
    )
    assert shown(told) == r"False · größer \x1b[2J\x9b31m [bold]y[/bold] :smile:" + "\n"


def two_headings(page: Page) -> None:
    page.heading("Ledger", "at step 3")
    page.heading("Course")


def test_a_heading_has_a_line_above_and_its_detail_beside_it() -> None:
    assert shown(two_headings) == "\nLedger  at step 3\n\nCourse\n"


def test_a_verdict_begins_with_its_word() -> None:
    text = shown(lambda page: page.verdict("leak", "bold red", "1 MiB per step"))
    assert text == "LEAK: 1 MiB per step\n"


def test_a_whole_value_stays_on_one_line_in_a_file() -> None:
    assert shown(lambda page: page.field("label", "word " * 30, whole=True), 60).count("\n") == 1
