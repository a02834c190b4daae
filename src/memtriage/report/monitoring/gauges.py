"""The table of gauges: the one source of every exporter, of the dashboard's test and of docs/metric-names.md.

Names have dots here. Prometheus has `memtriage_memory_allocated_bytes` for `memtriage.memory.allocated`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final, Literal

Unit = Literal["bytes", "seconds", "steps"]
GaugeLabel = Literal["rank", "device", "class", "owner", "mark", "holder"]

SCALAR_PREFIX: Final = "memtriage/"
"""Loggers of training put names that begin alike into one group."""
_DEVICE: Final[tuple[GaugeLabel, ...]] = ("rank", "device")
_SUFFIXES: Final[dict[Unit, str]] = {"bytes": "_bytes", "seconds": "_seconds", "steps": ""}
_UCUM: Final[dict[Unit, str]] = {"bytes": "By", "seconds": "s", "steps": "{step}"}


@dataclass(frozen=True, slots=True)
class Gauge:
    """One quantity.

    Attributes:
        name: dotted, as OpenTelemetry names instruments.
        help: what it is, in a sentence.
        labels: what tells its series apart, in the order in which a `Sample` has their values.
        unit: of its values.
        scalar: its name for loggers of training (TensorBoard and the like), with the labels to fill in; None
            where it would be too many curves or none.
    """

    name: str
    help: str
    labels: tuple[GaugeLabel, ...] = _DEVICE
    unit: Unit = "bytes"
    scalar: str | None = None

    @property
    def prometheus(self) -> str:
        """The name as Prometheus has it: words joined by underscores, the unit at the end.

        >>> Gauge("memtriage.memory.allocated", "").prometheus
        'memtriage_memory_allocated_bytes'
        """
        return self.name.replace(".", "_") + _SUFFIXES[self.unit]

    @property
    def scalar_name(self) -> str | None:
        """The name for loggers of training, with the labels to fill in.

        >>> Gauge("memtriage.memory.allocated", "", scalar="{device}/allocated_bytes").scalar_name
        'memtriage/{device}/allocated_bytes'
        """
        return None if self.scalar is None else f"{SCALAR_PREFIX}{self.scalar}"

    @property
    def ucum(self) -> str:
        """The unit as OpenTelemetry writes it."""
        return _UCUM[self.unit]


ALLOCATED: Final = Gauge(
    "memtriage.memory.allocated",
    "Bytes of live blocks at the last mark; on cpu: what malloc has handed out.",
    scalar="{device}/allocated_bytes",
)
RESERVED: Final = Gauge(
    "memtriage.memory.reserved",
    "Bytes that the allocator has from the driver at the last mark; on cpu: what malloc has from the kernel.",
    scalar="{device}/reserved_bytes",
)
REQUESTED: Final = Gauge(
    "memtriage.memory.requested",
    "Bytes asked for by live blocks at the last mark: allocated less its rounding.",
    scalar="{device}/requested_bytes",
)
OUTSIDE: Final = Gauge(
    "memtriage.memory.outside",
    "Bytes in use on the device that this process's allocator has not reserved: context, NCCL, others.",
    scalar="{device}/outside_bytes",
)
STRANDED: Final = Gauge(
    "memtriage.memory.stranded",
    "Reserved bytes that are free but cannot go back to the driver: something alive pins their segment.",
    scalar="{device}/stranded_bytes",
)
PEAK_ALLOCATED: Final = Gauge(
    "memtriage.memory.peak_allocated",
    "Highest allocated bytes since the allocator's start, or since the script last reset its peaks.",
    scalar="{device}/peak_allocated_bytes",
)
PASSING: Final = Gauge(
    "memtriage.memory.passing",
    "Room that a step needs: how far memory rose between two marks and fell again.",
    scalar="{device}/passing_bytes",
)
LIMIT: Final = Gauge(
    "memtriage.memory.limit",
    "Bytes that the process may have: the device's memory or the cap set; of the host, the tightest limit.",
)
GROWTH: Final = Gauge(
    "memtriage.memory.growth_per_step",
    "Bytes per step by which the lowest figures of the recent steps rise; 0 when they do not.",
    scalar="{device}/growth_per_step_bytes",
)
LEAK: Final = Gauge(
    "memtriage.leak.growth_per_step",
    "Bytes per step that a named holder keeps more, as far as is proven; it may still stop.",
    (*_DEVICE, "holder"),
)
HOST_RSS: Final = Gauge(
    "memtriage.host.rss",
    "Resident set of the process.",
    scalar="{device}/rss_bytes",
)
HOST_PINNED: Final = Gauge(
    "memtriage.host.pinned",
    "Page-locked bytes that PyTorch's pinned-memory allocator has.",
    scalar="{device}/pinned_bytes",
)
HOST_CLASS: Final = Gauge(
    "memtriage.host.class",
    "Resident bytes by class, the rows of the host ledger; they sum to the resident set.",
    (*_DEVICE, "class"),
    scalar="{device}/{class}_bytes",
)
LEDGER: Final = Gauge(
    "memtriage.ledger.size",
    "Rows of the closed ledgers of the last census, by owner; a device's rows sum to what is in use.",
    (*_DEVICE, "class", "owner"),
)
LEDGER_TIME: Final = Gauge(
    "memtriage.ledger.time", "Unix time of the census that made the ledgers.", ("rank",), "seconds"
)
MARK_ALLOCATED: Final = Gauge(
    "memtriage.mark.allocated",
    "Allocated bytes at the last mark of each name.",
    (*_DEVICE, "mark"),
)
MARK_RESERVED: Final = Gauge(
    "memtriage.mark.reserved",
    "Reserved bytes at the last mark of each name.",
    (*_DEVICE, "mark"),
)
MARK_TIME: Final = Gauge("memtriage.mark.time", "Unix time of the last mark.", ("rank",), "seconds")
STEPS: Final = Gauge("memtriage.steps", "Optimizer steps completed.", ("rank",), "steps")

GAUGES: Final[tuple[Gauge, ...]] = (
    ALLOCATED, RESERVED, REQUESTED, OUTSIDE, STRANDED, PEAK_ALLOCATED, PASSING, LIMIT, GROWTH, LEAK,
    HOST_RSS, HOST_PINNED, HOST_CLASS, LEDGER, LEDGER_TIME, MARK_ALLOCATED, MARK_RESERVED, MARK_TIME, STEPS,
)  # fmt: skip


def dashboard() -> str:
    """Return the dashboard as JSON, to import into Grafana."""
    return (files(__package__) / "grafana.json").read_text(encoding="utf-8")
