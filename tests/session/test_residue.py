"""What phases leave: one finding per device and holder, with its first phase and its latest figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.session.record import SessionRecord
from memtriage.session.residue import PhaseResidue
from support.paths import named


def left(holder: str, nbytes: int | None, phase: Any, device: str = "cuda:0") -> Finding:
    return Finding(kind="residue", device=device, holder_path=named(holder), bytes=nbytes, phase=phase)


def test_a_holder_has_one_finding_over_all_phases(tmp_path: Path) -> None:
    record = SessionRecord(tmp_path / "rank.jsonl")
    progress: Any = SimpleNamespace(position=TrainingPosition(step=7))
    residue = PhaseResidue(3, progress, record)
    assert residue.findings() == []
    residue.add([left("cache", 5, "evaluation"), left("rest", None, "evaluation")])
    progress.position = TrainingPosition(step=9)
    residue.add([left("cache", 4, "setup"), left("cache", 6, "setup", "cuda:1"), left("late", 8, "setup")])
    assert [
        (each.device, each.holder, each.bytes, each.phase, each.rank, each.step)
        for each in residue.findings()
    ] == [
        ("cuda:0", "late", 8, "setup", 3, 9),
        ("cuda:1", "cache", 6, "setup", 3, 9),
        ("cuda:0", "cache", 4, "evaluation", 3, 9),
        ("cuda:0", "rest", None, "evaluation", 3, 7),
    ]
    record.close()
    written = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert [(line["holder"], line["phase"], line["step"]) for line in written] == [
        ("cache", "evaluation", 7),
        ("rest", "evaluation", 7),
        ("cache", "evaluation", 9),
        ("cache", "setup", 9),
        ("late", "setup", 9),
    ]
    assert not any(line.get("final") for line in written)
