"""Metrics of the watch that is on in this process: what `memtriage.metrics` and its like do."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import memtriage
from memtriage import _active
from memtriage._messages import complain
from memtriage.model.run_status import RunStatus
from memtriage.report.metrics.samples import samples
from memtriage.report.metrics.samples import scalars as named_scalars
from memtriage.store.layout import identify

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from memtriage.report.metrics.prometheus import MetricsServer


def standings() -> list[RunStatus]:
    """Where the rank of this process stands; empty while nothing watches it."""
    return [] if _active.session is None else _active.session.statuses()


def scalars() -> dict[str, float]:
    """The gauges by name, for a logger of training."""
    return named_scalars(sample for status in standings() for sample in samples(status))


def serve(port: int, host: str) -> MetricsServer | None:
    """Serves at the port plus the local rank; None, with a line on stderr, where that cannot be done."""
    from memtriage.report.metrics.prometheus import rank_address, serve

    identity = identify(os.environ, pid=os.getpid(), time_s=time.time())
    return serve(standings, rank_address(host, port, identity), _say)


def observe(provider: MeterProvider | None) -> None:
    """Makes the observable gauges."""
    from memtriage.report.metrics.otel import observe

    observe(standings, provider, memtriage.__version__)


def _say(text: str) -> None:
    complain("memtriage", text)
