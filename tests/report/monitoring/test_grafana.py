"""The dashboard refers to nothing that is not served, and is shaped as Grafana imports it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from memtriage.report.monitoring.gauges import GAUGES, dashboard

OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""
GAUGE = {gauge.prometheus: gauge for gauge in GAUGES}
FUNCTIONS = {"or", "max", "min", "sum", "count", "deriv", "time", "sort_desc", "by"}

DASHBOARD: dict[str, Any] = json.loads(dashboard())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
VARIABLES = {entry["name"]: entry for entry in DASHBOARD["templating"]["list"]}


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Every metric of an expression, with the labels that its selector asks for."""
    matches = re.findall(r"(memtriage_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", inside))) for name, inside in matches]


@pytest.mark.parametrize(("title", "target"), QUERIES)
def test_queries_use_only_metrics_and_labels_that_exist(title: str, target: dict[str, Any]) -> None:
    expression = target["expr"]
    used = selectors(expression)
    assert used
    labels = set(OF_PROMETHEUS)
    for name, asked in used:
        assert name in GAUGE, name
        assert asked <= {*GAUGE[name].labels, *OF_PROMETHEUS}, name
        labels |= set(GAUGE[name].labels)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
    bare = re.sub(r"\"[^\"]*\"|\{[^}]*\}|by \([^)]*\)|\[5m\]", "", expression)
    assert set(re.findall(r"[a-z_]+", bare)) - FUNCTIONS == {name for name, _ in used}
    assert expression.count("(") == expression.count(")")


def test_variables_ask_for_labels_that_exist() -> None:
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for name in ("job", "rank", "device"):
        query = VARIABLES[name]["query"]["query"]
        (found,) = re.findall(r"label_values\((memtriage_\w+)(?:\{[^}]*\})?, (\w+)\)", query)
        assert found[0] in GAUGE
        assert found[1] == name and name in {*GAUGE[found[0]].labels, *OF_PROMETHEUS}
    for _, target in QUERIES:
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= VARIABLES.keys()


def test_every_quantity_is_shown() -> None:
    shown = {name for _, target in QUERIES for name, _ in selectors(target["expr"])}
    assert shown == GAUGE.keys()


def test_it_has_the_shape_that_grafana_imports() -> None:
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    idents = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(idents)) == len(idents)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] >= 1
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "stat", "bargauge", "table"}
        assert panel["title"] and panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in {"bytes", "s", "none", "percentunit"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
