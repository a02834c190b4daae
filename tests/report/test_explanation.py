"""The page of an explanation on any width and stream, and that it says no more than the explanation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtriage.messages.explain import explain
from memtriage.model.explanation import Explanation, Fix, LogEvent, Settle
from memtriage.playbook.entries import PLAYBOOK
from memtriage.report.explanation import render, render_entry
from support.printed import printed

TEXTS = [
    json.loads(line)["text"]
    for line in (Path(__file__).parents[1] / "data" / "oom_messages.jsonl").read_text().splitlines()
]


def page(
    explanation: Explanation,
    width: int = 100,
    encoding: str = "utf-8",
    *,
    colors: bool = False,
    full: bool = True,
) -> str:
    return printed(render, explanation, width=width, encoding=encoding, colors=colors, full=full)


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


def test_evidence_and_advice_that_will_not_help_are_bullets_with_a_hanging_indent() -> None:
    lines = page(
        Explanation(diagnosis="unknown", confidence=0.5, evidence=["word " * 20], stale_advice="word " * 20),
        60,
    ).splitlines()
    words = [line.partition("word")[0] for line in lines if "word" in line]
    assert words == ["  - ", "    "] * 2


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
    shown = " ".join(printed(render_entry, PLAYBOOK[name]).split())
    assert PLAYBOOK[name].says in shown
    for rung in (*PLAYBOOK[name].rungs, *PLAYBOOK[name].actions):
        assert rung.saves in shown and rung.no_help in shown


@pytest.mark.parametrize(
    ("confidence", "words"),
    [
        (0.95, "proven by the text"), (0.9, "proven by the text"), (0.89, "likely"), (0.6, "likely"),
        (0.59, "one of several"),
    ],
)  # fmt: skip
def test_confidence_in_words(confidence: float, words: str) -> None:
    shown = page(Explanation(diagnosis="does_not_fit", confidence=confidence))
    assert shown.splitlines()[1] == f"confidence {confidence:.2f} · {words}"


def test_what_is_unknown_says_what_is_missing() -> None:
    open_question = Settle(fact="who has the rest", command="nvidia-smi")
    shown = page(Explanation(diagnosis="unknown", confidence=0.3, settle=open_question))
    assert shown.splitlines()[1] == "what is missing is below" and "  $ nvidia-smi" in shown
    assert "confidence" not in shown + page(Explanation(diagnosis="unknown", confidence=0.3))


def fix(number: int, saves: int | None = None) -> Fix:
    return Fix(
        playbook=f"M{number}", action=f"do {number}", why=f"because {number}", costs="none", math="same",
        saves_bytes=saves,
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_the_short_page_has_twenty_lines_and_says_what_it_leaves_out(width: int) -> None:
    for text in TEXTS:
        explanation = explain(text)
        shown = page(explanation, width, full=False)
        assert shown.count("\n") <= 20
        assert shown.splitlines()[0] == page(explanation, width).splitlines()[0]
        if explanation.fixes:
            assert "\n  1. " in shown
        assert ("--full shows more" in shown) == (
            len(explanation.evidence) > shown.count("\n  - ")
            or len(explanation.fixes) > sum(f"\n  {number}. " in shown for number in (1, 2, 3))
            or len(explanation.events) > 1
        )


def test_all_fixes_are_on_the_full_page() -> None:
    fixes = [fix(number, 3 << 30 if number == 1 else None) for number in range(1, 9)]
    explanation = Explanation(diagnosis="does_not_fit", confidence=0.9, fixes=fixes)
    shown = page(explanation)
    assert all(f"  {number}. Do {number}" in shown for number in range(1, 9))
    assert shown.count("saves up to") == 1 and shown.count("same result") == 8
    short = page(explanation, full=False)
    assert "  3. Do 3" in short and "4. Do 4" not in short and "more: 5 actions" in short
    assert short.count("saves up to") == 1


def test_an_action_that_changes_the_result_says_so_on_the_short_page() -> None:
    other = fix(1)
    other.math = "different"
    explanation = Explanation(diagnosis="does_not_fit", confidence=0.9, fixes=[fix(2), other])
    assert page(explanation, full=False).count("CHANGES the result") == 1


@pytest.mark.parametrize(
    ("live", "asked", "sentence"),
    [
        (70, 20, "live bytes and the request exceed the device"),
        (70, 5, "the request is more than the device has left"),
        (0, 90, "the request alone exceeds the device"),
    ],
)
def test_a_headline_states_only_what_the_figures_give(live: int, asked: int, sentence: str) -> None:
    text = (
        f"CUDA out of memory. Tried to allocate {asked}.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
        f"which 0 bytes is free. Of the allocated memory {live}.00 GiB is allocated by PyTorch, and 0 bytes "
        "is reserved by PyTorch but unallocated."
    )
    explanation = explain(text)
    explanation.diagnosis = "does_not_fit"
    assert page(explanation).startswith(f"DOES NOT FIT: {sentence}\n")


def events(count: int, cause: int) -> list[LogEvent]:
    made = [
        LogEvent(
            family="k8s", diagnosis=None, role="followed", line=1000 + line, text="x", count=1 + line % 2
        )
        for line in range(count)
    ]
    made[cause].role = "cause"
    return made


def test_an_event_says_who_wrote_it_and_how_often() -> None:
    two = events(2, 0)
    two[0].ranks, two[1].ranks, two[1].diagnosis = [3], [0, 1, 2], "host_memory_limit"
    shown = page(Explanation(diagnosis="host_memory_limit", confidence=0.9, events=two))
    assert "rank 3: a consequence  x" in shown and "ranks 0-2: host memory limit x 2  x" in shown
