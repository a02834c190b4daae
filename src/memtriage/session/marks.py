"""A mark as the session makes it, and which marks go into the record: all while they are few."""

from __future__ import annotations

import msgspec

from memtriage.model.marks import Mark
from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.store.writer import RankWriter

_DENSE_MARKS = 4000
_SPARSE_S = 0.1


class MarkPoint(msgspec.Struct, frozen=True):
    """One instant of a run: its name, where training stood, and the counters of every device.

    `readings` is the list that the counter reader made for this mark; nobody changes it.
    """

    name: str
    position: TrainingPosition
    readings: list[Reading]

    def of(
        self, reading: Reading, rank: int | None, rss: int | None = None, pinned: int | None = None
    ) -> Mark:
        """Return the mark of one device.

        Args:
            reading: of that device, one of `readings`.
            rank: whose mark it is.
            rss: bytes of the resident set; None where it was not read.
            pinned: bytes of page-locked memory; None where they were not read.
        """
        return Mark(
            name=self.name,
            step=self.position.step,
            microbatch=self.position.microbatch,
            rank=rank,
            time_s=round(self.position.time_s, 6),
            device=reading.device,
            allocated=reading.allocated,
            reserved=reading.reserved,
            requested=reading.requested,
            outside=reading.outside,
            host_rss=rss,
            host_pinned=pinned,
        )


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

    def at_mark(self, mark: MarkPoint) -> None:
        """A mark has been made."""
        now = mark.position.time_s
        dense = self._stored < _DENSE_MARKS or now - self._last_s >= _SPARSE_S
        if not dense and mark.name in ("backward", "step", "time"):
            return
        self._stored += 1
        self._last_s = now
        rss, pinned = self._reader.rss(), self._reader.pinned()
        for reading in mark.readings:
            self._writer.write("mark", mark.of(reading, self._rank, rss, pinned))
