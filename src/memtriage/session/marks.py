"""A mark as the session makes it, and which marks go into the record: all of them while they are few."""

from __future__ import annotations

from dataclasses import dataclass, field
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
        dense: first marks of a name, all of which are written. Of those around the n-th, one in `n / dense`
            is: a course has holes of one hundredth of its length at most, and a run ten times as long has
            2.3 times `dense` more.
        longest_s: most seconds between two marks: as often as the host is sampled.
    """

    dense: int = 250
    longest_s: float = 5.0

    def chosen(self, number: int) -> bool:
        """Return whether the mark of this number, from 1 on, is written however soon it comes.

        Multiples of the golden ratio are spread evenly, so that no period of the program is left out.
        """
        return number * _GOLDEN % 1 < self.dense / number


STORING: Final = StoringPolicy()
_GOLDEN: Final = (5**0.5 - 1) / 2


def is_within_step(name: str, position: TrainingPosition) -> bool:
    """Whether a mark is a backward's, and the program makes steps."""
    return name == "backward" and position.step > 0


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


@dataclass(slots=True)
class StoredMarks:
    """Writes every mark while they are few, then fewer and fewer; the program's own marks always.

    Args:
        writer: of the record.
        reader: of the counters that marks of all devices share.
        rank: whose marks they are.
        policy: which marks are written.
    """

    writer: RankWriter
    reader: CounterReader
    rank: int | None
    policy: StoringPolicy = STORING
    _made: dict[str, int] = field(default_factory=dict)
    _last_s: float = 0.0

    def at_mark(self, mark: MarkPoint) -> None:
        """Write a mark, if it is due."""
        now, number = mark.position.time_s, self._made.get(mark.name, 0) + 1
        if mark.name in ("backward", "step", "time"):
            self._made[mark.name] = number
            if not self.policy.chosen(number) and now - self._last_s < self.policy.longest_s:
                return
        self._last_s = now
        rss, pinned = self.reader.rss(), self.reader.pinned()
        for reading in mark.readings:
            self.writer.write("mark", mark.of(reading, self.rank, rss, pinned))
