"""From what grew from census to census to what that amounts to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from memtriage.diagnose.history import Holding
from memtriage.diagnose.proof import POLICY, Proof, ProofPolicy, prove
from memtriage.model.paths import HolderPath

Contradicts = Callable[[str, float, float], bool]
"""Given a counter's name, a rate in bytes a position and a position: whether that counter shows that nothing
has grown at such a rate since then."""

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
    """

    path: HolderPath
    kind: str
    native: str | None
    entry_bytes: int
    entries: tuple[tuple[float, int], ...]
    allocated_at: str | None = None
    stored_at: str | None = None

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Position and bytes at each census."""
        return [(position, float(count * self.entry_bytes)) for position, count in self.entries]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What awaited the cyclic collector at one census, in bytes by device."""

    position: float
    nbytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Growth:
    """A holder that grew over some censuses in a row up to the last.

    Attributes:
        holding: it.
        proof: what its growth is worth, with its rate.
        lengthens: it is a tensor that is made anew, longer.
        entries_grow: its path names more objects than before.
    """

    holding: Holding
    proof: Proof
    lengthens: bool
    entries_grow: bool | None = None

    @property
    def device(self) -> str:
        return self.holding.group.device


@dataclass(frozen=True, slots=True)
class DataGrowth:
    """A container of ordinary data that grew, and what that is worth."""

    data: GrowingData
    proof: Proof

    @property
    def large(self) -> bool:
        """Whether its own entries are worth telling; what they hold in native memory is not counted."""
        return self.proof.rate >= _DATA_LEAST


def growths(
    holdings: Iterable[Holding],
    counter_of: Callable[[Holding], str],
    contradicts: Contradicts,
    period: float | None = None,
    now: float = 0.0,
    confirms: Callable[[str, float], bool] = lambda counter, rate: False,
    policy: ProofPolicy = POLICY,
) -> list[Growth]:
    """Judge holders, largest growth first; what a counter contradicts is left out.

    Args:
        holdings: those that grew.
        counter_of: names the counter that sees a holder's memory.
        contradicts: what counters say.
        period: positions from rise to rise, where growth is periodic.
        now: position of the last reading: where it is as far behind the last census as two of the censuses
            that saw growth are apart, the counter must not show that it stopped.
        confirms: whether a counter grows by at least a rate, over the whole run.
        policy: of proof.
    """
    found = []
    for holding in holdings:
        counter = counter_of(holding)
        rising = holding.rising(period)
        points = [(size.position, float(size.nbytes)) for size in rising]
        proof = prove(points, _by(counter, contradicts), policy, period)
        if not confirms(counter, policy.contradicts * proof.rate):
            proof = _aged(proof, points, now)
        last, longest = points[-1][0], max((b[0] - a[0] for a, b in pairwise(points)), default=0.0)
        stopped = now - last >= longest and contradicts(counter, policy.contradicts * proof.rate, last)
        if proof.certainty is not None and not stopped:
            entries_grow = rising[-1].entries > rising[0].entries
            found.append(Growth(holding, proof, holding.lengthens, entries_grow))
    return sorted(found, key=lambda growth: -growth.proof.rate)


def data_growths(
    grown: Iterable[GrowingData], contradicts: Contradicts, now: float = 0.0, policy: ProofPolicy = POLICY
) -> list[DataGrowth]:
    """Judge containers of ordinary data, largest growth first.

    Only the resident set sees all of them, and not well.

    Arguments as `growths` has them.
    """
    found = []
    for data in grown:
        (start, first), (end, last) = data.entries[0], data.entries[-1]
        proof = prove(data.sizes, _by("host", contradicts), policy)
        proof = _aged(proof, data.sizes, now)
        growth = DataGrowth(data, proof)
        large = growth.large or data.native is not None
        if proof.certainty is not None and large and (last - first) * _DATA_EVERY >= end - start:
            found.append(growth)
    return sorted(found, key=lambda growth: -growth.proof.rate)


def _aged(proof: Proof, points: Sequence[tuple[float, float]], now: float) -> Proof:
    """Return a proof as it stands some time after the last census."""
    if proof.certainty != "proven" or now - points[-1][0] <= _AGES * (points[-1][0] - points[0][0]):
        return proof
    return replace(proof, certainty="suspected", reason="it may have stopped since the last census")


_AGES: Final = 2
"""Times as long as it was seen to grow: the plan's last census lies at half of the run, or later."""


def waits_for_collector(waiting: Sequence[Waiting], device: str, rate: float, share: float = 0.25) -> bool:
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
    most = max(one.nbytes.get(device, 0) for one in waiting)
    return most >= share * rate * min(span, _COLLECTED_WITHIN) > 0


_COLLECTED_WITHIN: Final = 20
"""Positions after which a census sees most of what awaits the collector, however long the run."""


def _by(counter: str, contradicts: Contradicts) -> Callable[[float, float], bool]:
    return lambda rate, since: contradicts(counter, rate, since)
