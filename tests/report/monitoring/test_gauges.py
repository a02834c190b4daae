"""The table of gauges: names as each system wants them, and the same in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memtriage.report.monitoring.gauges import GAUGES, Gauge

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_documentation_names_no_other_metric() -> None:
    named = re.findall(r"\bmemtriage_[a-z_]+", DOCS.read_text(encoding="utf-8"))
    assert set(named) <= {gauge.prometheus for gauge in GAUGES}


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_opentelemetrys_name_follows_from_prometheus_as_the_page_says(gauge: Gauge) -> None:
    without_unit = gauge.prometheus.removesuffix("_bytes").removesuffix("_seconds")
    assert gauge.name == without_unit.replace("_", ".", 2)


def test_names_are_told_apart() -> None:
    assert len({gauge.name for gauge in GAUGES}) == len(GAUGES)
    assert len({gauge.prometheus for gauge in GAUGES}) == len(GAUGES)
    scalars = [gauge.scalar for gauge in GAUGES if gauge.scalar is not None]
    assert len(set(scalars)) == len(scalars)


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_names_follow_the_conventions(gauge: Gauge) -> None:
    assert re.fullmatch(r"memtriage(\.[a-z][a-z0-9_]*)+", gauge.name)
    assert "bytes" not in gauge.name  # OpenTelemetry: the unit is no part of the name
    assert re.fullmatch(r"memtriage_[a-z0-9_]+", gauge.prometheus)
    assert gauge.prometheus.endswith({"bytes": "_bytes", "seconds": "_seconds", "steps": "steps"}[gauge.unit])
    assert not any(other.name.startswith(f"{gauge.name}.") for other in GAUGES)  # no name is a namespace
    assert gauge.labels[0] == "rank"
    assert gauge.help.endswith(".") and len(gauge.help) <= 120 and "|" not in gauge.help
    wanted = re.findall(r"\{(\w+)\}", gauge.scalar or "")
    assert set(wanted) <= set(gauge.labels)
