"""The forms that reports are made of."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from memtriage.report.console import Page, console_for


def printed(hang: int | None) -> list[str]:
    out = io.StringIO()
    Page(Console(file=out, width=20)).hanging("key: ", "some words that wrap", hang=hang)
    return out.getvalue().splitlines()


def test_later_lines_hang_below_the_text_by_default() -> None:
    assert printed(None) == ["key: some words that", "     wrap"]
    assert printed(2) == ["key: some words that", "  wrap"]


def test_a_raw_line_is_not_wrapped() -> None:
    out = io.StringIO()
    Page(Console(file=out, width=20)).raw("some words that are longer than that  ")
    assert out.getvalue() == "some words that are longer than that\n"


def test_values_of_a_field_stand_beside_its_label_or_below_it_where_there_is_no_room() -> None:
    def lines(width: int, *values: str) -> list[str]:
        out = io.StringIO()
        Page(Console(file=out, width=width)).field("label", *values, labels=10)
        return [line.rstrip() for line in out.getvalue().splitlines()]

    assert lines(80, "one", "two") == ["  label   one", "          two"]
    assert lines(20, "one", "two") == ["  label   one", "          two"]
    assert lines(20, "one", "some words") == ["  label   one", "          some words"]
    assert lines(20, "one", "- some words") == ["  label", "    one", "    - some words"]


def figures(width: int) -> list[str]:
    out = io.StringIO()
    page = Page(Console(file=out, width=width))
    page.named("stranded", "577.1 MiB", words="free, but pinned by live blocks")
    page.named("parameter", "1.0 GiB", "12.5%")
    page.sized(["1.0 GiB", "12.5 MiB"], "train.py:3 in step")
    return out.getvalue().splitlines()


def test_figures_are_in_columns_beside_words_or_on_lines_of_their_own() -> None:
    assert figures(80) == [
        "  stranded               577.1 MiB  free, but pinned by live blocks",
        "  parameter                1.0 GiB   12.5%",
        "       1.0 GiB    12.5 MiB  train.py:3 in step",
    ]
    assert figures(40) == [
        "  stranded               577.1 MiB",
        "      free, but pinned by live blocks",
        "  parameter",
        "                         1.0 GiB   12.5%",
        "       1.0 GiB    12.5 MiB",
        "      train.py:3 in step",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def page(width: int, encoding: str = "utf-8") -> tuple[Page, io.TextIOWrapper]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Page(Console(file=out, width=width, force_terminal=False)), out


def text_of(out: io.TextIOWrapper) -> str:
    out.flush()
    return out.buffer.getvalue().decode(out.encoding)  # type: ignore[attr-defined]


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


def test_a_stream_of_ascii_gets_ascii() -> None:
    shown, out = page(80, "ascii")
    assert (shown.ascii_only, shown.dot) == (True, " - ")
    shown.line(("größer", ""))
    assert text_of(out) == "gr\\xf6\\xdfer\n"
    shown, out = page(80)
    assert (shown.ascii_only, shown.dot) == (False, " · ")
    shown.line(("größer", ""))
    assert text_of(out) == "größer\n"


def test_a_heading_has_a_line_above_and_its_detail_beside_it() -> None:
    shown, out = page(80)
    shown.heading("Ledger", "at step 3")
    shown.heading("Course")
    assert text_of(out) == "\nLedger  at step 3\n\nCourse\n"


def test_a_verdict_begins_with_its_word() -> None:
    shown, out = page(80)
    shown.verdict("leak", "bold red", "1 MiB per step")
    assert text_of(out) == "LEAK: 1 MiB per step\n"


def test_a_whole_value_stays_on_one_line_in_a_file() -> None:
    shown, out = page(60)
    shown.field("label", "word " * 30, whole=True)
    assert len(text_of(out).splitlines()) == 1
