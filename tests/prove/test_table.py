"""The tables of a trials file: their defaults, and one clear line for the first mistake in them."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.prove.table import TrialsError, parse_seconds, read_tables, wrong_value


def test_absent_keys_have_their_defaults() -> None:
    empty = read_tables({})
    assert (empty.trials, empty.variant, empty.target, empty.values) == (None, [], [], {})
    file = read_tables(
        {"trials": {"script": "train.py"}, "variant": [{"name": "a"}, {"name": "b", "args": [1, "x"]}]}
    )
    trials = file.trials
    assert trials is not None
    assert (trials.directory, trials.ranks, trials.repeats, trials.args) == (".", 1, 5, [])
    assert trials.memtriage.phase is None
    assert [(one.name, one.args) for one in file.variant] == [("a", []), ("b", [1, "x"])]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"trial": {}},
            "unknown key 'trial' in the file; expected one of 'target', 'trials', 'values', "
            "'variant': did you mean 'trials'?",
        ),
        ({"xyz": 1}, "'variant': take it out"),
        ({"trials": {"scrpt": "a"}}, "unknown key 'scrpt' in [trials];"),
        (
            {"trials": {"memtriage": {"phases": True}}},
            "unknown key 'phases' in [trials] memtriage; expected one "
            "of 'host_tuning', 'phase': did you mean 'phase'?",
        ),
        ({"variant": [{"name": "a"}, {"nam": "b"}]}, "unknown key 'nam' in [[variant]] 2;"),
        ({"variant": [{"memtriage": {"x": 1}}]}, "unknown key 'x' in [[variant]] 1 memtriage;"),
        (
            {"trials": {"ranks": 0}},
            "ranks = 0 in [trials]; expected a whole number of at least 1: correct it",
        ),
        ({"trials": {"ranks": True}}, "ranks = True in [trials]; expected a whole number of at least 1"),
        (
            {"trials": {"memtriage": [{"phase": True}]}},
            "memtriage = [{'phase': True}] in [trials]; expected a table",
        ),
        ({"trials": {"ranks": 1.5}}, "ranks = 1.5 in [trials]; expected a whole number of at least 1"),
        ({"trials": {"script": " "}}, "script = ' ' in [trials]; expected a text that is not empty"),
        ({"trials": {"memtriage": {"phase": 1}}}, "phase = 1 in [trials] memtriage; expected true or false"),
        ({"trials": {"timeout": [1]}}, "timeout = [1] in [trials]; expected a time span such as '90 s'"),
        ({"trials": "train.py"}, "trials = 'train.py' in the file; expected a table: correct it"),
        (
            {"variant": {"name": "a"}},
            "variant = {'name': 'a'} in the file; expected tables, each below its own [[variant]]",
        ),
        ({"target": [{"metric": "a"}, 5]}, "expected tables, each below its own [[target]]"),
        ({"trials": {"args": "x"}}, "args = 'x' in [trials]; expected a list of texts"),
        ({"variant": [{"name": "a"}, {"args": [True]}]}, "args = [True] in [[variant]] 2;"),
        ({"target": [{"at_most": []}]}, "at_most = [] in [[target]] 1; expected a text or a number"),
        ({"target": [{"variant": 5}]}, "variant = 5 in [[target]] 1; expected a name or a list of names"),
        ({"values": []}, "values = [] in the file; expected a table"),
    ],
)
def test_a_mistake_says_where_it_is_and_what_was_expected(document: dict[str, Any], words: str) -> None:
    with pytest.raises(TrialsError) as error:
        read_tables(document)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_mistake_is_told() -> None:
    with pytest.raises(TrialsError, match="ranks = 0"):
        read_tables({"trials": {"ranks": 0, "repeats": 0}, "variant": 1})


@pytest.mark.parametrize(("length", "shown"), [(58, f"'{'x' * 58}'"), (59, f"'{'x' * 58}…")])
def test_a_long_value_is_cut(length: int, shown: str) -> None:
    assert str(wrong_value("mark", "x" * length, "[trials]", "a text")) == (
        f"mark = {shown} in [trials]; expected a text: correct it"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90 s", 90.0),
        ("20ms", 0.02),
        (" 1.5 min ", 90.0),
        ("2h", 7200.0),
        ("0 s", 0.0),
        ("soon", None),
        ("5", None),
        ("5 d", None),
        ("-5 s", None),
        ("1. s", None),
        ("5 s or so", None),
        ("", None),
    ],
)
def test_time_spans(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == (None if seconds is None else pytest.approx(seconds))
