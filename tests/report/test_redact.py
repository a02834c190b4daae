"""What a redacted run still says, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec
import pytest

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.model.paths import in_words
from memtriage.model.position import TrainingPosition
from memtriage.report.redact import _CODES, redacted
from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.records import End, Start
from support.judged import judge
from support.observed import BASE, held, observed
from support.rank_records import marks

MIB = 1024**2


def record(*notes: str, argv: tuple[str, ...] = ("train.py",), host: str | None = "node7.corp") -> RankRecord:
    made = RankRecord(Path("/home/ann/runs/rank-00000.jsonl"))
    made.start = Start(run_id="moonshot", argv=list(argv), host=host)
    made.notes = list(notes)
    return made


def shown(text: str, *argv: str, host: str | None = "node7.corp") -> str:
    """What is left of a text of a run with these arguments."""
    (rank,) = redacted(RunRecord([record(text, argv=("train.py", *argv), host=host)])).ranks
    return rank.notes[0]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("read /mnt/vault/x.bin, then ~/ann/y.pt", "read …/x.bin, then …/y.pt"),
        (r"C:\Users\ann\train.py:7 in f", "…/train.py:7 in f"),
        ("/dev/shm is full, /proc/meminfo and /sys/fs/cgroup/memory.max too",
         "/dev/shm is full, /proc/meminfo and /sys/fs/cgroup/memory.max too"),
        ("3 KiB/s and pkg/train.py:7", "3 KiB/s and pkg/train.py:7"),
        ("s3://vault/x and https://a.b/c?d=e", "[address] and [address]"),
        ("see (http://a.b/c) and 'http://d.e'", "see ([address]) and '[address]'"),
        ("on node7.corp, not on node7.corporate", "on host0, not on node7.corporate"),
    ],
)  # fmt: skip
def test_of_a_text_paths_addresses_and_hosts_are_left_out(text: str, left: str) -> None:
    assert shown(text) == left


@pytest.mark.parametrize(
    ("argument", "text", "left"),
    [
        pytest.param("moonshot", "cache['moonshot']", "cache['[argument]']", id="a word"),
        pytest.param("moonshot", "moonshots", "moonshots", id="a part of a word"),
        pytest.param("--data=tide", "of tide, --data=tide", "of [argument], --data=[argument]", id="a value"),
        pytest.param("abc", "abc", "[argument]", id="three letters"),
        pytest.param("ab", "ab", "ab", id="two letters occur by chance"),
        pytest.param("--lr", "--lr", "--lr", id="the name of an option"),
        pytest.param("3e-4", "at 3e-4", "at 3e-4", id="a number occurs by chance"),
        pytest.param("--lr=3e-4", "at 3e-4", "at 3e-4", id="as does one of an option"),
    ],
)
def test_values_of_arguments_are_left_out_where_they_are_words(argument: str, text: str, left: str) -> None:
    assert shown(text, argument) == left


def test_of_two_arguments_the_longer_is_looked_for_first() -> None:
    assert shown("moon.shot and moon", "moon", "moon.shot") == "[argument] and [argument]"


def test_without_arguments_and_a_host_nothing_is_a_secret_word() -> None:
    assert shown("losses on node7.corp", host=None) == "losses on node7.corp"


def test_a_run_keeps_what_a_report_needs() -> None:
    first = record("a note", argv=("/home/ann/train.py", "--project", "moonshot"))
    first.marks = [*marks(0, [1, 2]), *marks(0, [3], name="moonshot")]
    first.final_findings = [
        Finding(
            kind="leak", device="cpu", holder="train.cache['moonshot']", bytes=5, evidence=["on node7.corp"]
        )
    ]
    first.end = End(verdict="leak", exception="OSError: /home/ann/log.txt", steps=2)
    second = record(host="node8", argv=("/home/ann/train.py",))
    run = redacted(RunRecord([first, second], ["left out on node8: /home/ann/rank-00002.jsonl"]))
    assert run.notes == ["left out on host1: …/rank-00002.jsonl"]
    rank, other = run.ranks
    assert (rank.path, other.path) == (Path("rank-00000.jsonl"), Path("rank-00000.jsonl"))
    assert (rank.start.run_id, rank.start.host, other.start.host) == ("", "host0", "host1")
    assert rank.start.argv == ["train.py", "[argument]", "[argument]"] and other.start.argv == ["train.py"]
    assert [(mark.name, mark.allocated) for mark in rank.marks] == [
        ("step", 1),
        ("step", 2),
        ("[argument]", 3),
    ]
    (finding,) = rank.final_findings
    assert (finding.kind, finding.bytes, finding.evidence) == ("leak", 5, ["on host0"])
    assert finding.holder == "train.cache['[argument]']"
    assert rank.end is not None and (rank.end.exception, rank.end.steps) == ("OSError: …/log.txt", 2)
    assert first.start.run_id == "moonshot" and first.final_findings[0].evidence == ["on node7.corp"]


def test_kinds_and_verdicts_stay_whatever_the_arguments_are() -> None:
    rank = record(argv=("train.py", "leak", "proven"))
    rank.interim_findings = [Finding(kind="leak", device="cpu", certainty="proven", mechanism="a leak")]
    rank.end = End(verdict="leak")
    (left,) = redacted(RunRecord([rank])).ranks
    (finding,) = left.interim_findings
    assert (finding.kind, finding.certainty, finding.mechanism) == ("leak", "proven", "a [argument]")
    assert left.end is not None and left.end.verdict == "leak"


def test_arguments_that_are_words_of_the_evidence_change_no_judgment(tmp_path):
    """`--device cpu --stage backward` must leave devices, owners and phases of training as they are."""
    evidence = observed(
        {"cpu": [BASE + MIB * at for at in range(60)]}, lambda at: [held(MIB * at, at)], (20, 40)
    )
    position = TrainingPosition(step=50, backwards=50, phase="backward")
    lines = [
        *evidence.run["step"].new_readings(last=True),
        *evidence.run["step"].censuses,
        CensusSeen(position=position, holders=[held(50 * MIB, 50)]),
    ]
    words = ["--device", "cpu", "--stage", "backward", "--what", "variable", "--name", "kept"]
    rank = RankRecord(tmp_path / "rank-00000.jsonl", Start(argv=["train.py", *words]), evidence=lines)
    (again,) = redacted(RunRecord([rank])).ranks
    (leak,), (kept,) = (judge(Evidence.of(each)).findings for each in (lines, again.evidence))
    assert "kept" in in_words(leak.holder_path) and "kept" not in in_words(kept.holder_path)
    assert (kept.device, kept.certainty, kept.bytes_per_step) == (
        leak.device,
        leak.certainty,
        leak.bytes_per_step,
    )


@pytest.mark.parametrize("type_", [HolderSeen, DataSeen, GroupDetail, Finding, Ledger, End])
def test_words_of_a_fixed_set_are_never_replaced(type_):
    """They could not be read again."""
    fixed = {
        field.name
        for field in msgspec.structs.fields(type_)
        if any(get_origin(each) is Literal for each in (field.type, *get_args(field.type)))
    }
    assert fixed <= _CODES
