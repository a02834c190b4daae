"""`memtriage metrics`, and `memtriage report --prometheus` over several ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memtriage.cli import app
from memtriage.model.marks import Mark
from memtriage.report.monitoring.gauges import GAUGES
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import Start
from memtriage.store.writer import RankWriter
from support.refusals import Refused


def write_rank(top: Path, rank: int) -> None:
    """A rank that still runs."""
    with RankWriter(record_path(top, RankIdentity("job", 0, rank, 2, rank))) as writer:
        writer.write("start", Start(run_id="job", rank=rank, world_size=2, time=1.0, argv=["train.py"]))
        place = {"name": "step", "microbatch": 1, "rank": rank, "time_s": 2.0, "device": f"cuda:{rank}"}
        writer.write("mark", Mark(**place, step=1, allocated=(rank + 1) << 30))


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


def test_a_run_in_progress_as_prometheus_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1)
    assert app.main(["report", str(tmp_path), "--prometheus"]) == 0
    families = {
        family.name: family for family in parser.text_string_to_metric_families(capsys.readouterr().out)
    }
    allocated = families["memtriage_memory_allocated_bytes"].samples
    assert [(sample.labels, sample.value) for sample in allocated] == [
        ({"rank": "0", "device": "cuda:0"}, 1 << 30),
        ({"rank": "1", "device": "cuda:1"}, 2 << 30),
    ]


def test_without_the_library_the_line_says_what_to_install(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    write_rank(tmp_path, 0)
    assert "pip install 'memtriage[prometheus]'" in refused("report", str(tmp_path), "--prometheus")
