"""From where a rank stands to the values of the gauges. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from memtriage.model.run_status import RunStatus
from memtriage.report.monitoring import gauges
from memtriage.report.monitoring.gauges import SCALAR_PREFIX, Gauge, GaugeLabel

HOST: Final = "host"
_MOST_LEAKS: Final = 16
"""Holders that get a series of their own, the fastest growing first."""
_NOT_IN_SCALARS: Final = re.compile(r"[^A-Za-z0-9_.-]+")


class Sample(NamedTuple):
    """One value of a gauge; `labels` are in the order of `gauge.labels`."""

    gauge: Gauge
    labels: tuple[str, ...]
    value: float

    def named_labels(self) -> dict[GaugeLabel, str]:
        """Return the values of the labels by name."""
        return dict(zip(self.gauge.labels, self.labels, strict=True))


def samples(status: RunStatus) -> list[Sample]:
    """Return the value of every gauge that is known. What is unknown has no sample, rather than one of 0."""
    rank = str(status.rank or 0)
    return [
        Sample(gauge, (rank, *labels), value) for gauge, labels, value in _values(status) if value is not None
    ]


_Value = tuple[Gauge, tuple[str, ...], float | None]


def _values(status: RunStatus) -> Iterator[_Value]:
    for mark in status.latest:
        yield gauges.ALLOCATED, (mark.device,), mark.allocated
        yield gauges.RESERVED, (mark.device,), mark.reserved
        yield gauges.REQUESTED, (mark.device,), mark.requested
        yield gauges.OUTSIDE, (mark.device,), mark.outside
    for gauge, by_device in (
        (gauges.STRANDED, status.stranded),
        (gauges.PEAK_ALLOCATED, status.peak_allocated),
        (gauges.PASSING, status.passing),
        (gauges.LIMIT, status.limits),
        (gauges.GROWTH, status.growth),
    ):
        for device, value in by_device.items():
            yield gauge, (device,), value
    yield gauges.HOST_RSS, (HOST,), status.host_rss
    yield gauges.HOST_PINNED, (HOST,), status.host_pinned
    for name, value in status.host_classes.items():
        yield gauges.HOST_CLASS, (HOST, name), value
    yield from _leaks(status)
    yield from _ledgers(status)
    for mark in status.named:
        yield gauges.MARK_ALLOCATED, (mark.device, mark.name), mark.allocated
        yield gauges.MARK_RESERVED, (mark.device, mark.name), mark.reserved
    yield gauges.MARK_TIME, (), status.marked_at
    yield gauges.STEPS, (), status.steps


def _leaks(status: RunStatus) -> Iterator[_Value]:
    rates: dict[tuple[str, str], int] = {}
    for leak in status.leaks:
        if leak.bytes_per_step is not None and leak.certainty != "suspected":
            key = (leak.device, leak.holder or "")
            rates[key] = rates.get(key, 0) + leak.bytes_per_step
    fastest = sorted(rates.items(), key=lambda entry: -entry[1])
    for labels, rate in fastest[:_MOST_LEAKS]:
        yield gauges.LEAK, labels, rate


def _ledgers(status: RunStatus) -> Iterator[_Value]:
    for ledger in status.ledgers:
        sums: dict[tuple[str, str], int] = {}
        for row in ledger.rows:
            key = (row.row, row.owner or "")
            sums[key] = sums.get(key, 0) + row.bytes
        for (row_name, owner), value in sums.items():
            yield gauges.LEDGER, (ledger.device, row_name, owner), value
    yield gauges.LEDGER_TIME, (), status.ledgers_at


def scalars(samples: Iterable[Sample]) -> dict[str, float]:
    """Values by name, for loggers of training: `memtriage/cuda_0/allocated_bytes`.

    The names have letters, digits, and `_ . - /` only, which every such logger takes. Ranks other than the
    first come as `memtriage/rank_3/cuda_3/allocated_bytes`.
    """
    named = {}
    for sample in samples:
        if sample.gauge.scalar is None:
            continue
        labels: dict[str, str] = {
            name: _NOT_IN_SCALARS.sub("_", text) for name, text in sample.named_labels().items()
        }
        rank = "" if labels["rank"] == "0" else f"rank_{labels['rank']}/"
        named[f"{SCALAR_PREFIX}{rank}{sample.gauge.scalar.format_map(labels)}"] = sample.value
    return named
