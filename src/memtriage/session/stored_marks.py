"""Which marks go into the record: all while they are few."""

from __future__ import annotations

from collections.abc import Sequence

from memtriage.model.marks import Mark
from memtriage.observe.counters import CounterReader, Reading
from memtriage.store.writer import RankWriter

_DENSE_MARKS = 4000
_SPARSE_S = 0.1


class StoredMarks:
    """Writes marks, every one while they are few, later at most ten a second; the program's own always.

    Args:
        writer: of the record.
        reader: of the counters that marks of all devices share.
        rank: whose marks they are.
    """

    def __init__(self, writer: RankWriter, reader: CounterReader, rank: int | None) -> None:
        self._writer = writer
        self._reader = reader
        self._rank = rank
        self._stored = 0
        self._last_s = 0.0

    def add(self, name: str, now: float, readings: Sequence[Reading], step: int, microbatch: int) -> None:
        """A mark has been made.

        Args:
            name: its name.
            now: seconds since the watch began.
            readings: the counters at it, by device.
            step: completed steps.
            microbatch: completed backwards since the last.
        """
        dense = self._stored < _DENSE_MARKS or now - self._last_s >= _SPARSE_S
        if not dense and name in ("backward", "step", "time"):
            return
        self._stored += 1
        self._last_s = now
        rss, pinned = self._reader.rss(), self._reader.pinned()
        for reading in readings:
            mark = Mark(
                name=name,
                step=step,
                microbatch=microbatch,
                rank=self._rank,
                time_s=round(now, 6),
                device=reading.device,
                allocated=reading.allocated,
                reserved=reading.reserved,
                requested=reading.requested,
                outside=reading.outside,
                host_rss=rss,
                host_pinned=pinned,
            )
            self._writer.write("mark", mark)
