"""OpenTelemetry: the user's own provider collects every gauge, with units and attributes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from memtriage.model.run_status import RunStatus
from memtriage.report.monitoring import otel
from memtriage.report.monitoring.gauges import GAUGES
from support.runs import GIB
from support.statuses import status

pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(otel.time, "monotonic", lambda: self.now)


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Metrics by name; all are of one scope."""
    data = reader.get_metrics_data()
    scopes = (
        []
        if data is None
        else [scope for resource_metric in data.resource_metrics for scope in resource_metric.scope_metrics]
    )
    assert {(scope.scope.name, scope.scope.version) for scope in scopes} <= {("memtriage", "1.2")}
    return {metric.name: metric for scope in scopes for metric in scope.metrics}


def observed(
    statuses: list[RunStatus], monkeypatch: pytest.MonkeyPatch
) -> tuple[InMemoryMetricReader, Clock, list[int]]:
    reader = InMemoryMetricReader()
    asked: list[int] = []

    def source() -> list[RunStatus]:
        asked.append(1)
        return statuses

    otel.observe(source, MeterProvider([reader]), "1.2")
    return reader, Clock(monkeypatch), asked


def test_every_gauge_is_collected_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _, asked = observed([status()], monkeypatch)
    metrics = collected(reader)
    assert metrics.keys() == {gauge.name for gauge in GAUGES}
    assert {name: metric.unit for name, metric in metrics.items()} == {
        gauge.name: gauge.ucum for gauge in GAUGES
    }
    assert asked == [1]  # one instant for all instruments
    (point,) = [
        point for point in metrics["memtriage.memory.allocated"].data.data_points
        if point.attributes["memtriage.device"] == "cuda:0"
    ]  # fmt: skip
    assert point.value == 4 * GIB
    assert dict(point.attributes) == {"memtriage.rank": 0, "memtriage.device": "cuda:0"}
    (leak,) = metrics["memtriage.leak.growth_per_step"].data.data_points
    assert "memtriage.holder" in leak.attributes


def test_each_collection_tells_of_its_own_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [status(steps=1)]
    reader, clock, _ = observed(statuses, monkeypatch)
    assert collected(reader)["memtriage.steps"].data.data_points[0].value == 1
    statuses[:] = [status(steps=2)]
    clock.now += 10
    assert collected(reader)["memtriage.steps"].data.data_points[0].value == 2
    statuses.clear()  # the watch has ended
    clock.now += 10
    assert not any(metric.data.data_points for metric in collected(reader).values())


def test_the_global_provider_is_the_default() -> None:
    from opentelemetry import metrics
    from opentelemetry.metrics import _internal

    reader = InMemoryMetricReader()
    before = _internal._METER_PROVIDER
    _internal._METER_PROVIDER = MeterProvider([reader])
    try:
        assert metrics.get_meter_provider() is _internal._METER_PROVIDER
        otel.observe(lambda: [status()], None, "1.2")
    finally:
        _internal._METER_PROVIDER = before
    assert "memtriage.steps" in collected(reader)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"pip install 'memtriage\[otel\]'"):
        otel.observe(list, None, "1.2")
