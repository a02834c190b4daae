"""The status of a watched run while it runs: for the endpoint, gauges and the loggers of frameworks.

Marks leave their readings here, which takes a fraction of a microsecond. Everything else is done on request,
in the requesting thread. No stream is synchronized, and no census or allocator snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from memtriage.account.gpu_ledger import STRANDED
from memtriage.account.host_reading import read_host
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.model.run_status import MOST_NAMES, RunStatus, rows_of
from memtriage.observe import cuda, host
from memtriage.observe.cgroup import host_limit
from memtriage.observe.counters import Reading
from memtriage.process.stdlib import time
from memtriage.session.marks import MarkPoint

_HOST_SHARE: Final = 0.002
"""Share of the time that readings of the address space may take: one takes 10 to 30 ms."""


class LiveState:
    """Collects what a watch knows, and reports it as a `RunStatus`.

    Any thread may read meanwhile: every entry is replaced as a whole.

    Args:
        rank: of this process.
        started_at: Unix time at which the watch began, in seconds.
    """

    def __init__(self, rank: int | None, started_at: float) -> None:
        self._rank = rank
        self._started_at = started_at
        self._last: dict[str, tuple[MarkPoint, Reading]] = {}
        self._named: dict[str, MarkPoint] = {}
        self._newest: MarkPoint | None = None
        self._ledgers: tuple[tuple[Ledger, ...], float | None] = ((), None)
        self._leaks: tuple[Finding, ...] = ()
        self._growing: Mapping[str, float] = {}
        self._passing: Mapping[str, int] = {}
        self._classes: dict[str, int] = {}
        self._classes_due_s = 0.0

    # --- from the watch -------------------------------------------------------------------------------------

    def at_mark(self, mark: MarkPoint) -> None:
        """Take the readings of a mark."""
        self._newest = mark
        for reading in mark.readings:
            if reading.allocated is not None:  # malloc is not read at every mark
                self._last[reading.device] = (mark, reading)
        if mark.name in self._named or len(self._named) < MOST_NAMES:
            self._named[mark.name] = mark

    def ledgers(self, ledgers: Sequence[Ledger], time_s: float) -> None:
        """Take the ledgers of a census, `time_s` seconds after the watch began."""
        self._ledgers = (tuple(ledgers), self._started_at + time_s)

    def leaks(self, leaks: Sequence[Finding]) -> None:
        """Take the findings of what grows so far."""
        self._leaks = tuple(leaks)

    def growth(self, growing: Mapping[str, float], passing: Mapping[str, int]) -> None:
        """Take how memory has changed so far.

        Args:
            growing: growth of each device's counter in bytes per step, without devices that were not followed
                long enough.
            passing: as in `RunStatus`.
        """
        self._growing, self._passing = growing, passing

    # --- for whoever asks -----------------------------------------------------------------------------------

    def statuses(self) -> list[RunStatus]:
        """Return what is known now; nothing before the first mark.

        The resident set, page-locked memory and limits are read now, and now and then the classes of host
        memory. All else is as of the last mark, growth as of the last call of `growth`.
        """
        newest = self._newest
        if newest is None:
            return []
        latest = dict(self._last)
        ledgers, ledgers_at = self._ledgers
        pinned = host.pinned()
        status = RunStatus(
            rank=self._rank,
            steps=newest.position.step,
            marked_at=self._started_at + newest.position.time_s,
            latest=tuple(mark.of(reading, self._rank) for mark, reading in latest.values()),
            named=tuple(
                mark.of(reading, self._rank)
                for mark in tuple(self._named.values())
                for reading in mark.readings
                if reading.allocated is not None
            ),
            stranded=_stranded([reading for _, reading in latest.values()], ledgers),
            peak_allocated={
                device: reading.counters.peak_allocated
                for device, (_, reading) in latest.items()
                if reading.counters is not None and reading.counters.peak_allocated is not None
            },
            passing=dict(self._passing),
            limits=_limits(latest),
            growth=dict(self._growing),
            host_rss=host.rss(),
            host_pinned=None if pinned is None else pinned.owned,
            host_classes=self._host_classes(),
            ledgers=ledgers,
            ledgers_at=ledgers_at,
            leaks=self._leaks,
        )
        return [status]

    def _host_classes(self) -> dict[str, int]:
        """Return the host ledger without a census; the last one while a new one would cost too much."""
        now = time.perf_counter()
        if now >= self._classes_due_s:
            reading = read_host()
            if reading is not None:
                self._classes = rows_of(reading.ledger(None))
            took = time.perf_counter() - now
            self._classes_due_s = now + took / _HOST_SHARE
        return self._classes


def _stranded(readings: Sequence[Reading], ledgers: Sequence[Ledger]) -> dict[str, int]:
    """Stranded bytes by CUDA device: the allocator's own counter, which is exact, or the last ledger's row.

    The counter leaves out expandable segments. Only a snapshot of all blocks would show those, and meanwhile
    the program could use neither the interpreter nor the allocator: so the last ledger's row is taken.
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
