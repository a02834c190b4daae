"""The Grafana dashboard over the gauges. `grafana.json` is what Grafana exports and imports."""

from __future__ import annotations

from importlib.resources import files


def dashboard() -> str:
    """The dashboard as JSON, to import into Grafana."""
    return (files(__package__) / "grafana.json").read_text(encoding="utf-8")
