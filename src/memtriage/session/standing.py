"""Where a watch stands, for whoever asks while it runs: the endpoint, gauges, the loggers of frameworks.

Marks leave their readings here, which costs them a fraction of a microsecond; everything else is done when
somebody asks, in the thread that asks. No stream is synchronised, no census or allocator snapshot taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from memtriage.account.gpu_ledger import STRANDED
from memtriage.account.host_reading import read_host
from memtriage.diagnose.growth import Series, policy_for, recent_growth
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.model.standing import MOST_NAMES, Standing, rows_of
from memtriage.observe import cuda, host
from memtriage.observe.cgroup import host_limit
from memtriage.observe.counters import Reading

_HOST_SHARE: Final = 0.002
"""Share of the time that readings of the address space may take: one takes 10 to 30 ms."""


class _At:
    """The readings of a mark. `readings` is the list that the mark made, which nobody changes."""

    __slots__ = ("microbatch", "name", "readings", "step", "time_s")

    def __init__(self, name: str, time_s: float, step: int, microbatch: int, readings: list[Reading]) -> None:
        self.name = name
        self.time_s = time_s
        self.step = step
        self.microbatch = microbatch
        self.readings = readings


class Board:
    """Takes what a watch comes to know, and tells it as a `Standing`.

    What the marks leave may be read from any thread meanwhile: every entry is replaced as a whole.

    Args:
        rank: of this process.
        started_at: Unix time at which the watch began, in seconds.
    """

    def __init__(self, rank: int | None, started_at: float) -> None:
        self._rank = rank
        self._started_at = started_at
        self._last: dict[str, tuple[_At, Reading]] = {}
        self._named: dict[str, _At] = {}
        self._newest: _At | None = None
        self._ledgers: tuple[tuple[Ledger, ...], float | None] = ((), None)
        self._leaks: tuple[Finding, ...] = ()
        self._classes: dict[str, int] = {}
        self._classes_due_s = 0.0

    # --- from the watch -------------------------------------------------------------------------------------

    def mark(self, name: str, time_s: float, step: int, microbatch: int, readings: list[Reading]) -> None:
        """A mark was made, `time_s` seconds after the watch began."""
        at = self._newest = _At(name, time_s, step, microbatch, readings)
        for reading in readings:
            if reading.allocated is not None:  # malloc is not read at every mark
                self._last[reading.device] = (at, reading)
        if name in self._named or len(self._named) < MOST_NAMES:
            self._named[name] = at

    def ledgers(self, ledgers: Sequence[Ledger], time_s: float) -> None:
        """A census has made ledgers."""
        self._ledgers = (tuple(ledgers), self._started_at + time_s)

    def leaks(self, leaks: Sequence[Finding]) -> None:
        """What grows, as far as it has been named."""
        self._leaks = tuple(leaks)

    # --- for whoever asks -----------------------------------------------------------------------------------

    def standings(self, growing: Mapping[str, Series], passing: Mapping[str, int]) -> list[Standing]:
        """What is known now; nothing before the first mark.

        The resident set, page-locked memory, limits and now and then the classes of host memory are read
        here; all else is as of the last mark.

        Args:
            growing: by device, its counter at the end of steps.
            passing: as a standing has it.
        """
        newest = self._newest
        if newest is None:
            return []
        latest = dict(self._last)
        ledgers, ledgers_at = self._ledgers
        pinned = host.pinned()
        growths = {device: recent_growth(series, policy_for(device)) for device, series in growing.items()}
        standing = Standing(
            rank=self._rank,
            steps=newest.step,
            marked_at=self._started_at + newest.time_s,
            latest=tuple(self._as_mark(at, reading) for at, reading in latest.values()),
            named=tuple(
                self._as_mark(at, reading)
                for at in tuple(self._named.values())
                for reading in at.readings
                if reading.allocated is not None
            ),
            stranded=_stranded([reading for _, reading in latest.values()], ledgers),
            peak_allocated={
                device: reading.counters.peak_allocated
                for device, (_, reading) in latest.items()
                if reading.counters is not None and reading.counters.peak_allocated is not None
            },
            passing=dict(passing),
            limits=_limits(latest),
            growth={device: growth for device, growth in growths.items() if growth is not None},
            host_rss=host.rss(),
            host_pinned=None if pinned is None else pinned.owned,
            host_classes=self._host_classes(),
            ledgers=ledgers,
            ledgers_at=ledgers_at,
            leaks=self._leaks,
        )
        return [standing]

    def _as_mark(self, at: _At, reading: Reading) -> Mark:
        return Mark(
            name=at.name,
            step=at.step,
            microbatch=at.microbatch,
            rank=self._rank,
            time_s=at.time_s,
            device=reading.device,
            allocated=reading.allocated,
            reserved=reading.reserved,
            requested=reading.requested,
            outside=reading.outside,
        )

    def _host_classes(self) -> dict[str, int]:
        """The host ledger without a census: new, or the last one while another would cost too much."""
        now = time.perf_counter()
        if now >= self._classes_due_s:
            reading = read_host()
            if reading is not None:
                self._classes = rows_of(reading.ledger(None))
            took = time.perf_counter() - now
            self._classes_due_s = now + took / _HOST_SHARE
        return self._classes


def _stranded(readings: Sequence[Reading], ledgers: Sequence[Ledger]) -> dict[str, int]:
    """By CUDA device: the allocator's own counter, which is exact, or the last ledger's row.

    The counter leaves expandable segments out, and only a snapshot of all blocks would tell of those, during
    which neither the interpreter nor the allocator is free for the program: then the last ledger must do.
    """
    if cuda.expandable_segments():
        return {
            ledger.device: rows_of(ledger).get(STRANDED, 0)
            for ledger in ledgers
            if ledger.device.startswith("cuda:")
        }
    return {
        reading.device: reading.counters.inactive_split
        for reading in readings
        if reading.counters is not None and reading.counters.inactive_split is not None
    }


def _limits(devices: Mapping[str, object]) -> dict[str, int]:
    limits = {"host": host_limit().bytes}
    for device in devices:
        if device.startswith("cuda:"):
            index = int(device[5:])
            limit = cuda.per_process_limit(index) or cuda.capacity(index)
            if limit is not None:
                limits[device] = limit
    return limits
