"""`memtriage metrics`: list the names of the metrics, or print their Grafana dashboard."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def metrics(
    grafana: Annotated[bool, typer.Option("--grafana", help="Print a Grafana dashboard to import.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> int:
    """List the exported metrics; print a Grafana dashboard."""
    if grafana:
        from memtriage.report.monitoring.gauges import dashboard

        print(dashboard(), end="")
        return 0
    from memtriage.report.monitoring.gauges import GAUGES

    if json:
        from msgspec.json import encode

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
        sys.stdout.buffer.write(encode({"schema": 1, "metrics": rows}) + b"\n")
        return 0
    from memtriage.report.console import Page, console_for

    page = Page(console_for(sys.stdout))
    for gauge in GAUGES:
        page.line((f"{gauge.prometheus}{{{','.join(gauge.labels)}}}", "bold"), indent=4)
        page.line((f"    {gauge.help}", ""), indent=4)
    return 0
