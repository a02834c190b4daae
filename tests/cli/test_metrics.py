"""`memtriage metrics`: the table, as JSON too, and the dashboard."""

from __future__ import annotations

import json

import pytest

from memtriage.cli import app
from memtriage.report.monitoring.gauges import GAUGES


def test_the_table_has_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["metrics"]) == 0
    out = capsys.readouterr().out
    for gauge in GAUGES:
        assert f"{gauge.prometheus}{{{','.join(gauge.labels)}}} {gauge.help}" in " ".join(out.split())


def test_the_table_as_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert app.main(["metrics", "--json"]) == 0
    told = json.loads(capfdbinary.readouterr().out)
    assert told["schema"] == 1
    assert [metric["prometheus"] for metric in told["metrics"]] == [gauge.prometheus for gauge in GAUGES]
    assert told["metrics"][0]["scalar"] == "memtriage/{device}/allocated_bytes"


def test_the_dashboard_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["metrics", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "memtriage"
