"""`memtriage top` without a screen: the table in a file and on a terminal, and the JSON."""

import re
from pathlib import Path

import msgspec

from memtriage.diagnose.ranks.live import LiveView, live_view
from memtriage.report.top.text import as_json, render
from memtriage.report.top.words import BY_KEY
from support.live_runs import MIB, NOW, LiveRank
from support.printed import printed


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


def test_sorted_by_growth(tmp_path: Path) -> None:
    _, table = rows(shown(two_ranks(tmp_path), sort="growth"))
    assert [row[0] for row in table] == ["1", "0"]


def test_json(tmp_path: Path) -> None:
    said = msgspec.to_builtins(as_json(two_ranks(tmp_path)))
    assert (said["schema"], said["verdict"], said["steps"], said["finished"]) == (1, "leak", 10, False)
    assert said["ranks"] == {"seen": 2, "of": 2}
    assert said["by_rank"][1]["growth"] == 32 * MIB
    assert said["by_rank"][0]["stranded"] == 5 * MIB and said["by_rank"][1]["stranded"] is None
    assert said["findings"][0]["holder"] == "train.losses[*] -> grad_fn MulBackward0"
