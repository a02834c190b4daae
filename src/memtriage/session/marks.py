"""A mark as the session makes it, and which marks go into the record: all of them while they are few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from memtriage.model.marks import Mark
from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.store.writer import RankWriter


@dataclass(frozen=True, slots=True)
class StoringPolicy:
    """Which marks are written, so that the record of a long run hardly grows, however fast its steps are.

    Attributes:
        dense: first marks, all of which are written.
        sparse_s: least seconds between two marks after these.
        share: distance of two marks, as a part of the run's time so far. Until it reaches `longest_s`, a run
            ten times as long has 230 more marks.
        longest_s: most seconds between two marks: as often as the host is sampled.
    """

    dense: int = 2000
    sparse_s: float = 0.1
    share: float = 0.01
    longest_s: float = 5.0

    def due(self, stored: int, last_s: float, now_s: float) -> bool:
        """Return whether a mark at `now_s` is written, after `stored` others, the last one at `last_s`."""
        apart_s = min(self.longest_s, max(self.sparse_s, self.share * now_s))
        return stored < self.dense or now_s - last_s >= apart_s


STORING: Final = StoringPolicy()


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
    """Writes every mark while they are few, then fewer and fewer; the program's own marks always.

    Args:
        writer: of the record.
        reader: of the counters that marks of all devices share.
        rank: whose marks they are.
        policy: which marks are written.
    """

    def __init__(
        self,
        writer: RankWriter,
        reader: CounterReader,
        rank: int | None,
        policy: StoringPolicy = STORING,
    ) -> None:
        self._policy = policy
        self._writer = writer
        self._reader = reader
        self._rank = rank
        self._stored = 0
        self._last_s = 0.0

    def at_mark(self, mark: MarkPoint) -> None:
        """Write a mark, if it is due."""
        now = mark.position.time_s
        if mark.name in ("backward", "step", "time") and not self._policy.due(
            self._stored, self._last_s, now
        ):
            return
        self._stored += 1
        self._last_s = now
        rss, pinned = self._reader.rss(), self._reader.pinned()
        for reading in mark.readings:
            self._writer.write("mark", mark.of(reading, self._rank, rss, pinned))
