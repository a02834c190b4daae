"""SQL over a recording: its tables say what the recording says, and a query reaches nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memtriage.model.recording import EVENT_KINDS, Recording
from memtriage.snapshots.sql import TABLES, SnapshotQueryError, query
from support.recordings import BEGAN_US, MIB, Tape, recording, stack, training


@pytest.fixture(scope="module")
def leaking() -> Recording:
    first, stacks = training(leak=3 * MIB)
    second, _ = training(device="cuda:1")
    return recording(first, second, stacks=stacks)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_columns_that_are_documented(leaking: Recording, table: str) -> None:
    columns, _ = query(leaking, f"SELECT * FROM {table} LIMIT 0")
    assert columns == list(TABLES[table])


def test_events_are_those_of_the_trace(leaking: Recording) -> None:
    columns, rows = query(leaking, "SELECT device, event, time_us, kind, allocated FROM events ORDER BY ALL")
    assert columns == ["device", "event", "time_us", "kind", "allocated"]
    assert rows == [
        (device.device, number, BEGAN_US + 10 * number, EVENT_KINDS[device.events.kind[number]], allocated)
        for device in leaking.devices
        for number, allocated in enumerate(device.timeline.allocated.tolist())
    ]


def test_blocks_tell_who_made_them_and_when_they_went(leaking: Recording) -> None:
    _, rows = query(
        leaking,
        "SELECT owner, site, frames, size, requested, born, died, gone, died_us, pool, alive FROM blocks "
        "WHERE device = 'cuda:0' ORDER BY block LIMIT 2",
    )
    weights, saved = rows
    assert weights[:5] == (
        "parameter",
        "model.py:10 in __init__",
        ["model.py:10 in __init__", "train.py:5 in main"],
        24 * MIB,
        24 * MIB - 100,
    )
    assert weights[5:] == (1, None, None, None, "0.0", True)
    life = leaking.devices[0].lives
    died = int(life.died[1])
    assert saved[5:] == (3, died, int(life.gone[1]), BEGAN_US + 10 * died, "0.0", False)


def test_alive_blocks_sum_to_what_is_allocated(leaking: Recording) -> None:
    _, rows = query(
        leaking, "SELECT device, sum(size) FROM blocks WHERE alive GROUP BY device ORDER BY device"
    )
    assert rows == [(device.device, device.end.allocated) for device in leaking.devices]


def test_segments_sum_to_the_figures_of_the_snapshot(leaking: Recording) -> None:
    _, rows = query(
        leaking,
        "SELECT sum(size), sum(allocated), sum(awaiting), sum(stranded), sum(allocated + awaiting + free) "
        "FROM segments WHERE device = 'cuda:0'",
    )
    end = leaking.devices[0].end
    assert rows == [(end.reserved, end.allocated, end.awaiting, end.stranded, end.reserved)]


def test_what_is_unknown_is_null() -> None:
    tape = Tape([stack("it's.py:1 in f")])
    segment = tape.segment(2 * MIB, pool=(0, 5))
    tape.free(tape.alloc(segment, MIB, "c++ only"), complete=False)
    made = recording(tape.end(), stacks=tape.stacks)
    assert query(made, "SELECT site, born, gone, alive, pool FROM blocks")[1] == [
        ("it's.py:1 in f", 1, None, False, "0.5")
    ]
    assert query(made, "SELECT site, block FROM events WHERE kind = 'segment_alloc'")[1] == [(None, None)]


def test_a_name_that_is_no_unicode_does_not_hinder_a_query() -> None:
    tape = Tape([stack("\ud800.py:1 in f")])
    tape.alloc(tape.segment(2 * MIB), MIB, "variable")
    assert query(recording(tape.end(), stacks=tape.stacks), "SELECT site FROM blocks")[1] == [
        ("?.py:1 in f",)
    ]


def test_an_empty_recording_has_empty_tables() -> None:
    assert query(recording(stacks=[]), "SELECT count(*) FROM events")[1] == [(0,)]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM events", "nothing"),
        ("SELECT * FROM nowhere", "events .*blocks .*segments"),
        ("DROP VIEW events", "one SELECT"),
        ("SELECT 1; SELECT 2", "one SELECT"),
        ("", "one SELECT"),
        ("SET enable_external_access = true", "one SELECT"),
        ("COPY (SELECT 1) TO '{file}'", "one SELECT"),
        ("ATTACH '{file}'", "one SELECT"),
        ("INSTALL httpfs", "one SELECT"),
        ("SELECT * FROM read_text('{file}')", "disabled"),
        ("SELECT * FROM read_csv('{file}')", "disabled"),
        ("SELECT * FROM glob('{file}')", "disabled"),
        ("SELECT * FROM '{file}'", "disabled|does not exist"),
        ("SELECT * FROM recording", "does not exist"),
    ],
)
def test_a_query_that_cannot_be_answered_says_why(
    leaking: Recording, tmp_path: Path, sql: str, says: str
) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(SnapshotQueryError, match=f"(?s){says}"):
        query(leaking, sql.replace("{file}", str(file)))
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


_PAGE = (Path(__file__).parents[2] / "docs" / "snapshot-html.md").read_text("utf-8")


@pytest.mark.parametrize("sql", re.findall(r"SELECT [^;\"]+?(?=[;\"])", _PAGE)[1:])
def test_the_queries_of_the_documentation_have_answers(leaking: Recording, sql: str) -> None:
    _, rows = query(leaking, sql)
    assert rows


@pytest.mark.parametrize("table", TABLES)
def test_the_documentation_has_every_column(table: str) -> None:
    section = _PAGE.split(f"**`{table}`**", 1)[1].split("\n\n")[1]
    assert section.splitlines()[2:] == [f"| `{name}` | {says} |" for name, says in TABLES[table].items()]
