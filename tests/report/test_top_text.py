"""`memtriage top`: order of ranks, columns, headlines, the table in a file and on a terminal, the JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.ranks.live import LiveView, RankLine, live_view
from memtriage.report.top_text import (
    BY_KEY,
    age,
    as_json,
    columns_for,
    groups_of,
    headline,
    level,
    ordered,
    overview,
    rate,
    render,
    state,
    subject,
)
from support.live_runs import MIB, NOW, LiveRank
from support.printed import printed

LINE = RankLine(
    rank=0,
    host="node0",
    device="cuda:0",
    step=5,
    allocated=10 * MIB,
    reserved=20 * MIB,
    peak=15 * MIB,
    stranded=None,
    host_rss=30 * MIB,
    growth=0,
    last_mark="step",
    age_s=3.0,
    state="running",
    verdict=None,
)


def ranks(*values: int | None) -> list[RankLine]:
    return [replace(LINE, rank=rank, allocated=value) for rank, value in enumerate(values)]


@given(st.lists(st.none() | st.integers(0, 5), max_size=20))
def test_ranks_are_ordered_and_what_is_unknown_comes_last(values: list[int | None]) -> None:
    found = [line.allocated for line in ordered(ranks(*values), BY_KEY["allocated"])]
    known = [value for value in found if value is not None]
    assert found == known + [None] * values.count(None)
    assert known == sorted(known, reverse=True)


@pytest.mark.parametrize("key", list(BY_KEY))
def test_every_column_can_be_sorted_by_and_has_a_text(key: str) -> None:
    lines = [LINE, replace(LINE, rank=1, state="killed", growth=None, device=None, host=None)]
    assert len(ordered(lines, BY_KEY[key])) == 2
    assert all(isinstance(BY_KEY[key].text(line), str) for line in lines)


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("step", {"step": 4}),
        ("rank", {"rank": 0}),
        ("state", {"state": "killed"}),
        ("age", {"age_s": 60.0}),
        ("allocated", {"allocated": 99 * MIB}),
        ("growth", {"growth": 99 * MIB}),
    ],
)
def test_the_rank_to_look_at_comes_first(key: str, first: dict[str, object]) -> None:
    """The one that is behind, dead, silent, or has most."""
    usual = replace(LINE, rank=7, growth=0.0)
    remarkable = replace(usual, **first)
    assert ordered([usual, remarkable], BY_KEY[key]) == [remarkable, usual]


def test_columns_that_say_nothing_are_left_out() -> None:
    keys = [column.key for column in columns_for([LINE, LINE])]
    assert "host" not in keys and "stranded" not in keys
    keys = [column.key for column in columns_for([LINE, replace(LINE, host="node1", stranded=0)])]
    assert "host" in keys and "stranded" in keys


def test_states_and_ages() -> None:
    assert (state(LINE), age(LINE)) == ("running", "3.0 s")
    ended = replace(LINE, state="ended", verdict="out_of_memory")
    assert (state(ended), age(ended)) == ("ended: out of memory", "")


def test_the_overview_names_the_extremes() -> None:
    lines = [replace(line, growth=MIB * (line.rank or 0)) for line in ranks(100 * MIB, 300 * MIB, 120 * MIB)]
    text = overview(LiveView(lines=lines))
    assert "allocated 100.0 MiB to 300.0 MiB (rank 1), median 120.0 MiB" in text
    assert "2 grow, rank 2 most (+2.0 MiB/step)" in text
    assert overview(LiveView(lines=lines[:1])) == ""


def test_the_states_of_several_ranks_are_counted(tmp_path: Path) -> None:
    LiveRank(tmp_path, growth=MIB).steps(10)
    view = live_view([tmp_path], NOW)
    assert subject(view) == ["train.py --lr 3e-4", "10 steps", *subject(view)[2:]]
    alone = len(subject(view))
    states = ("running", "running", "killed")
    lines = [replace(LINE, rank=rank, state=state) for rank, state in enumerate(states)]
    assert subject(replace(view, lines=lines))[alone:] == ["1 killed", "2 running"]


def test_headlines(tmp_path: Path) -> None:
    assert headline(LiveView(waiting="nothing there")) == ("waiting", "nothing there", "warn")
    rank = LiveRank(tmp_path, growth=MIB).steps(10)
    word, said, level = headline(live_view([tmp_path], NOW))
    assert (word, level) == ("running", "good") and said.endswith("found in 10 steps so far")
    rank.leak()
    word, said, level = headline(live_view([tmp_path], NOW))
    assert (word, level) == ("leak", "bad") and said.startswith("32.0 MiB per step on cuda:0")
    assert subject(live_view([tmp_path], NOW))[:2] == ["train.py --lr 3e-4", "10 steps"]


def test_levels_of_ranks() -> None:
    def of(**fields: object) -> str:
        return level(replace(LINE, **fields))

    assert of() == "good"
    assert of(state="silent") == "warn"
    assert of(state="killed", verdict="clean") == "bad"
    assert of(state="ended", verdict="leak") == "bad"
    assert of(state="ended", verdict="clean") == "good"


def test_a_program_of_one_process_is_rank_0() -> None:
    assert BY_KEY["rank"].text(replace(LINE, rank=None)) == "0"
    assert BY_KEY["rank"].order(replace(LINE, rank=None)) == 0


def test_growth_is_shown_from_the_first_byte() -> None:
    assert (rate(1), rate(0), rate(None)) == ("+1 B", "-", "n/a")


def test_ranks_that_are_alike_are_said_once() -> None:
    text = overview(LiveView(lines=ranks(100 * MIB, 100 * MIB)))
    assert text == "allocated 100.0 MiB each; host RSS 30.0 MiB each"


def test_the_overview_has_the_range_of_steps_where_they_differ() -> None:
    lines = [
        replace(line, step=step, host_rss=None) for line, step in zip(ranks(None, None), (4, 9), strict=True)
    ]
    assert overview(LiveView(lines=lines)) == "steps 4 to 9"


def test_a_view_without_a_report_has_no_subject_and_no_groups(tmp_path: Path) -> None:
    assert (subject(LiveView()), groups_of(LiveView())) == ([], [])
    LiveRank(tmp_path, growth=MIB).steps(10)
    view = live_view([tmp_path], NOW)
    assert (subject(replace(view, context=None)), groups_of(replace(view, report=None))) == ([], [])
    assert subject(replace(view, restart=2))[-1] == "restart 2"


def test_the_verdict_is_said_when_the_run_has_finished(tmp_path: Path) -> None:
    LiveRank(tmp_path, growth=MIB).steps(10)
    view = live_view([tmp_path], NOW)
    assert headline(view)[0] == "running"
    ended = replace(view, lines=[replace(line, state="ended") for line in view.lines])
    assert headline(ended)[0] == "not judged"


def two_ranks(directory: Path) -> LiveView:
    LiveRank(directory, 0, world_size=2, host="node0", base=900 * MIB).steps(10).ledger(5 * MIB)
    LiveRank(directory, 1, world_size=2, host="node1", growth=32 * MIB).steps(10).leak()
    return live_view([directory], NOW + 11.0)


def shown(view: LiveView, width: int | None = None, sort: str = "rank") -> list[str]:
    terminal = width is not None
    return printed(render, view, BY_KEY[sort], width=width or 100, terminal=terminal).splitlines()


def rows(lines: list[str]) -> tuple[list[str], list[list[str]]]:
    at = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank "))
    return lines[at].split("  "), [line.split() for line in lines[at + 1 : at + 3]]


def test_a_file_has_every_column_on_one_line(tmp_path: Path) -> None:
    lines = shown(two_ranks(tmp_path))
    header, table = rows(lines)
    assert [name.strip() for name in header if name.strip()] == [
        "rank", "host", "device", "step", "allocated", "reserved", "peak", "stranded", "host RSS",
        "growth/step", "last mark", "age", "state",
    ]  # fmt: skip
    expected = "0 node0 cuda:0 10 900.0 MiB 1.1 GiB 900.0 MiB 5.0 MiB 2.9 GiB - step 1.0 s running"
    assert " ".join(table[0]) == expected
    assert table[1][:4] == ["1", "node1", "cuda:1", "10"]
    assert "+32.0 MiB" in " ".join(table[1])
    text = "\n".join(lines)
    assert lines[0].startswith("LEAK: 32.0 MiB per step on cuda:1")
    assert re.search(r"kept alive by +train\.losses\[\*\] -> grad_fn MulBackward0", text)


def test_a_narrow_terminal_keeps_the_columns_that_matter_most(tmp_path: Path) -> None:
    lines = shown(two_ranks(tmp_path), width=72)
    header, _ = rows(lines)
    names = [name.strip() for name in header if name.strip()]
    assert {"rank", "step", "allocated", "growth/step", "state"} <= set(names)
    assert "stranded" not in names and "host" not in names
    assert max(map(len, lines)) <= 72


def test_what_grows_and_the_states_are_colored(tmp_path: Path) -> None:
    text = printed(render, two_ranks(tmp_path), BY_KEY["rank"], width=160, colors=True)
    steady, growing = (line for line in text.splitlines() if "node" in line)
    assert re.findall("\x1b\\[([\\d;]+)m *([^\x1b]+?) *\x1b\\[0m", steady) == [("32", "running")]
    assert re.findall("\x1b\\[([\\d;]+)m *([^\x1b]+?) *\x1b\\[0m", growing) == [
        ("1;31", "+32.0 MiB"),
        ("32", "running"),
    ]


def test_json(tmp_path: Path) -> None:
    said = msgspec.to_builtins(as_json(two_ranks(tmp_path)))
    assert (said["schema"], said["verdict"], said["steps"], said["finished"]) == (1, "leak", 10, False)
    assert said["ranks"] == {"seen": 2, "of": 2}
    assert said["by_rank"][1]["growth"] == 32 * MIB
    assert said["by_rank"][0]["stranded"] == 5 * MIB and said["by_rank"][1]["stranded"] is None
    assert said["findings"][0]["holder"] == "train.losses[*] -> grad_fn MulBackward0"
