"""A device whose reserved memory grows beyond the peak is looked at, seldom, and named at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from memtriage.account.gpu_ledger import STRANDED
from memtriage.model.blocks import DeviceCounters
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB
from memtriage.observe.counters import Reading
from memtriage.session.fragmentation_watch import FragmentationWatch, predicted_compaction
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.marks import MarkPoint
from memtriage.session.record import SessionRecord
from memtriage.treat.compaction import api
from memtriage.treat.compaction.result import Compaction, DeviceCompaction
from memtriage.treat.device.protocol import Use

_PEAK = 1000 * MIB


def ledger(step: int, pinned: str) -> Ledger:
    return Ledger(
        device="cuda:0",
        total=1,
        source="",
        step=step,
        rows=[
            LedgerRow(row=STRANDED, bytes=1, detail=pinned),
            LedgerRow(row=STRANDED, bytes=0, detail="nothing, of private pools"),
            LedgerRow(row=STRANDED, bytes=1, detail=None),
            LedgerRow(row="requested", bytes=9, detail="of something else"),
        ],
    )


class Asked:
    """Stands for the keeper of ledgers: takes one, for the step that it was told, when it is asked."""

    def __init__(self) -> None:
        self.step = self.times = 0
        self.last: list[Ledger] = []

    def ask(self) -> None:
        self.times += 1
        self.last = [ledger(self.step, "2 segments, pinned by train.kept[*]")]


def reading(reserved: int, device: str = "cuda:0") -> Reading:
    counters = DeviceCounters(allocated=1, reserved=reserved, peak_allocated=_PEAK)
    return Reading(device, reserved=reserved, counters=counters)


def watched(
    tmp_path: Path, predict: Callable[[str], str | None], steps: int = 100, grows: int = 4 * MIB
) -> tuple[FragmentationWatch, Asked, SessionRecord]:
    asked, record = Asked(), SessionRecord(tmp_path / "rank.jsonl")
    watch = FragmentationWatch(3, record, cast(LedgerKeeper, asked), predict)
    for step in range(1, steps):
        asked.step = step
        readings = [Reading("cpu", 1, 2), reading(_PEAK + step * grows), reading(_PEAK, "cuda:1")]
        inside = [reading(_PEAK + 900 * MIB), reading(_PEAK + 900 * MIB, "cuda:1")]  # of no step's end
        for name, at_mark in (("backward", inside), ("step", readings)):
            watch.at_mark(MarkPoint(name, TrainingPosition(step=step), at_mark))
    return watch, asked, record


def test_growth_is_looked_at_seldom_and_named_with_what_pins_it(tmp_path: Path) -> None:
    devices: list[str] = []

    def predict(device: str) -> str:
        devices.append(device)
        return f"look {len(devices)}"

    watch, asked, _ = watched(tmp_path, predict)
    assert devices == ["cuda:0"] * asked.times
    assert 2 <= asked.times <= 5  # at 19 steps, and each time that half as much again has come
    asked.last = [ledger(99, "1 segment, when all else is gone")]
    (finding,) = watch.findings()
    assert (finding.rank, finding.device, finding.bytes) == (3, "cuda:0", 99 * 4 * MIB)
    assert finding.evidence[1].endswith(": 2 segments, pinned by train.kept[*]")
    assert finding.evidence[2].startswith("memtriage.compact() at the end of step ")
    assert finding.evidence[2].endswith(f" look {asked.times}")


def test_counters_that_are_unknown_are_passed_over(tmp_path: Path) -> None:
    watch = FragmentationWatch(0, SessionRecord(tmp_path / "rank.jsonl"), cast(LedgerKeeper, Asked()))
    unknown = [
        DeviceCounters(allocated=1, reserved=None, peak_allocated=_PEAK),
        DeviceCounters(allocated=1, reserved=_PEAK, peak_allocated=None),
    ]
    for step in range(1, 100):
        readings = [Reading(f"cuda:{at}", counters=counters) for at, counters in enumerate(unknown)]
        watch.at_mark(MarkPoint("step", TrainingPosition(step=step), readings))
    assert watch.findings() == []


def test_devices_come_in_the_order_of_what_they_strand(tmp_path: Path) -> None:
    watch, _, _ = watched(tmp_path, lambda device: None, steps=1)
    for step in range(1, 100):
        readings = [reading(_PEAK + step * grows * MIB, f"cuda:{grows}") for grows in (2, 5, 3)]
        watch.at_mark(MarkPoint("step", TrainingPosition(step=step), readings))
    assert [finding.device for finding in watch.findings()] == ["cuda:5", "cuda:3", "cuda:2"]
    assert "memtriage.compact()" not in str([finding.evidence for finding in watch.findings()])


def test_compaction_is_told_by_what_it_moves_and_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    of_device = DeviceCompaction(
        "cuda:0", before=Use(30 * MIB, 90 * MIB), predicted=Use(30 * MIB, 32 * MIB), after=None,
        moved=3 * MIB, storages=7,
    )  # fmt: skip
    monkeypatch.setattr(
        api, "compact", lambda device, dry_run: Compaction((of_device,) * (device == "cuda:0"))
    )
    assert predicted_compaction("cuda:0") == (
        "would move 3.0 MiB in 7 storages, and lower reserved from 90.0 MiB to 32.0 MiB"
    )
    assert predicted_compaction("cuda:1") is None


def test_a_device_that_does_not_grow_is_left_alone(tmp_path: Path) -> None:
    def predict(device: str) -> str | None:
        raise AssertionError(device)

    watch, asked, _ = watched(tmp_path, predict, grows=0)
    assert (asked.times, watch.findings()) == (0, [])


def test_a_look_that_fails_is_a_note(tmp_path: Path) -> None:
    def predict(device: str) -> Any:
        raise RuntimeError("no snapshot")

    watch, _, record = watched(tmp_path, predict)
    record.close()
    notes = [json.loads(line) for line in (tmp_path / "rank.jsonl").read_text().splitlines()]
    assert any("no snapshot" in str(note) for note in notes)
    assert len(watch.findings()[0].evidence) == 2
