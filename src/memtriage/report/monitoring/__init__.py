"""Gauges of a run: one table of them (`gauges.py`), for every system that collects metrics.

`samples.py` has their values; the exporters are Prometheus and OpenTelemetry.
"""
