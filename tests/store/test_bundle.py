"""One file of a run's records, that is read as they were."""

import gzip

import pytest

from memtriage.model.evidence import CensusSeen, Readings, Situation
from memtriage.model.position import TrainingPosition
from memtriage.store.bundle import write_bundle
from memtriage.store.locate import RecordError
from memtriage.store.reader import read_run
from memtriage.store.records import EVIDENCE, HostSampleLine, Note, RecordedFinding
from support.observed import data, held

POSITION = TrainingPosition(step=3, backwards=3)
LINES = (
    Readings(scale="step", counter="cpu", at=[1, 2.5], means=[5, 7], floors=[4, 6], width=2),
    CensusSeen(position=POSITION, holders=[held(9, 3)], data=[data(4, 100)], totals={"cpu": 9}),
    Situation(position=POSITION, limits={"cpu": 100}, readable={"cpu": True}),
)


@pytest.fixture
def run(write_rank):
    """Two ranks, of which the second was killed."""
    finding = {"kind": "leak", "device": "cpu", "holder": "kept[*]"}
    for rank, end in ((0, "leak"), (1, None)):
        extra = [
            *((EVIDENCE[type(line)], line) for line in LINES),
            ("host", HostSampleLine(time_s=2.0, rss=10 + rank)),
            ("note", Note(text=f"note {rank}")),
            ("finding", RecordedFinding(**finding, final=end is not None)),
        ]
        path = write_rank(rank, world_size=2, extra=extra, end=end)
    return read_run([path.parent])


def test_a_bundle_has_what_the_records_have(run, tmp_path):
    write_bundle(run, tmp_path / "run.gz")
    again = read_run([tmp_path / "run.gz"])
    assert [rank.number for rank in again.ranks] == [0, 1]
    assert run.ranks[0].evidence == list(LINES)
    for before, after in zip(run.ranks, again.ranks, strict=True):
        for name in (
            "start",
            "marks",
            "host",
            "notes",
            "ledgers",
            "evidence",
            "findings",
            "end",
            "cut_lines",
        ):
            assert getattr(after, name) == getattr(before, name), name


def test_a_bundle_of_a_bundle_is_the_same(run, tmp_path):
    write_bundle(run, tmp_path / "first.gz")
    write_bundle(read_run([tmp_path / "first.gz"]), tmp_path / "second.gz")
    first, second = (gzip.decompress((tmp_path / name).read_bytes()) for name in ("first.gz", "second.gz"))
    assert first == second


def test_an_uncompressed_bundle_is_read_too(run, tmp_path):
    write_bundle(run, tmp_path / "run.gz")
    plain = tmp_path / "run.jsonl"
    plain.write_bytes(gzip.decompress((tmp_path / "run.gz").read_bytes()))
    assert [rank.evidence for rank in read_run([plain]).ranks] == [list(LINES)] * 2


@pytest.mark.parametrize("what", ["cut", "garbled", "empty"])
def test_a_damaged_bundle_is_a_record_that_cannot_be_read(run, tmp_path, what):
    path = tmp_path / "run.gz"
    write_bundle(run, path)
    whole = path.read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "garbled": whole[:40] + bytes(255 - byte for byte in whole[40:80]) + whole[80:],
        "empty": gzip.compress(b""),
    }
    path.write_bytes(damaged[what])
    with pytest.raises(RecordError, match=r"run\.gz"):
        read_run([path])


def test_a_file_that_cannot_be_written_is_an_error(run, tmp_path):
    with pytest.raises(OSError, match="absent"):
        write_bundle(run, tmp_path / "absent" / "run.gz")
