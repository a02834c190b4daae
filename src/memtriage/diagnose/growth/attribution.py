"""Find the holders that account for a counter's growth, and those that grow unseen by any counter. Pure.

What is proven is that memory certainly rises, and that a holder accounts for the rise. Two censuses are
enough where a counter rises: the holder grew between them by as much as the counter did. Where no counter can
see a holder (it grows too slowly for the noise), the censuses alone prove its growth: it grew in each of
several intervals, and did not slow down.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import msgspec
import numpy as np

from memtriage.allocator.settings import MIN_BLOCK
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.estimate import Growth, grow, policy_of
from memtriage.diagnose.growth.evidence import HEAP, Comparison, Counter, Seen, Sighting
from memtriage.model.evidence import DataSeen, HolderSeen
from memtriage.model.paths import HolderPath, of_any_item

Open = Literal[
    "few", "once", "slows", "fills", "aged", "replaced",
    "not resident", "new shapes", "not covered", "was mapped",
]  # fmt: skip
"""Why growth is only suspected."""

ACCOUNTS: Final = 0.7
"""A holder accounts for a counter's rise between two censuses if its own is at least this part of it; several
may together. Less than all: malloc rounds up, and others grow meanwhile."""
OPEN: Final = 1 - ACCOUNTS
"""This part of a rise may stay unexplained."""
PACE: Final = 0.1
"""Holders get their counter's rate if theirs differs by more than this part of it: malloc rounds up."""
MINOR: Final = 0.1
"""What is less than this part of a proven rise is not seen in it: a holder is then proven by the censuses
alone, and a suspicion is not reported. Nor do censuses over less than this part of a run prove anything
alone, unless a counter certainly grows."""
INTERVALS: Final = 3
"""Without a counter, a holder must have grown in this many intervals up to the last census; a holder that was
ever smaller again, in two more, and past what it had then."""
LEAST: Final = 256
"""Growth below this many bytes per position is the program's own bookkeeping."""
LITTLE: Final = 0.02
"""Memory that no census lists may come in parts of MiB, of which a short interval has none: an interval may
lack this part of the whole."""
DATA_LEAST: Final = 4096
"""The same for containers of ordinary data."""
_NOT_CERTAIN: Final[Mapping[str, tuple[Open, ...]]] = {"filling": ("fills",), "uncertain": ("few",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """What something grew by up to the last census.

    Attributes:
        series: all censuses that found it.
        points: position and bytes at the censuses over which it grew, oldest first.
        fell_from: most bytes that it had at a census, if it was smaller at a later one; else 0.
        counter: name of the counter that sees its memory.
        container: the path that all entries of its container have.
        rate: bytes per position, over all of the time that it grows.
        recent: the same for the latest part of that time.
        reasons: why it is only suspected.
        share: part of the counter's rise between these censuses; 0 where the censuses alone show its growth.
        error: how far that rise may be from the truth, as a part of it.
    """

    series: Sequence[Sighting]
    points: tuple[tuple[float, float], ...]
    fell_from: float = 0.0
    counter: str
    container: HolderPath = ()
    rate: float = 0.0
    recent: float = 0.0
    reasons: tuple[Open, ...] = ()
    share: float = 0.0
    error: float = 0.0

    @property
    def since(self) -> float:
        return self.points[0][0]

    @property
    def last(self) -> float:
        return self.points[-1][0]

    @property
    def rises(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """The intervals between two of its points in which it grew."""
        return [(before, after) for before, after in pairwise(self.points) if after[1] > before[1]]

    @property
    def own_rate(self) -> float:
        """Bytes per position from the first of its points to the last."""
        return (self.points[-1][1] - self.points[0][1]) / (self.last - self.since)

    @property
    def seen(self) -> Seen:
        """As the last census saw it (`_last_seen`)."""
        return _last_seen(self.series)

    @property
    def seen_at(self) -> float:
        """Position of the census that saw it so."""
        seen = self.seen
        return next((each.at for each in reversed(self.series) if each.seen is seen), self.series[-1].at)

    @property
    def holders(self) -> list[HolderSeen]:
        """A holder as the censuses since its growth began saw it; none for ordinary data."""
        return [s.seen for s in self.series if s.at >= self.since and isinstance(s.seen, HolderSeen)]


def attribute(comparison: Comparison) -> list[Rise]:
    """Return what grew up to the last census, with what that is worth, fastest first."""
    counters = comparison.counters
    once = len(comparison.censuses) == 1 and comparison.scale == "second"
    found = [_rise(series, counters, once=once) for series in comparison.series()]
    rises = _outermost(rise for rise in found if rise is not None)
    # Whether growth within a step goes on is seen in the next step.
    now = comparison.now if comparison.step is None else 0.0
    judged = _at_counters_rate(_judged(rises, counters, now), counters, comparison.positions)
    if once:
        judged = [replace(r, reasons=("once",)) for r in judged if r.share]
    return sorted(judged, key=lambda rise: -rise.rate)


# --- what one holder grew by --------------------------------------------------------------------------------


def counted(seen: HolderSeen) -> int:
    """Return a holder's bytes as its counter counts them: on a GPU a storage takes a block at least."""
    return max(seen.size, MIN_BLOCK * seen.storages if seen.device.startswith("cuda:") else 0)


def _rise(series: Sequence[Sighting], counters: Mapping[str, Counter], *, once: bool) -> Rise | None:
    """Return what a holder, or a container of ordinary data, grew by up to the last census.

    If a program makes no step and calls no module in a loop, it has one census, at its end (`once`): the
    holder had nothing when its counter began to rise.
    """
    grown, last = _run(series), _last_seen(series)
    path = last.anchor if isinstance(last, HolderSeen) else last.path
    if isinstance(last, HolderSeen):
        mapped = last.detail is not None and (last.detail.shared or last.detail.mapped)
        name = "shared" if mapped else last.device
        nbytes = {each.at: counted(each.seen) for each in series if isinstance(each.seen, HolderSeen)}
    else:
        heap = counters.get(HEAP)
        name = "host" if heap is None or heap.growth.state == "too_short" else HEAP
        nbytes = {each.at: max(1, last.entry_bytes) * each.seen.entries for each in series}
    points = [(each.at, float(nbytes[each.at])) for each in grown]
    counter = counters.get(name)
    if once and counter is not None and counter.growth.state == "growing":
        points.insert(0, (counter.growth.onset or 0.0, 0.0))
    elif not grown[-1].between and len(points) > 2:
        # The program's functions may have returned. What their variables had, such as the model, then belongs
        # to what else keeps it alive: the holder grew no faster than ever before, or than its counter shows.
        # What it had may belong to others, too: that it grew more slowly than ever before says nothing.
        (at, before), (end, found) = points[-2:]
        rates = [(most - least) / (to - since) for (since, least), (to, most) in pairwise(points[:-1])]
        risen = 0.0 if counter is None else counter.rise(at, end)[0]
        usual = max(rates) * (end - at)
        points[-1] = end, min(found, before + (risen if risen > (1 + PACE) * usual else usual))
        if found - before < ESTIMATE.slows * min(rates) * (end - at):
            points.pop()
    if points[-1][0] <= points[0][0] or points[-1][1] <= points[0][1]:
        return None
    sizes = [nbytes[each.at] for each in series if each.between]
    fell_from = max((before for before, after in pairwise(sizes) if after < before), default=0)
    container = of_any_item(path)
    rise = Rise(series=series, points=tuple(points), fell_from=fell_from, counter=name, container=container)
    log = isinstance(last, DataSeen) and last.native is None and rise.own_rate < DATA_LEAST
    return None if log else rise


def _last_seen(series: Sequence[Sighting]) -> Seen:
    """Return what the last census saw.

    Where that was at the end of the program, a holder that has less by then is as it was when functions still
    ran. Ordinary data keeps its path, and the size of its entries, from then: a queue that is closed has a
    mark behind its entries.
    """
    last = series[-1].seen
    earlier = next((each.seen for each in reversed(series) if each.between), last)
    if isinstance(last, HolderSeen) and isinstance(earlier, HolderSeen):
        return last if last.size >= earlier.size else earlier
    if last is earlier or not isinstance(last, DataSeen) or not isinstance(earlier, DataSeen):
        return last
    return msgspec.structs.replace(earlier, entries=last.entries, cuts=last.cuts or earlier.cuts)


def _outermost(rises: Iterable[Rise]) -> list[Rise]:
    """Leave out data inside other data, or around it, that grows more slowly: entries include theirs."""
    kept: list[Rise] = []
    for rise in sorted(rises, key=lambda rise: -rise.own_rate):
        paths = [(rise.seen.path, other.seen.path) for other in kept if isinstance(other.seen, DataSeen)]
        inside = any(one[: len(other)] == other or other[: len(one)] == one for one, other in paths)
        if isinstance(rise.seen, HolderSeen) or not inside:
            kept.append(rise)
    return kept


def _run(series: Sequence[Sighting]) -> list[Sighting]:
    """Return the censuses up to the last over which a holder never lost anything, and grew in the first.

    A census that was not taken between two positions proves nothing where it found less. Where it found as
    much, it proves nothing if it came sooner after the last one than any before.
    """
    found = list(series)
    while len(found) > 1 and not found[-1].between and not accumulates(found[-2].seen, found[-1].seen, 1.0):
        *apart, last = (after.at - before.at for before, after in pairwise(found))
        if _pauses(found[-2].seen, found[-1].seen) and last >= min(apart, default=last):
            break
        found.pop()
    run = found[-1:]
    for before in reversed(found[:-1]):
        after = run[0]
        grows = accumulates(before.seen, after.seen, after.at - before.at)
        if not grows and not _pauses(before.seen, after.seen):
            break
        run.insert(0, before)
    while len(run) > 1 and _pauses(run[0].seen, run[1].seen):
        run.pop(0)
    return run


def accumulates(before: Seen, after: Seen, apart: float) -> bool:
    """Whether a holder grew in a way that may never end.

    It has more storages or nodes, or as many that begin or end with the same content. A graph without any old
    node does not count, nor do a few log entries: detached losses, each of one block of an allocator.
    """
    if isinstance(before, DataSeen) or isinstance(after, DataSeen):
        return after.entries > before.entries
    more, count = after.size - before.size, after.storages - before.storages
    if after.renewed or more <= 0 or count < 0 or more < LEAST * apart:
        return False
    if after.nodes > before.nodes:
        return True
    if count > 0:
        is_log = after.nbytes - before.nbytes <= MIN_BLOCK * count and more < DATA_LEAST * apart
        return after.attached or not is_log
    return after.continued


def _pauses(before: Seen, after: Seen) -> bool:
    if isinstance(before, DataSeen) or isinstance(after, DataSeen):
        return after.entries == before.entries
    return after.size == before.size and not after.replaced


def other_growth(comparison: Comparison, intervals: int = INTERVALS) -> dict[str, Growth]:
    """Return the growth of memory that no census lists, by the counter that sees it, where it is certain.

    It grew in so many intervals, the last one among them, at much the same pace, lacked little in any other,
    and grew beyond what there may have been before.
    """
    found = {}
    for name in ("host", "shared"):
        seen: dict[float, tuple[int, int]] = {}
        for census in comparison.censuses:
            most_yet, now = max(seen.values(), default=(0, 0)), census.other_memory.get(name)
            # At the end the program may have released it.
            if now is not None and (census.between or now >= most_yet):
                seen[census.at(comparison.scale)] = now
        at, (least, most) = np.array([*seen]), np.array([*seen.values()]).reshape(-1, 2).T
        policy = policy_of(name)
        for first in range(len(at) - intervals):
            grown, span = float(least[-1] - least[first]), float(at[-1] - at[first])
            late = np.diff(least[first:]) - OPEN * np.diff(at[first:]) * grown / span
            even = (
                np.count_nonzero(late >= 0) >= intervals and late[-1] >= 0 and late.min() >= -LITTLE * grown
            )
            enough = grown >= policy.settles and grown >= policy.least * span
            if even and enough and least[-1] > most[first]:
                rate = grown / span
                found[name] = Growth("growing", rate, rate, rate, rate, float(at[first]), float(at[-1]))
                break
    return found


def part_of_other_memory(comparison: Comparison, counter: Counter) -> float | None:
    """Return which part of a counter's rise was memory that no census lists; None for too few censuses.

    Between those since it certainly grows. Memory that was mapped before may be in it: what fills now.
    """
    seen = [
        (census.at(comparison.scale), census.other_memory[counter.name][0])
        for census in comparison.while_running
        if counter.name in census.other_memory
        and census.at(comparison.scale) >= (counter.growth.onset or 0.0)
    ]
    if len(seen) < 2:
        return None
    (first, before), (last, now) = seen[0], seen[-1]
    risen = counter.rise(first, last)[0]
    return (now - before) / risen if risen > 0 else 0.0


# --- what it is worth ---------------------------------------------------------------------------------------


def _judged(rises: Sequence[Rise], counters: Mapping[str, Counter], now: float) -> list[Rise]:
    judged, together = [], defaultdict[str, float](float)
    for rise in rises:
        together[rise.counter] += rise.own_rate
    for rise in rises:
        # The resident set sees all ordinary data, and not well; malloc's counter sees large entries.
        names = {"host": ("cpu", "host"), HEAP: (HEAP, "cpu")}.get(rise.counter, (rise.counter,))
        seen_by = [counters[name] for name in names if name in counters]
        by_counter = (_by_counter(rise, counter, rises) for counter in seen_by)
        found = next((each for each in by_counter if each is not None), None)
        # Growth may go into room that malloc leaves in its pages, as a census by the process itself does.
        of_pages = any(counter.pages for counter in seen_by)
        if found is None or (of_pages and found.reasons):
            counter = counters.get(rise.counter, next(iter(seen_by), None))
            alone = _by_censuses(rise, counter, now, together[rise.counter])
            if found is None or (alone is not None and not alone.reasons):
                found = alone
        if found is not None:
            judged.append(found)
    return judged


def _by_counter(rise: Rise, counter: Counter, rises: Sequence[Rise]) -> Rise | None:
    """Return what a counter says of a holder's growth, beside that of others it sees; None if nothing."""
    growth = counter.growth
    if not counter.rises:
        return None
    # All censuses, if the counter rose between them about as fast as over all of its growth; else later ones.
    for points in (rise.points, _since(rise.points, growth.onset)):
        start, end = points[0][0], points[-1][0]
        apart = end - start
        (risen, error), usual = counter.rise(start, end), growth.rate * apart
        too_much = not growth.by_rises and risen - 2 * error > 2 * usual
        if risen > 2 * error and 2 * risen >= usual and not too_much:
            break
    else:
        return None
    own = points[-1][1] - points[0][1]
    seen = [each for each in rises if each.counter == rise.counter]
    # Each tensor of a list of state dicts is only a small part of what the list gets.
    of_container = sum(each.own_rate for each in seen if each.container == rise.container)
    most = (2 - ACCOUNTS) * risen + error
    # Of ordinary data malloc's counter sees no small entries: what it is not certain of, pages may show.
    unseen = own > most and (counter.name == rise.counter or growth.state != "growing")
    if unseen or own * of_container / rise.own_rate < MINOR * risen:
        return None  # more than it saw, or too small for it
    if not _keeps_up(points, counter, own / risen):
        return None
    # It must have what it got before these censuses: a list that is emptied now and then grows, too. Not at
    # its own rate: it grows in rises, of which an interval may have one more than its share.
    begun = growth.onset or float(counter.points.at[0])
    if points[-1][1] < ACCOUNTS * min(1.0, own / risen) * counter.rise(begun, end)[0]:
        return None
    others = sum(each.own_rate for each in seen if each is not rise)
    if len(points) == 2 and own + others * apart < ACCOUNTS * risen:
        return None  # what else came in one interval is not known
    slows = growth.state == "growing" and not growth.by_rises and _slows(_since(points, growth.onset))
    rate = own / apart
    return replace(
        rise,
        points=points,
        counter=counter.name,
        rate=rate,
        recent=rate * (growth.recent / growth.rate if growth.rate > 0 else 1.0),
        share=own / risen,
        error=error / risen,
        reasons=("slows",) if slows else _NOT_CERTAIN.get(growth.state, ()),
    )


def _at_counters_rate(
    rises: Sequence[Rise], counters: Mapping[str, Counter], censuses: Sequence[float]
) -> list[Rise]:
    """Return growth at its counter's rate where that is another and the holders explain it.

    A counter is read up to the end, and at every mark: it shows what became faster or slower since the last
    census, and rises that come seldom. Censuses over a small part of the growth may have one of these more.
    Pages do not show it: they count room that malloc keeps unused, or pages of files that come and go.
    What the heap rises by at once, as when a dict makes a larger table, is part of its rate if its holders
    are not as fast without.
    """
    judged = list(rises)
    for name, counter in counters.items():
        growth, known = counter.growth, [rise for rise in rises if rise.counter == name and rise.share]
        rate, share = sum(rise.rate for rise in known), sum(rise.share for rise in known)
        others = sum(rise.rate for rise in rises if rise.counter == name and not rise.share)
        # Between two censuses there may be one more of the rises of a counter, or one less.
        off = max((growth.high - growth.low) / 2, PACE * growth.rate)
        usual = counter.whole_rate(censuses) if name == HEAP else growth.rate
        another = growth.by_rises or min(abs(rate - usual), abs(rate - growth.rate)) > off
        explained = known and abs(1 - share) <= max(OPEN, known[0].error)
        if explained and another and not counter.pages and name != "shared":
            factor = max(usual - others, min(usual, rate)) / rate
            judged = [
                replace(each, rate=each.rate * factor, recent=each.recent * factor, share=each.share / share)
                if each in known
                else each
                for each in judged
            ]
    return judged


def _since(points: tuple[tuple[float, float], ...], onset: float | None) -> tuple[tuple[float, float], ...]:
    """Return the points from an onset on; two at least."""
    later = tuple(point for point in points if onset is None or point[0] >= onset)
    return later if len(later) > 1 else points[-2:]


def _keeps_up(points: Sequence[tuple[float, float]], counter: Counter, share: float) -> bool:
    """Whether a holder grew in each interval in which its counter certainly rose, by more than a little."""
    little = MINOR * (points[-1][1] - points[0][1]) / (len(points) - 1)
    for (start, least), (end, most) in pairwise(points):
        risen, error = counter.rise(start, end)
        expected = share * (risen - 2 * error)
        if expected > little and most - least < OPEN * expected:
            return False
    return True


def _slows(points: Sequence[tuple[float, float]]) -> bool:
    """Whether a holder grew regularly and then more slowly: a counter's noise may hide that it has ended.

    What comes in single rises may come later than a short last interval.
    """
    rates = [(most - least) / (end - start) for (start, least), (end, most) in pairwise(points)]
    if len(rates) < INTERVALS:
        return False
    *earlier, last = [end - start for (start, _), (end, _) in pairwise(points)]
    return last >= min(earlier) and rates[-1] < ESTIMATE.slows * min(rates[:-1])


def _by_censuses(rise: Rise, counter: Counter | None, now: float, together: float) -> Rise | None:
    """Return what the censuses alone say of a holder's growth; None if it grows no more.

    After the last of them its counter has to rise on, for it and for all that grew `together` with it.
    """
    points, rate = rise.points, rise.own_rate
    found = replace(rise, rate=rate, recent=rate)
    grew_until = later = rise.rises[-1][1][0]
    if rise.last - grew_until >= max(b[0] - a[0] for a, b in rise.rises):
        return None
    if counter is not None:
        seen, until = counter.growth, counter.growth.until or 0.0
        had_room = counter.pages and until < grew_until  # in malloc: the holder grew on
        ended = seen.until is not None and not had_room and rate / 2 <= seen.rate <= 2 * rate
        if ended or contradicts(counter, rate, until if until >= grew_until else rise.since):
            return None
        later = max(until, grew_until)  # what ended meanwhile may have been much more than this holder got
    if now - grew_until > ESTIMATE.share * (grew_until - rise.since):
        half = (now - later) / 2
        risen, error = (0.0, math.inf) if counter is None else counter.rise(later, now)
        if risen + 2 * error < half * rate:
            return None
        if risen <= 2 * error or risen < half * together:
            return replace(found, reasons=("aged",))
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    least = DATA_LEAST if isinstance(rise.seen, DataSeen) else LEAST
    if rates[-1] < least and 2 * (rise.last - points[-2][0]) >= rise.last - rise.since:
        return None  # over half of the time it got next to nothing
    needed = INTERVALS + (2 if rise.fell_from else 0)
    # A list that is emptied now and then grows, too, until that comes again.
    grows = counter is not None and counter.growth.state == "growing"
    short = not grows and rise.last - rise.since < MINOR * now
    if len(rates) < needed or points[-1][1] < rise.fell_from or short:
        return replace(found, reasons=("few",))
    if isinstance(rise.seen, HolderSeen) and rise.seen.replaced:
        return replace(found, reasons=("replaced",))
    if _slows(points) or min(rates) < OPEN * rate:
        return replace(found, reasons=("slows",))
    return found


def contradicts(counter: Counter, rate: float, since: float) -> bool:
    """Whether a counter shows that nothing grew at half of such a rate since a position, as it would."""
    points = counter.points.since(since)
    growth = grow(points, counter.policy)
    if growth.state == "too_short" or growth.rate >= rate / 2:
        return False
    if growth.state == "flat":
        return grow(points.plus(rate / 2 * points.at), counter.policy).state == "growing"
    return growth.state == "growing" and growth.high < rate / 2
