"""`memtriage.metrics`, `serve_metrics` and `otel_gauges` in a process that trains."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memtriage
from memtriage.report.monitoring.prometheus import MetricsServer
from support import censuses

pytest.importorskip("prometheus_client")
sdk = pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402


def train(steps: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = memtriage.serve_metrics(0)
    assert made is not None
    with made:
        yield made


def steps_served(url: str) -> list[float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "memtriage_steps"
    ]


def test_every_way_tells_the_same_and_nothing_without_a_watch(
    tmp_path: Path, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    censuses.leave_out(monkeypatch)
    reader = InMemoryMetricReader()
    memtriage.otel_gauges(sdk.MeterProvider([reader]))
    assert memtriage.metrics() == {}
    assert steps_served(server.url) == []
    with memtriage.watch(tmp_path, quiet=True):
        train(3)
        values = memtriage.metrics()
        assert steps_served(server.url) == [3]
        data = reader.get_metrics_data()
        assert data is not None
        told = {
            metric.name: metric.data.data_points
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
        }
    assert values["memtriage/host/rss_bytes"] > 0 and values["memtriage/cpu/allocated_bytes"] > 0
    assert [point.value for point in told["memtriage.steps"]] == [3]
    assert told["memtriage.memory.allocated"][0].value == values["memtriage/cpu/allocated_bytes"]
    assert memtriage.metrics() == {}
    assert steps_served(server.url) == []


def test_importing_memtriage_loads_none_of_it() -> None:
    code = (
        "import sys, memtriage; "
        "loaded = [name for name in sys.modules if 'metric' in name or name.split('.')[0] in "
        "('prometheus_client', 'opentelemetry', 'tensorboard', 'wandb', 'mlflow', 'wsgiref')]; "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_watched_process_loads_none_of_it_unless_asked(tmp_path: Path) -> None:
    code = (
        "import sys, memtriage\n"
        "with memtriage.watch(sys.argv[1], quiet=True): memtriage.mark('x')\n"
        "assert not [name for name in sys.modules if name.startswith('memtriage.report.monitoring')]"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
