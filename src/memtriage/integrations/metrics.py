"""Metrics of the watch that is on in this process: `memtriage.metrics`, `serve_metrics`, `otel_gauges`."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

from memtriage.model.run_status import RunStatus
from memtriage.model.version import __version__
from memtriage.process import active
from memtriage.process.messages import complain
from memtriage.report.monitoring.samples import samples
from memtriage.report.monitoring.samples import scalars as named_scalars
from memtriage.store.layout import identify

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from memtriage.report.monitoring.prometheus import MetricsServer


def statuses() -> list[RunStatus]:
    """Return the current status of this process's rank; empty while nothing watches it."""
    return [] if active.session is None else active.session.statuses()


def metrics() -> dict[str, float]:
    """Return the memory metrics by name, for the logger of a training loop. Empty without a watch.

        wandb.log({"loss": loss, **memtriage.metrics()})

    Names are like `memtriage/cuda_0/allocated_bytes`; docs/metrics.md lists them. Figures are those of the
    last mark, in bytes; nothing is synchronized, and no census is taken. A call takes 1 or 2 ms; about every
    ten seconds, the classes of host memory add 10 to 30 ms.
    """
    return named_scalars(sample for status in statuses() for sample in samples(status))


def serve_metrics(port: int = 9400, host: str = "127.0.0.1") -> MetricsServer | None:
    """Serve Prometheus metrics of this process over HTTP, until the process ends or `close()` is called.

    While nothing watches the process (`memtriage run`, `memtriage.watch()`) the page is empty. `memtriage run
    --metrics PORT` does the same without code.

    Args:
        port: each rank of a machine listens at this port plus its local rank. 0 picks a free port: see the
            result's `url`.
        host: by default only this machine can connect; with `0.0.0.0` any machine that reaches it.

    Returns:
        The server, with its `url`. None if the port is taken or prometheus-client is not installed: one line
        on stderr says so, and the program continues.
    """
    from memtriage.report.monitoring.prometheus import rank_address, serve

    identity = identify(os.environ, pid=os.getpid(), time_s=time.time())
    return serve(statuses, rank_address(host, port, identity), partial(complain, "memtriage"))


def otel_gauges(meter_provider: MeterProvider | None = None) -> None:
    """Make one OpenTelemetry observable gauge per metric. Call it once in a process.

    Args:
        meter_provider: yours, with its readers and exporters; None for the global one.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    from memtriage.report.monitoring.otel import observe

    observe(statuses, meter_provider, __version__)
