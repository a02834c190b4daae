"""`memtriage snapshot --what-if`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtriage.cli.app import main

RECORDED = Path(__file__).parents[1] / "data" / "snapshots" / "oom.pickle.gz"


def test_a_table_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(RECORDED), "--what-if"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (avoided,) = [line for line in lines if "expandable_segments:True" in line]
    assert "1 out-of-memory error avoided" in avoided
    assert main(["snapshot", str(RECORDED), "--what-if", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    fits = {scenario["name"]: scenario["fits"] for scenario in device["scenarios"]}
    assert not fits["as recorded"]
    assert fits["expandable_segments:True"]
