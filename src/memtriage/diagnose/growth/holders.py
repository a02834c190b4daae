"""From what grew from census to census to what that amounts to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Final, TypeVar

from memtriage.diagnose.growth.history import Holding
from memtriage.diagnose.growth.proof import POLICY, Proof, ProofPolicy, prove
from memtriage.model.paths import HolderPath

Contradicts = Callable[[str, float, float], bool]
"""Given a counter's name, a rate in bytes a position and a position: whether that counter shows that nothing
has grown at such a rate since then."""
Confirms = Callable[[str, float], bool]
"""Given a counter's name and a rate in bytes a position: whether that counter rises by at least as much."""

_DATA_LEAST: Final = 4096
"""Bytes a position below which a container of ordinary data is a log of the program's own."""
_DATA_EVERY: Final = 4
"""A container that leaks gets an entry at least every so many positions."""


@dataclass(frozen=True, slots=True)
class GrowingData:
    """A container that had more entries at each census of a row. Sizes in bytes, tensors left out.

    Attributes:
        path: to any of its entries.
        kind: its type.
        native: type of its newest entries that C++ made, with memory that only it knows of; None for others.
        entry_bytes: of a recent entry.
        entries: `(position, how many)` at each census, oldest first.
        allocated_at: the line that makes about as many bytes a position; None where none was recorded.
        stored_at: the line that stores into it; None where that is not certain.
        classes: of it and of the objects on the way to it, as `GroupDetail.classes` has them.
    """

    path: HolderPath
    kind: str
    native: str | None
    entry_bytes: int
    entries: tuple[tuple[float, int], ...]
    allocated_at: str | None = None
    stored_at: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Position and bytes at each census."""
        return [(position, float(count * self.entry_bytes)) for position, count in self.entries]

    @property
    def often(self) -> bool:
        """Whether it gets entries as often as a container that leaks at each step."""
        (start, first), (end, last) = self.entries[0], self.entries[-1]
        return (last - first) * _DATA_EVERY >= end - start


@dataclass(frozen=True, slots=True)
class AwaitingCollector:
    """What awaited the cyclic collector at one census.

    Attributes:
        position: when.
        nbytes: bytes by device.
        of: by device, the class at which most of these bytes hang.
    """

    position: float
    nbytes: dict[str, int]
    of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HolderGrowth:
    """A holder that grew over some censuses in a row up to the last.

    Attributes:
        holding: it.
        proof: what its growth is worth, with its rate.
        lengthens: it is a tensor that is made anew, longer.
        counter: the name of the counter that sees its memory.
        entries_grow: its path names more objects than before.
    """

    holding: Holding
    proof: Proof
    lengthens: bool
    counter: str = "cpu"
    entries_grow: bool | None = None

    @property
    def device(self) -> str:
        return self.holding.group.device

    @property
    def last(self) -> float:
        """Position of the last census that saw it."""
        return self.holding.sizes[-1].position


@dataclass(frozen=True, slots=True)
class DataGrowth:
    """A container of ordinary data that grew, and what that is worth."""

    data: GrowingData
    proof: Proof
    counter: ClassVar[str] = "host"

    @property
    def last(self) -> float:
        """Position of the last census that saw it."""
        return self.data.entries[-1][0]

    @property
    def large(self) -> bool:
        """Whether its own entries are worth telling; what they hold in native memory is not counted."""
        return self.proof.rate >= _DATA_LEAST


_Grown = TypeVar("_Grown", HolderGrowth, DataGrowth)


def growths(
    holdings: Iterable[Holding],
    counter_of: Callable[[Holding], str],
    contradicts: Contradicts,
    period: float | None = None,
    now: float = 0.0,
    confirms: Confirms = lambda counter, rate: False,
    ended: Confirms = lambda counter, rate: False,
    policy: ProofPolicy = POLICY,
) -> list[HolderGrowth]:
    """Judge holders, largest growth first; what a counter contradicts is left out.

    Args:
        holdings: those that grew.
        counter_of: names the counter that sees a holder's memory.
        contradicts: what counters say.
        period: positions from rise to rise, where growth is periodic.
        now: position of the last reading: where it is as far behind the last census as two of the censuses
            that saw growth are apart, the counter must not show that it stopped.
        confirms: whether it does up to its last reading. Where it does not show what holders are proven to
            gain, what was not seen for long may have stopped.
        ended: whether it did, and does so no longer.
        policy: of proof.
    """
    found = []
    for holding in holdings:
        counter = counter_of(holding)
        rising = holding.rising(period)
        points = [(size.position, float(size.nbytes)) for size in rising]
        proof = prove(points, _by(counter, contradicts), policy, period, holding.fell)
        entries_grow = rising[-1].entries > rising[0].entries
        growth = HolderGrowth(holding, proof, holding.lengthens, counter, entries_grow)
        if proof.certainty is not None and not _stopped(growth, points, contradicts, now, ended, policy):
            found.append(growth)
    unseen = not_shown(found, confirms)
    found = [_aged(one, now, ended, policy) if one in unseen else one for one in found]
    return sorted(found, key=lambda growth: -growth.proof.rate)


def data_growths(
    grown: Iterable[GrowingData],
    contradicts: Contradicts,
    now: float = 0.0,
    confirms: Confirms = lambda counter, rate: False,
    ended: Confirms = lambda counter, rate: False,
    policy: ProofPolicy = POLICY,
) -> list[DataGrowth]:
    """Judge containers of ordinary data, largest growth first.

    Only the resident set sees all of them, and not well. Containers that get an entry now and then are left
    out unless it grows with them: they are tables of the program's own.

    Arguments as `growths` has them.
    """
    found = []
    for data in grown:
        by_host = _by(DataGrowth.counter, contradicts)
        growth = DataGrowth(data, prove(data.sizes, by_host, policy))
        wanted = growth.proof.certainty is not None and (growth.large or data.native is not None)
        if wanted and not _stopped(growth, data.sizes, contradicts, now, ended, policy):
            found.append(growth)
    unseen = not_shown(found, confirms)
    shown = [one for one in found if one.proof.certainty == "proven" and one not in unseen]
    found = [_aged(one, now, ended, policy) if one in unseen else one for one in found]
    found = [one for one in found if one.data.often or one in shown]
    return sorted(found, key=lambda growth: -growth.proof.rate)


def not_shown(found: Sequence[_Grown], confirms: Confirms, share: float = 0.5) -> list[_Grown]:
    """Return proven growth that its counter does not show.

    Args:
        found: all growth.
        confirms: as `growths` has it.
        share: part of a holder's rate that its counter has to show beside the rates of all others.
    """
    proven = [grown for grown in found if grown.proof.certainty == "proven"]
    rates: dict[str, float] = {}
    for one in proven:
        rates[one.counter] = rates.get(one.counter, 0.0) + one.proof.rate
    return [
        one for one in proven if not confirms(one.counter, rates[one.counter] - (1 - share) * one.proof.rate)
    ]


def _stopped(
    growth: HolderGrowth | DataGrowth,
    points: Sequence[tuple[float, float]],
    contradicts: Contradicts,
    now: float,
    ended: Confirms,
    policy: ProofPolicy,
) -> bool:
    """Whether a counter shows that growth came to an end after the last census.

    What comes now and then pauses for as long as two censuses that saw it grow are apart, or for less where
    the counter's own course says that it has ended.
    """
    longest = max((b[0] - a[0] for a, b in pairwise(points)), default=0.0)
    rate = policy.contradicts * growth.proof.rate
    paused = now - growth.last >= longest or ended(growth.counter, rate)
    return paused and contradicts(growth.counter, rate, growth.last)


def _aged(growth: _Grown, now: float, ended: Confirms, policy: ProofPolicy) -> _Grown:
    """Return growth as it stands some time after the last census, where no counter shows that it goes on."""
    proof = growth.proof
    aged = now - growth.last > policy.ages * (growth.last - proof.since)
    if aged or ended(growth.counter, policy.contradicts * proof.rate):
        return replace(growth, proof=proof.suspected("it may have stopped since the last census"))
    if proof.slowed:
        return replace(growth, proof=proof.suspected("it may have stopped before the last census"))
    return growth


def waits_for_collector(
    waiting: Sequence[AwaitingCollector], device: str, rate: float, share: float = 0.25
) -> bool:
    """Whether objects that the cyclic collector will free explain part of a counter's growth.

    Between its collections they pile up; what they keep in native memory is not seen, so that a part of the
    rate is enough.

    Args:
        waiting: what awaited the collector at each census.
        device: whose storages.
        rate: bytes a position that the counter shows.
        share: part of it.
    """
    if len(waiting) < 2:
        return False
    span = waiting[-1].position - waiting[0].position
    most = max(collector.nbytes.get(device, 0) for collector in waiting)
    return most >= share * rate * min(span, _COLLECTED_WITHIN) > 0


_COLLECTED_WITHIN: Final = 20
"""Positions after which a census sees most of what awaits the collector, however long the run."""


def _by(counter: str, contradicts: Contradicts) -> Callable[[float, float], bool]:
    return lambda rate, since: contradicts(counter, rate, since)
