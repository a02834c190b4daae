"""`memtriage metrics`: list the names of the metrics, or print their Grafana dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memtriage.cli.output import answer

if TYPE_CHECKING:
    from rich.console import Console


def metrics(
    grafana: Annotated[bool, typer.Option("--grafana", help="Print a Grafana dashboard to import.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> int:
    """List the exported metrics; print a Grafana dashboard."""
    from memtriage.report.monitoring.gauges import GAUGES, dashboard

    if grafana:
        print(dashboard(), end="")
        return 0
    rows = [
        {
            "prometheus": gauge.prometheus,
            "opentelemetry": gauge.name,
            "scalar": gauge.scalar_name,
            "unit": gauge.unit,
            "labels": gauge.labels,
            "help": gauge.help,
        }
        for gauge in GAUGES
    ]

    def render(console: Console) -> None:
        from memtriage.report.console import Page

        page = Page(console)
        for gauge in GAUGES:
            page.line((f"{gauge.prometheus}{{{','.join(gauge.labels)}}}", "bold"), indent=4)
            page.line((f"    {gauge.help}", ""), indent=4)

    return answer({"schema": 1, "metrics": rows}, json, render)
