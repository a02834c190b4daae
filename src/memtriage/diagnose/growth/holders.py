"""Judge what grew from census to census, by its sizes and by what the counters show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar, Final, TypeVar

from memtriage.diagnose.growth.counter import Counters, WatchedCounter
from memtriage.diagnose.growth.history import Holding
from memtriage.diagnose.growth.proof import POLICY, Proof, ProofPolicy, prove
from memtriage.model.census import GroupDetail
from memtriage.model.paths import HolderPath

Contradicts = Callable[[str, float, float], bool]
"""Given a counter's name, a rate in bytes per position and a position: whether that counter shows that
nothing has grown at such a rate since then."""
Confirms = Callable[[str, float], bool]
"""Given a counter's name and a rate in bytes per position: whether that counter rises by at least as much."""
Rose = Callable[[str, float, float, float], bool]
"""Given a counter's name, a rate in bytes per position and two positions: whether that counter rose between
them by at least half as much."""

Flat = Callable[[str, float, float], bool]
"""Given a counter's name, a rate in bytes per position and a position: whether that counter surely rises by
less than that since then."""


@dataclass(frozen=True, slots=True)
class HolderPolicy:
    """Thresholds for what grows from census to census.

    Attributes:
        data_least: bytes per position below which a container of ordinary data is the program's own log.
        data_every: a container that leaks gets an entry at least every so many positions.
        data_waits: mean distance between two entries, times so much: without one for longer, it may be over.
        shown: part of a holder's rate that its counter has to show beside the rates of all other holders.
        collected: part of a counter's rate that objects awaiting the cyclic collector explain. It is a part,
            since what they keep in native memory is not seen.
        collected_within: positions after which a census sees most of what awaits the collector, however long
            the run.
        filled: part of its bound that a container of tensors with graphs must have reached to be taken for
            one that stops there. A replay memory of 100,000 is meant for that many values, not graphs.
        explains: holders are all that grows if they rose by 0.7 to 1.3 times as much as their counter.
        accuracy: two rates are the same if they differ by no more than this part.
        far: if the last two censuses are at least so many positions apart, both count for a rate.
        over: a holder has stopped if it kept no more for so many times the longest distance between censuses
            that saw it grow. Rises of which each interval saw one may be almost two intervals apart.
    """

    data_least: int = 4096
    data_every: int = 4
    data_waits: float = 1.6
    shown: float = 0.5
    collected: float = 0.25
    collected_within: int = 20
    filled: float = 0.5
    explains: tuple[float, float] = (0.7, 1.3)
    accuracy: float = 0.15
    far: int = 10
    over: float = 3.0


HOLDER_POLICY: Final = HolderPolicy()


