"""Gauges for OpenTelemetry: observable instruments on the user's own MeterProvider."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from memtriage.model.run_status import RunStatus
from memtriage.process.optional import needs
from memtriage.report.monitoring.gauges import GAUGES, Gauge
from memtriage.report.monitoring.samples import Sample, samples

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

_SAME_COLLECTION_S: Final = 0.5
"""Instruments are asked one by one; within this time they are told of the same instant."""


def observe(source: Callable[[], Iterable[RunStatus]], provider: MeterProvider | None, version: str) -> None:
    """Make an observable gauge of every entry of the table.

    Args:
        source: where ranks stand, asked once for each collection.
        provider: whose meter is used; None for the global one.
        version: of memtriage, for the instrumentation scope.

    Raises:
        ImportError: opentelemetry-api is not installed; the text is one line for the user.
    """
    with needs("opentelemetry", "otel", "otel_gauges()"):
        from opentelemetry import metrics
    meter = (provider or metrics.get_meter_provider()).get_meter("memtriage", version)
    collection = _Collection(source)
    for gauge in GAUGES:
        meter.create_observable_gauge(
            gauge.name, [_callback(gauge, collection)], unit=gauge.ucum, description=gauge.help
        )


class _Collection:
    """The samples of one collection, for all instruments."""

    def __init__(self, source: Callable[[], Iterable[RunStatus]]) -> None:
        self._source = source
        self._taken_s = -_SAME_COLLECTION_S
        self._samples: list[Sample] = []

    def of(self, gauge: Gauge) -> list[Sample]:
        now = time.monotonic()
        if now - self._taken_s >= _SAME_COLLECTION_S:
            self._samples = [sample for status in self._source() for sample in samples(status)]
            self._taken_s = now
        return [sample for sample in self._samples if sample.gauge is gauge]


def _callback(gauge: Gauge, collection: _Collection) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observations(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(
                sample.value,
                {
                    f"memtriage.{label}": int(text) if label == "rank" else text
                    for label, text in sample.named_labels().items()
                },
            )
            for sample in collection.of(gauge)
        ]

    return observations
