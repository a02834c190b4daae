"""The forms that reports are made of."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from memtriage.report.console import Page


def printed(hang: int | None) -> list[str]:
    out = io.StringIO()
    Page(Console(file=out, width=20)).hanging(Text("key: "), Text("some words that wrap"), hang=hang)
    return out.getvalue().splitlines()


def test_later_lines_hang_below_the_text_by_default() -> None:
    assert printed(None) == ["key: some words that", "     wrap"]
    assert printed(2) == ["key: some words that", "  wrap"]


def test_a_raw_line_is_not_wrapped() -> None:
    out = io.StringIO()
    Page(Console(file=out, width=20)).raw(Text("some words that are longer than that"))
    assert out.getvalue() == "some words that are longer than that\n"


def test_values_of_a_field_stand_beside_its_label_or_below_it_where_there_is_no_room() -> None:
    def lines(width: int) -> list[str]:
        out = io.StringIO()
        Page(Console(file=out, width=width)).field("label", "one", "two", labels=10)
        return [line.rstrip() for line in out.getvalue().splitlines()]

    assert lines(80) == ["  label   one", "          two"]
    assert lines(20) == ["  label", "    one", "    two"]
