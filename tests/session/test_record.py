"""A rank's record as a session writes it: notes once, findings whole, failures of the watch as notes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.findings import Finding
from memtriage.session.record import SessionRecord, never_raises
from support.paths import items_of


@pytest.fixture
def record(tmp_path: Path) -> SessionRecord:
    return SessionRecord(tmp_path / "rank.jsonl")


def lines(record: SessionRecord) -> list[dict[str, Any]]:
    record.close()
    return [json.loads(line) for line in record.path.read_text().splitlines()]


def test_a_note_may_be_written_once_only(record: SessionRecord) -> None:
    for text in ("first", "first", "second"):
        record.note_once(text)
    record.note("first")
    record.failed("read peaks", ValueError("no driver"))
    record.failed("read peaks", ValueError("no driver"))
    assert [line["text"] for line in lines(record)] == [
        "first",
        "second",
        "first",
        "memtriage could not do all of its work (read peaks): ValueError: no driver",
    ]


def test_findings_are_written_whole(record: SessionRecord) -> None:
    found = Finding(kind="leak", device="cpu", holder_path=items_of("main", "losses"), bytes=5, step=3)
    record.findings([found, Finding(kind="residue", device="cpu")], final=False)
    record.findings([found], final=True)
    first, second, last = lines(record)
    assert (first["kind"], first["bytes"], first["step"]) == ("leak", 5, 3)
    assert first["holder"] == "frame main(): losses[*]" and first["holder_path"]
    assert second["kind"] == "residue"
    assert [line.get("final", False) for line in (first, second, last)] == [False, False, True]


@dataclass
class Part:
    """A part of the watch that fails."""

    record: SessionRecord
    error: BaseException
    asked: list[tuple[int, str]] = field(default_factory=list)

    @never_raises
    def _read_all_counters(self, number: int, *, name: str = "x") -> None:
        """Read."""
        self.asked.append((number, name))
        raise self.error


@pytest.mark.parametrize("error", [ValueError("its own"), SystemExit(3)])
def test_what_the_watch_fails_at_is_a_note(record: SessionRecord, error: BaseException) -> None:
    part = Part(record, error)
    part._read_all_counters(5, name="y")
    assert part.asked == [(5, "y")]
    assert Part._read_all_counters.__doc__ == "Read."
    (note,) = lines(record)
    assert note["text"].startswith(
        f"memtriage could not do all of its work (read all counters): {type(error).__name__}: "
    )


def test_the_program_goes_on_where_no_note_can_be_written(
    record: SessionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(where: str, error: BaseException) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(record, "failed", full)
    Part(record, ValueError("its own"))._read_all_counters(5)
    assert lines(record) == []


def test_ctrl_c_is_no_failure_of_the_watch(record: SessionRecord) -> None:
    with pytest.raises(KeyboardInterrupt):
        Part(record, KeyboardInterrupt())._read_all_counters(5)
    assert lines(record) == []
