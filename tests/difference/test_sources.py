"""What two sides of a comparison hold, from records, predictions, plans and snapshots."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from memtriage.difference import sources
from memtriage.difference.table import difference
from memtriage.model.evidence import CensusSeen
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.paths import PathSegment, SegmentKind, in_words
from memtriage.model.position import TrainingPosition
from memtriage.model.prediction import PeakRow, PredictedStep, Prediction
from memtriage.model.units import MIB
from memtriage.snapshots.read import load_snapshot
from memtriage.store.reader import RankRecord
from support.observed import data, held, items
from support.rank_records import rank_record

SNAPSHOTS = Path(__file__).parents[1] / "data" / "snapshots"
RSS = 1 << 30
"""Of all marks of `rank_record`."""


def predicted(**more: object) -> Prediction:
    return Prediction(
        peak_allocated=100,
        peak_reserved=120,
        peak_phase="backward",
        by_owner={"parameter": 60, "activation": 40},
        outside_allocator=9,
        steps=[PredictedStep(peak_allocated=100, peak_reserved=120, end_allocated=60)],
        seconds=1.0,
        notes=[],
        **more,  # type: ignore[arg-type]
    )


def census(*found: object, step: int = 10, **more: object) -> CensusSeen:
    return CensusSeen(position=TrainingPosition(step=step), holders=list(found), **more)  # type: ignore[arg-type]


def rows(record: RankRecord) -> dict[tuple[str, str | None], int]:
    side = sources.of_run([record], "run")
    assert side.total == sum(row.bytes for row in side.rows)
    return {(row.owner, row.module): row.bytes for row in side.rows}


# --- predictions and snapshots ------------------------------------------------------------------------------


def test_a_prediction_is_read_from_its_json(tmp_path: Path) -> None:
    table = [
        PeakRow(
            owner="parameter",
            module="head",
            site="m.py:1 in f",
            phase="build",
            bytes=60,
            blocks=1,
            operator="x",
        ),
        PeakRow(owner="activation", module=None, bytes=40, blocks=1, operator="x"),
    ]
    other = {"forward": table[:1]}
    file = tmp_path / "prediction.json"
    file.write_bytes(
        msgspec.json.encode(predicted(peak_table=table, other_peaks=other, context={"torch": "2"}))
    )
    side = sources.read(file)
    assert (side.of, side.total, side.instant) == ("prediction", 100, "the peak of backward")
    assert [(row.owner, row.module, row.site, row.phase, row.bytes) for row in side.rows] == [
        ("parameter", "head", "m.py:1 in f", "build", 60),
        ("activation", None, None, None, 40),
    ]
    assert side.others == {"the peak of forward": side.rows[:1]}
    assert side.context == {"torch": "2"}


def test_a_prediction_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(predicted()))
    os.close(writing)
    assert sources.read(Path(f"/dev/fd/{reading}")).total == 100
    os.close(reading)


def test_a_prediction_without_a_table_has_its_owners() -> None:
    side = sources.of_prediction(predicted(), "a")
    assert {row.owner: row.bytes for row in side.rows} == {"parameter": 60, "activation": 40}


@pytest.mark.parametrize(("first", "second"), [("healthy", "loss_list"), ("fragmentation", "oom")])
def test_differences_of_snapshots_sum_to_the_byte(first: str, second: str) -> None:
    before, after = (load_snapshot(SNAPSHOTS / f"{name}.pickle.gz") for name in (first, second))
    found = difference(sources.of_snapshot(before), sources.of_snapshot(after))
    peaks = [sum(device.peak.allocated for device in side.devices) for side in (before, after)]
    assert found.difference == sum(row.difference for row in found.rows) == peaks[1] - peaks[0]


# --- runs ---------------------------------------------------------------------------------------------------


def test_a_device_holds_what_the_last_census_listed_and_the_rest_of_its_highest_mark() -> None:
    record = rank_record(allocated=(10 * MIB, 90 * MIB, 80 * MIB))
    record.evidence = [
        census(held(30 * MIB, device="cuda:0", owner="parameter"), step=1),
        census(held(8 * MIB, name="gone", number=2, device="cuda:0", owner="variable"), step=2),
        census(step=3, gone=[2]),
    ]
    assert rows(record) == {
        ("parameter", in_words(items("kept"))): 30 * MIB,
        ("within a step, or after the last census", None): 60 * MIB,
    }


def test_the_name_of_the_script_makes_no_difference() -> None:
    variable = PathSegment(SegmentKind.VARIABLE, "model")
    sides = []
    for script, nbytes in (("before", 30 * MIB), ("after", 50 * MIB)):
        record = rank_record(allocated=(90 * MIB,))
        record.start.argv = [f"jobs/{script}.py"]
        seen = held(nbytes, device="cuda:0", owner="parameter")
        seen.anchor = seen.path = (PathSegment(SegmentKind.MODULE, script), variable)
        record.evidence = [census(seen)]
        sides.append(sources.of_run([record], script))
    (row,) = (row for row in difference(*sides).rows if row.owner == "parameter")
    assert (row.module, row.difference) == ("model", 20 * MIB)


def test_a_census_that_proves_nothing_does_not_count() -> None:
    record = rank_record(allocated=(90 * MIB,))
    record.evidence = [
        census(held(30 * MIB, device="cuda:0")),
        census(gone=[1], between=False),
    ]
    assert 30 * MIB in rows(record).values()


def test_a_leak_is_projected_to_the_end_at_its_rate() -> None:
    """The last census was at step 2 of 12."""
    record = rank_record(allocated=tuple(MIB * step for step in range(1, 13)))
    anchor = in_words(items("kept"))
    record.evidence = [census(held(2 * MIB, device="cuda:0", owner="variable"), step=2)]
    record.final_findings = [Finding(kind="leak", device="cuda:0", holder=anchor, bytes_per_step=MIB)]
    assert rows(record) == {("variable", anchor): 12 * MIB}


def test_the_host_holds_tensors_data_and_the_rest_by_kind() -> None:
    record = rank_record()
    for mark in record.marks:
        mark.device = "cpu"
    tensors, entries = held(30 * MIB, owner="parameter"), data(1000, 1000)
    record.evidence = [census(tensors, data=[entries])]
    ledger = {"CPU tensors": 30 * MIB, "malloc in use": 100 * MIB, "libraries": 300 * MIB}
    record.ledgers["host"] = Ledger(
        device="host",
        total=sum(ledger.values()),
        source="",
        rows=[LedgerRow(row=row, bytes=nbytes) for row, nbytes in ledger.items()],
    )
    found = rows(record)
    assert found["parameter", in_words(items("kept"))] == 30 * MIB
    assert found["entries of a list", in_words(items("rows"))] == 1_000_000
    assert found["malloc in use", None] == 100 * MIB - 1_000_000
    assert found["before or after the last census", None] == RSS - 430 * MIB
    assert sum(found.values()) == RSS


def test_each_rank_has_its_rows() -> None:
    side = sources.of_run(
        [rank_record(rank, world_size=2, allocated=(MIB + rank,)) for rank in (0, 1)], "run"
    )
    assert {row.rank: row.bytes for row in side.rows} == {0: MIB, 1: MIB + 1}


# --- what cannot be compared --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b'{"schema": 1}'), ("b.json", b"{"), ("c.pickle", b"x"), ("d", None), ("e", b"")],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="expected a folder of memtriage run") as raised:
        sources.read(tmp_path / name)
    assert "\n" not in str(raised.value)