@dataclass(frozen=True, slots=True)
class GrowingData:
    """A container that had more entries at each census in a row. Sizes in bytes, without tensors.

    Attributes:
        path: to any of its entries.
        kind: its type.
        native: type of its newest entries that C++ made, with memory that only it knows of; None for others.
        entry_bytes: of a recent entry.
        entries: `(position, how many)` at each census that found more than the one before, oldest first.
        allocated_at: the line that makes about as many bytes per position; None where none was recorded.
        stored_at: the line that stores into it; None where that is not certain.
        classes: of it and of the objects on the way to it, as `GroupDetail.classes` has them.
        lengthens: it is an array that is replaced by a longer one; each of its entries is a byte.
    """

    path: HolderPath
    kind: str
    native: str | None
    entry_bytes: int
    entries: tuple[tuple[float, int], ...]
    allocated_at: str | None = None
    stored_at: str | None = None
    classes: tuple[str, ...] = ()
    lengthens: bool = False

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Position and bytes at each of these censuses."""
        return [(position, float(count * self.entry_bytes)) for position, count in self.entries]

    @property
    def rate(self) -> float:
        """Bytes per position from the first of these censuses to the last."""
        return self.entry_bytes / self._every

    @property
    def grows_often(self) -> bool:
        """Whether it gets entries as often as a container that leaks at each step."""
        return self._every <= HOLDER_POLICY.data_every

    def pauses(self, position: float) -> bool:
        """Whether no new entry by a position is but a pause between two."""
        return position - self.entries[-1][0] <= HOLDER_POLICY.data_waits * self._every

    @property
    def _every(self) -> float:
        """Positions from entry to entry."""
        (start, first), (end, last) = self.entries[0], self.entries[-1]
        return (end - start) / (last - first)


@dataclass(frozen=True, slots=True)
class AwaitingCollector:
    """What awaited the cyclic collector at one census.

    Attributes:
        position: when.
        nbytes: bytes by device.
        of: by device, the class whose objects keep most of these bytes.
    """

    position: float
    nbytes: dict[str, int]
    of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HolderGrowth:
    """A holder that grew over some censuses in a row up to the last.

    Attributes:
        holding: the holder.
        proof: what its growth is worth, with its rate.
        lengthens: it is a tensor that is replaced by a longer one each time.
        counter: name of the counter that includes its memory.
        entries_grow: its path names more objects than before.
        holders_multiply: more objects hold them than before, each as many: a new dict at each step.
    """

    holding: Holding
    proof: Proof
    lengthens: bool
    counter: str = "cpu"
    entries_grow: bool | None = None
    holders_multiply: bool = False

    @property
    def device(self) -> str:
        return self.holding.group.device

    @property
    def points(self) -> list[tuple[float, float]]:
        """Position and bytes at each census that counts."""
        return [
            (size.position, float(size.nbytes))
            for size in self.holding.sizes
            if size.position >= self.proof.since
        ]

    @property
    def last(self) -> float:
        """Position of the last census that found it."""
        return self.holding.sizes[-1].position


@dataclass(frozen=True, slots=True)
class DataGrowth:
    """A container of ordinary data that grew, and what its growth is worth."""

    data: GrowingData
    proof: Proof
    counter: ClassVar[str] = "host"

    @property
    def points(self) -> list[tuple[float, float]]:
        """Position and bytes at each census that found more."""
        return self.data.sizes

    @property
    def last(self) -> float:
        """Position of the last census that found it."""
        return self.data.entries[-1][0]

    @property
    def large(self) -> bool:
        """Whether its own entries are worth reporting; what they hold in native memory is not counted."""
        return self.proof.rate >= HOLDER_POLICY.data_least


_Grown = TypeVar("_Grown", HolderGrowth, DataGrowth)


def growths(
    holdings: Iterable[Holding],
    counter_of: Callable[[Holding], str],
    contradicts: Contradicts,
    period: float | None = None,
    now: float = 0.0,
    confirms: Confirms = lambda counter, rate: False,
    ended: Confirms = lambda counter, rate: False,
    rose: Rose = lambda counter, rate, start, end: False,
    flat: Flat = lambda counter, rate, since: False,
    steady: Confirms = lambda counter, rate: False,
    policy: ProofPolicy = POLICY,
) -> list[HolderGrowth]:
    """Judge holders, largest growth first; what a counter contradicts is left out.

    Args:
        holdings: those that grew.
        counter_of: names the counter that sees a holder's memory.
        contradicts: what counters say.
        period: positions from rise to rise, where growth is periodic.
        now: position of the last reading. Once it is as far from a holder's last census as the two that are
            farthest apart of the censuses in a row that saw it grow, a counter may show that it has stopped.
        confirms: whether a counter grows up to its last reading. Where it does not show the growth that
            holders are proven to have, growth that was not seen for long may have stopped.
        ended: whether a counter grew and has stopped.
        rose: whether a counter rose over a stretch in which a holder may have stopped.
        flat: whether a counter has stopped growing between the last two censuses, if the last was at the end.
        steady: whether a counter grows up to its last reading and does not seem to slow down.
        policy: thresholds of proof.
    """
    growing = []
    for holding in holdings:
        counter = counter_of(holding)
        pauses = holding.mean_rate > 0 and confirms(counter, policy.contradicts * holding.mean_rate)
        rising = holding.rising(period, pauses=pauses)
        points = [(size.position, float(size.nbytes)) for size in rising]
        contradicted = partial(contradicts, counter)
        if any(size.replaced for size in rising[1:]):  # its size says nothing of what comes and what goes
            contradicted = partial(_not_confirmed, confirms, counter)
        proof = prove(points, contradicted, policy, period, holding.fell)
        first, last = rising[0], rising[-1]
        if (proof.fills and _has_the_counters_rate(proof.rate, counter, steady)) or (
            proof.uneven and _has_the_counters_shape(points, counter, steady, rose, policy)
        ):
            proof = replace(proof, certainty="proven", reason=None, uneven=False, fills=False)
        if len(rising) > 1 and not last.between:
            earlier = prove(points[:-1], policy=policy, period=period).rate
            near = last.position - rising[-2].position < HOLDER_POLICY.far
            proof = replace(proof, rate=_rate_to_the_end(proof, last.position, earlier, near=near))
        multiply = first.holders < last.holders and (
            last.entries * first.holders <= first.entries * last.holders
        )
        growth = HolderGrowth(
            holding, proof, holding.lengthens, counter, last.entries > first.entries, multiply
        )
        stopped = _stopped(growth, points, contradicts, now, ended, policy)
        if not last.between and len(points) > 1:
            stopped = stopped or _stopped_before_the_end(growth, points, now, flat, policy)
        if proof.certainty is not None and not stopped:
            growing.append(growth)
    unseen = not_shown(growing, confirms)
    return _largest_first(_with_age(growing, unseen, now, ended, rose, policy))


def _rate_to_the_end(proof: Proof, end: float, earlier: float, *, near: bool) -> float:
    """Return the rate of a holder whose last census, at the end, may include a part of the next position.

    Args:
        proof: of all its censuses.
        end: position of the last one.
        earlier: rate up to the census before; 0 if not known.
        near: the last two censuses are so near that this part matters.
    """
    if near or not earlier:
        return earlier or proof.rate
    span = end - proof.since
    with_the_next = proof.rate * span / (span + 1)
    return min(proof.rate, with_the_next, key=lambda rate: abs(rate - earlier))


def _has_the_counters_shape(
    points: Sequence[tuple[float, float]], counter: str, steady: Confirms, rose: Rose, policy: ProofPolicy
) -> bool:
    """Whether a counter that grows steadily rose as a holder did in the last interval, most of the time.

    Censuses in a burst say little about how even growth is. The counter is read all the time.
    """
    (first, _), (start, least), (end, most) = points[0], points[-2], points[-1]
    if 2 * (end - start) < end - first:
        return False
    rate = (most - least) / (end - start)
    lowest, highest = (2 * part * rate for part in HOLDER_POLICY.explains)  # `rose` asks for half
    grows = steady(counter, policy.contradicts * rate)
    return grows and rose(counter, lowest, start, end) and not rose(counter, highest, start, end)


def _has_the_counters_rate(rate: float, counter: str, steady: Confirms) -> bool:
    """Whether a holder is what a counter shows to grow steadily, although it looks as if it slowed down."""
    lowest, highest = (part * rate for part in HOLDER_POLICY.explains)
    return steady(counter, lowest) and not steady(counter, highest)


def data_growths(
    grown: Iterable[GrowingData],
    contradicts: Contradicts,
    now: float = 0.0,
    confirms: Confirms = lambda counter, rate: False,
    ended: Confirms = lambda counter, rate: False,
    rose: Rose = lambda counter, rate, start, end: False,
    policy: ProofPolicy = POLICY,
) -> list[DataGrowth]:
    """Judge containers of ordinary data, largest growth first.

    Only the resident set sees all of them, and not well; malloc's counter sees large entries. Containers that
    get an entry now and then are left out unless one of these grows with them: they are tables of the
    program's own.

    Arguments as `growths` has them.
    """
    growing = []
    for data in grown:
        contradicted = partial(contradicts, DataGrowth.counter)
        growth = DataGrowth(data, prove(data.sizes, contradicted, policy))
        counts = growth.proof.certainty is not None and (growth.large or data.native is not None)
        if counts and not _stopped(growth, data.sizes, contradicts, now, ended, policy):
            growing.append(growth)
    unseen = not_shown(growing, lambda counter, rate: confirms(counter, rate) or confirms("cpu", rate))
    shown = [growth for growth in growing if growth.proof.certainty == "proven" and growth not in unseen]
    growing = _with_age(growing, unseen, now, ended, rose, policy)
    return _largest_first(growth for growth in growing if growth.data.grows_often or growth in shown)


def _not_confirmed(confirms: Confirms, counter: str, rate: float, since: float) -> bool:
    return not confirms(counter, rate)


def _with_age(
    growing: Sequence[_Grown],
    unseen: Sequence[_Grown],
    now: float,
    ended: Confirms,
    rose: Rose,
    policy: ProofPolicy,
) -> list[_Grown]:
    """Return all growth; what may have stopped, as far as censuses and counters show, as a suspicion."""
    total: dict[str, float] = {}
    for growth in growing:
        total[growth.counter] = total.get(growth.counter, 0.0) + growth.proof.rate

    def went_on(growth: _Grown, stopped: float) -> bool:
        """Whether the counter shows, beside what others grow by, that growth did not stop there."""
        beside = 2 * (total[growth.counter] - growth.proof.rate)
        return growth not in unseen and rose(growth.counter, growth.proof.rate + beside, stopped, growth.last)

    return [_aged(growth, growth in unseen, now, ended, went_on, policy) for growth in growing]


def _largest_first(growing: Iterable[_Grown]) -> list[_Grown]:
    return sorted(growing, key=lambda growth: -growth.proof.rate)


def not_shown(growing: Sequence[_Grown], confirms: Confirms) -> list[_Grown]:
    """Return proven growth that its counter does not show.

    Args:
        growing: all growth.
        confirms: as `growths` has it.
    """
    proven = [growth for growth in growing if growth.proof.certainty == "proven"]
    hidden = 1 - HOLDER_POLICY.shown
    rates: dict[str, float] = {}
    for growth in proven:
        rates[growth.counter] = rates.get(growth.counter, 0.0) + growth.proof.rate
    return [
        growth
        for growth in proven
        if not confirms(growth.counter, rates[growth.counter] - hidden * growth.proof.rate)
    ]


def at_counters_rate(growing: Sequence[_Grown], counters: Counters) -> list[_Grown]:
    """Return growth at the rate that its counter shows, where that is another and the holders explain it.

    A counter is read up to the end, and at every mark: it shows what became faster or slower since the last
    census, and rises that come seldom.

    Args:
        growing: all growth of a kind.
        counters: by name.
    """
    factors = {
        name: _factor([growth for growth in growing if growth.counter == name], counter)
        for name, counter in counters.items()
    }
    return [_faster(growth, factors.get(growth.counter, 1.0)) for growth in growing]


def _faster(growth: _Grown, factor: float) -> _Grown:
    return replace(growth, proof=replace(growth.proof, rate=factor * growth.proof.rate))


def _factor(growing: Sequence[_Grown], counter: WatchedCounter) -> float:
    """Return how much faster a counter grows than its holders, which explain it; 1 where that is not sure."""
    proven = [growth for growth in growing if growth.proof.certainty == "proven"]
    if not proven:
        return 1.0
    known, shown = sum(growth.proof.rate for growth in proven), counter.estimate()
    error = HOLDER_POLICY.accuracy * shown.rate
    if not shown.is_growth_of(shown.rate, HOLDER_POLICY.accuracy):
        return 1.0
    if abs(known - shown.rate) <= error:
        return 1.0
    explained = 0.0
    for growth in proven:
        (start, least), (end, most) = growth.points[0], growth.points[-1]
        rise = counter.rise(start, end)
        if rise is None or rise <= 0:
            return 1.0
        explained += (most - least) / rise
    least_part, most_part = HOLDER_POLICY.explains
    return shown.rate / known if least_part <= explained <= most_part else 1.0


def _stopped(
    growth: HolderGrowth | DataGrowth,
    points: Sequence[tuple[float, float]],
    contradicts: Contradicts,
    now: float,
    ended: Confirms,
    policy: ProofPolicy,
) -> bool:
    """Whether a counter, or the holder at the end, shows that growth came to an end after the last census.

    Growth that comes now and then pauses for as long as two censuses that saw it are apart, or for less where
    the counter itself has stopped growing.
    """
    longest = max((b[0] - a[0] for a, b in pairwise(points)), default=0.0)
    unchanged = growth.holding.unchanged if isinstance(growth, HolderGrowth) else None
    if unchanged is not None and unchanged - growth.last >= HOLDER_POLICY.over * longest:
        return True
    rate = policy.contradicts * growth.proof.rate
    paused = now - growth.last >= longest or ended(growth.counter, rate)
    return paused and contradicts(growth.counter, rate, growth.last)


def _stopped_before_the_end(
    growth: HolderGrowth, points: Sequence[tuple[float, float]], now: float, flat: Flat, policy: ProofPolicy
) -> bool:
    """Whether its counter shows that what had its last census at the end grew in a part of the time before.

    The counter is flat over the second half of that time, which is long enough for that.
    """
    longest = max((b[0] - a[0] for a, b in pairwise(points[:-1])), default=0.0)
    half = (now - points[-2][0]) / 2
    enough = half >= HOLDER_POLICY.over * longest
    return enough and flat(growth.counter, policy.contradicts * growth.proof.rate, now - half)


def _aged(
    growth: _Grown,
    unseen: bool,
    now: float,
    ended: Confirms,
    went_on: Callable[[_Grown, float], bool],
    policy: ProofPolicy,
) -> _Grown:
    """Return what growth is worth where the last census, or the time since then, suggests that it stopped.

    A counter that grows does not settle that. Its noise may hide what the last few positions lack.
    """
    proof = growth.proof
    aged = now - growth.last > policy.ages * (growth.last - proof.since)
    if unseen and (aged or ended(growth.counter, policy.contradicts * proof.rate)):
        return replace(growth, proof=proof.suspected("it may have stopped since the last census"))
    if proof.stopped is not None and not went_on(growth, proof.stopped):
        return replace(growth, proof=proof.suspected("it may have stopped before the last census"))
    return growth


def stops_when_full(detail: GroupDetail, *, attached: bool) -> bool:
    """Return whether a group's container has a bound of its own, so that its growth ends there.

    Args:
        detail: of the group.
        attached: the group hangs on the autograd graph. Such a container has to be near its bound.
    """
    if detail.bound is None:
        return False
    return not attached or (detail.entries or 0) >= HOLDER_POLICY.filled * detail.bound


def waits_for_collector(waiting: Sequence[AwaitingCollector], device: str, rate: float) -> bool:
    """Whether objects that the cyclic collector will free explain part of a counter's growth.

    They pile up between its collections. What they keep in native memory is not seen, so a part of the rate
    is enough.

    Args:
        waiting: what awaited the collector at each census.
        device: whose storages.
        rate: bytes per position that the counter shows.
    """
    if len(waiting) < 2:
        return False
    span = waiting[-1].position - waiting[0].position
    most = max(collector.nbytes.get(device, 0) for collector in waiting)
    return most >= HOLDER_POLICY.collected * rate * min(span, HOLDER_POLICY.collected_within) > 0
