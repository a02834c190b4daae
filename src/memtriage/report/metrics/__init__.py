"""What a run stands at, as gauges: one table of them, for every system that collects metrics."""
