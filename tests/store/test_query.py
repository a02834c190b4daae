import pytest

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.store.locate import RecordError
from memtriage.store.query import sql
from memtriage.store.records import End, HostSampleLine, Note, RecordedFinding


@pytest.fixture
def runs(tmp_path, write_rank):
    extra = [
        ("host", HostSampleLine(rss=5)),
        ("note", Note(text="hello")),
        ("finding", RecordedFinding(kind="leak", device="cuda:0", also_held_by=["x", "y"], final=True)),
        (
            "ledger",
            Ledger(
                device="host",
                total=3,
                source="s",
                rows=[LedgerRow(row="a", bytes=1), LedgerRow(row="b", bytes=2)],
            ),
        ),
    ]
    for rank in range(2):
        write_rank(rank, world_size=2, run="one", extra=extra, argv=["train.py", "--fast"])
    path = write_rank(run="two", restart=3)
    with path.open("ab") as file:
        file.write(b'{"t":"mark","name":"cut')
    return tmp_path / "runs"


def test_marks_across_runs_and_ranks(runs):
    names, rows = sql(
        [runs],
        "SELECT in_run, in_restart, in_rank, count(*) AS n, max(allocated) "
        "FROM marks GROUP BY ALL ORDER BY ALL",
    )
    assert names == ["in_run", "in_restart", "in_rank", "n", "max(allocated)"]
    assert rows == [("one", 0, 0, 3, 1003), ("one", 0, 1, 3, 1003), ("two", 3, 0, 3, 1003)]


def test_nested_values(runs):
    assert sql([runs], "SELECT DISTINCT also_held_by, final FROM findings")[1] == [(["x", "y"], True)]
    rows = sql([runs], "SELECT sum(r.bytes) FROM (SELECT unnest(rows) AS r FROM ledgers WHERE in_rank = 1)")[
        1
    ]
    assert rows == [(3,)]
    assert sql([runs], "SELECT argv[2] FROM starts WHERE in_run = 'one'")[1] == [("--fast",), ("--fast",)]


def test_maps_are_columns_by_key(write_rank, tmp_path):
    write_rank(end=None, extra=[("end", End(verdict="clean", device_limits={"cuda:0": 99}))])
    assert sql([tmp_path / "runs"], "SELECT device_limits['cuda:0'] FROM ends")[1] == [(99,)]


def test_every_view_is_there(runs):
    counts = {
        view: sql([runs], f"SELECT count(*) FROM {view}")[1][0][0]
        for view in ("starts", "hosts", "notes", "ends")
    }
    assert counts == {"starts": 3, "hosts": 2, "notes": 2, "ends": 3}


def test_paths_with_quotes(write_rank, tmp_path):
    write_rank(top="it's")
    assert sql([tmp_path / "it's"], "SELECT count(*) FROM marks")[1] == [(3,)]


def test_a_query_that_fails(runs):
    with pytest.raises(RecordError, match="query failed"):
        sql([runs], "SELECT nothing FROM nowhere")
