"""The page of an explanation on any width and stream, and that it says no more than the explanation."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from memtriage.messages.explain import explain
from memtriage.model.explanation import Explanation, LogEvent
from memtriage.playbook.entries import PLAYBOOK
from memtriage.report.explanation import render, render_entry, write_json

TEXTS = [
    json.loads(line)["text"]
    for line in (Path(__file__).parents[1] / "data" / "oom_messages.jsonl").read_text().splitlines()
]


def page(explanation: Explanation, width: int = 100, encoding: str = "utf-8", *, colors: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream, width=width, force_terminal=colors, highlight=False, markup=False, emoji=False
    )
    render(explanation, console)
    stream.flush()
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("width", [40, 72, 200])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    for text in TEXTS:
        shown = page(explain(text), width).splitlines()
        # A command is kept whole, so that it can be copied.
        assert all(len(line) <= width for line in shown if not line.startswith("  $ "))


def test_the_first_failure_is_quoted_below_the_diagnosis() -> None:
    log = "start\n[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    lines = page(explain(log), width=200).splitlines()
    quoted = next(line for line in lines if "Tried to allocate 2.00 GiB" in line)
    assert quoted.startswith("  ") and quoted[2] != " "
    where = lines[lines.index(quoted) + 1]
    assert where.startswith("  ") and where[2] != " " and where.endswith("line 2")
    alone = page(explain("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"), width=200)
    assert "line 1" not in alone


def test_a_stream_of_ascii() -> None:
    assert page(explain("[rank1]: naïve — CUDA out of memory."), encoding="ascii").isascii()


def test_colors_only_on_a_terminal() -> None:
    diagnosis = explain(TEXTS[0])
    assert "\x1b[" not in page(diagnosis)
    assert "\x1b[" in page(diagnosis, colors=True)


def test_control_characters_of_a_log_do_not_reach_the_terminal() -> None:
    diagnosis = explain("\x1b]0;title\x07\x1b[2JCUDA out of memory. Tried to allocate 2.00 GiB.\x9b31m")
    assert not {"\x1b", "\x07", "\x9b"} & set(page(diagnosis))


def test_a_long_list_of_events_is_shown_around_the_first_failure() -> None:
    events = [
        LogEvent(family="k8s", diagnosis="host_memory_limit", role="followed", line=line, text="x")
        for line in range(30)
    ]
    events[20].role = "cause"
    shown = page(Explanation(diagnosis="host_memory_limit", confidence=0.95, events=events))
    assert "-> 20" in shown
    assert "22 more in --json" in shown


@pytest.mark.parametrize("name", PLAYBOOK)
def test_an_entry_has_all_that_the_playbook_says(name: str) -> None:
    stream = io.StringIO()
    render_entry(PLAYBOOK[name], Console(file=stream, width=100, highlight=False, markup=False, emoji=False))
    shown = " ".join(stream.getvalue().split())
    assert PLAYBOOK[name].says in shown
    for rung in (*PLAYBOOK[name].rungs, *PLAYBOOK[name].actions):
        assert rung.saves in shown and rung.no_help in shown


def test_json_is_one_line() -> None:
    stream = io.BytesIO()
    write_json(explain(TEXTS[0]), stream)
    assert stream.getvalue().count(b"\n") == 1
    assert json.loads(stream.getvalue())["diagnosis"] == "fragmentation"
