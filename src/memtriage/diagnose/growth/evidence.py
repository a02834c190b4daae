"""What growth is judged from: counters by scale, and censuses. Filled during a run, or from its record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, get_args

import numpy as np
from msgspec.structs import replace

from memtriage.diagnose.growth.estimate import POLICY, Growth, Policy, grow, noise, policy_of
from memtriage.diagnose.growth.track import Points, Track
from memtriage.model.evidence import CensusSeen, DataSeen, EvidenceLine, HolderSeen, Readings, Role, Situation
from memtriage.model.findings import Event
from memtriage.model.position import Scale, TrainingPosition

CODE: Final = "code"
HEAP: Final = "heap"
CONFIRMING: Final = frozenset({"host", "shared", CODE, HEAP})
"""Counters that only confirm or contradict others: the resident set, its shared or mapped part,
generated code (`observe.generated_code`), and what malloc and Python's allocator have handed out."""
COLLECTED: Final = 16 * 1024
"""Garbage of one object that the cyclic collector tracks is smaller, without what malloc hands out."""
EVENTS: Final = frozenset(get_args(Event))
"""Counters of events: their readings are counts."""
WARM_UP: Final = 3
"""First readings that are left out: optimizer state, workspaces, compilation."""
ENOUGH_MARKS: Final = WARM_UP + POLICY.points
"""Readings from which growth can be judged on a scale."""
Seen = HolderSeen | DataSeen


@dataclass(frozen=True, slots=True)
class Sighting:
    """A holder, or a container of ordinary data, at the position of a census; `between` as of that."""

    at: float
    seen: Seen
    between: bool


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter's readings, and how they grow."""

    name: str
    points: Points
    growth: Growth
    policy: Policy
    pages: bool = False
    """It counts pages of another process, with room that malloc keeps unused."""

    @property
    def rises(self) -> bool:
        return self.growth.state in ("growing", "filling", "uncertain")

    def rise(self, start: float, end: float) -> tuple[float, float]:
        """Return by how many bytes its floor rose between two positions, without single jumps, and the error.

        The floor is interpolated; unless it rises evenly, a rise between the two readings next to a position
        may have come before or after it. Where it was not read, it is taken to rise as between the readings
        next to that.
        """
        at, floors = self.points.at, self.points.floors
        if end <= start or len(at) < 3 or end <= at[0] or start >= at[-1]:
            return 0.0, float("inf")
        first, last = np.interp((start, end), at, floors)
        error = POLICY.interval * noise(np.diff(floors))  # a difference of two readings has as much noise
        for position, after in zip((start, end), np.searchsorted(at, (start, end)), strict=True):
            if self.growth.shape != "steady" and 0 < after < len(at) and at[after] > position:
                error += abs(float(floors[after] - floors[after - 1])) / 2
        jumped = sum(nbytes for when, nbytes in self.growth.jumps if start < when <= end)
        more = (end - start) / (min(end, float(at[-1])) - max(start, float(at[0])))
        return (float(last - first) - jumped) * more, error * more

    def whole_rate(self, censuses: Sequence[float]) -> float:
        """Return the bytes per position by which it rose since its growth began, jumps included.

        Except those in which there was a census, of which something stays.
        """
        at, start = self.points.at, self.growth.onset
        if start is None or start >= at[-1]:
            return self.growth.rate
        jumped = 0.0
        for when, nbytes in self.growth.jumps:
            before = at[max(0, int(np.searchsorted(at, when)) - 1)]
            if when > start and not any(before <= census <= when for census in censuses):
                jumped += nbytes
        end = float(at[-1])
        return (self.rise(start, end)[0] + jumped) / (end - start)

    @property
    def grown(self) -> float:
        """Bytes by which it rose since its growth began: by its rate, or less if it fell at the end."""
        if not self.rises:
            return 0.0
        start, end = self.growth.onset or 0.0, self.growth.until or float(self.points.at[-1])
        return min(self.growth.rate * (end - start), self.rise(start, end)[0])


@dataclass(slots=True)
class Comparison:
    """Counters and censuses on one scale: over the run, or from micro-batch to micro-batch of one step.

    Attributes:
        scale: what positions count.
        tracks: readings by counter.
        events: counts by event, since it first happened.
        censuses: oldest first.
        step: the step, if it is within one.
        begins: position before which nothing counts.
        now: position of the last reading or census.
        outside: the process is read from outside: its CPU's counter is the kernel's count of its anonymous
            memory, and censuses list no ordinary data.
    """

    scale: Scale
    tracks: dict[str, Track] = field(default_factory=dict)
    events: dict[str, Track] = field(default_factory=dict)
    censuses: list[CensusSeen] = field(default_factory=list)
    step: int | None = None
    begins: float = 0.0
    now: float = 0.0
    outside: bool = False
    _estimated: dict[str, tuple[tuple[int, float], Counter]] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, Counter]:
        """Its counters with their growth. Only those that have new readings are estimated again."""
        for name, track in self.tracks.items():
            read = track.readings, self.begins
            if name not in self._estimated or self._estimated[name][0] != read:
                points = track.points().since(self.begins)
                pages = name == "cpu" and self.outside
                policy = policy_of("host" if pages else name)
                growth = grow(points, policy)
                if self.scale == "second" and "call" in self.events and growth.state != "too_short":
                    growth = self._by_calls(points, policy) or growth
                self._estimated[name] = read, Counter(name, points, growth, policy, pages)
        return {name: counter for name, (_, counter) in self._estimated.items()}

    def _by_calls(self, points: Points, policy: Policy) -> Growth | None:
        """Return the growth over time of what grows evenly from call to call; None if it does not.

        A program that only runs inference may make its calls at an uneven pace.
        """
        counts = self.events["call"].points()
        calls = np.interp(points.at, counts.at, counts.floors)
        more = np.diff(calls, prepend=-1.0) > 0
        known, even = calls[more], np.linspace(calls[0], calls[-1], int(more.sum()))
        means, floors = (np.interp(even, known, each[more]) for each in (points.means, points.floors))
        found = grow(Points(even, means, floors), policy)
        if found.state != "growing" or found.shape != "steady":
            return None
        pace = (calls[-1] - calls[0]) / points.span
        rate, low, high, recent = (pace * each for each in (found.rate, found.low, found.high, found.recent))
        onset = float(np.interp(found.onset or 0.0, known, points.at[more]))
        return Growth("growing", rate, low, high, recent, onset, shape="stairs")

    def read(self, at: float, values: Mapping[str, int]) -> None:
        """Add a reading of each of several counters."""
        for counter, value in values.items():
            self._track(counter).add(at, value)
            self.now = max(self.now, at)

    def extend(self, line: Readings) -> None:
        """Add readings of a record."""
        blocks = np.array([line.at, line.means, line.floors or line.means]).T
        self._track(line.counter).extend(line.width, blocks)
        self.now = max(self.now, *line.at)

    def _track(self, counter: str) -> Track:
        tracks = self.events if counter in EVENTS else self.tracks
        if counter not in tracks:
            tracks[counter] = Track(0 if self.step is not None or tracks is self.events else WARM_UP)
        return tracks[counter]

    def new_readings(self, *, last: bool = False) -> Iterator[Readings]:
        """Yield the readings since the last call, for a record; `last` as for `Track.new_blocks`."""
        for name, track in (*self.tracks.items(), *self.events.items()):
            for width, blocks in track.new_blocks(last=last):
                at, means, floors = blocks.T.tolist()
                yield Readings(
                    scale=self.scale,
                    counter=name,
                    step=self.step,
                    width=width,
                    at=[round(each, 3) for each in at],
                    means=[round(each) for each in means],
                    floors=[] if width == 1 else [round(each) for each in floors],
                )

    @property
    def marks(self) -> int:
        """Readings of the counter that was read most often."""
        return max((track.readings for track in self.tracks.values()), default=0)

    @property
    def positions(self) -> list[float]:
        """Those of the censuses."""
        return [census.at(self.scale) for census in self.censuses]

    @property
    def collector_off(self) -> bool:
        """Whether Python's cyclic collector was off at all censuses."""
        return bool(self.censuses) and all(census.collector_off for census in self.censuses)

    def awaits_collector(self, device: str, grown: float) -> bool:
        """Return whether objects that the cyclic collector will free explain part of a growth.

        They pile up between its collections, so there is more of them at some census than at one before. What
        they keep in native memory is not seen, so a part of it is enough. At the end of the program all that
        its functions had may wait: only classes that waited before count.
        """
        before = {name for census in self.while_running for name in census.waiting.get(device, ())}
        waited = [
            sum(nbytes for name, nbytes in census.waiting.get(device, {}).items() if name in before)
            for census in self.censuses
        ]
        most = max(
            (now - least for now, least in zip(waited, accumulate(waited, min), strict=True)), default=0
        )
        return not self.collector_off and most > 0 and most >= POLICY.share * grown

    def may_be_collected(self, since: float, rate: float) -> bool:
        """Return whether growth of Python's memory since a position may wait for the cyclic collector.

        Not if the collector has looked through everything meanwhile, or tracks hardly more objects. It had to
        look twice: what the first time finds may be older.
        """
        seen = [census for census in self.while_running if census.at(self.scale) >= since]
        if len(seen) < 2:
            return True
        first, last = seen[0], seen[-1]
        grown = rate * (last.at(self.scale) - first.at(self.scale))
        return last.collections < first.collections + 2 and grown < COLLECTED * (last.tracked - first.tracked)

    @property
    def while_running(self) -> list[CensusSeen]:
        """Censuses taken while the program ran: at others, functions may have returned."""
        return [census for census in self.censuses if census.between]

    def series(self) -> list[list[Sighting]]:
        """Return what holds something at the successive censuses that found it, up to the last it may be at.

        A holder that a census does not list is as it was before; a container of ordinary data is gone.
        """
        series: dict[tuple[type, int], list[Sighting]] = {}
        latest: dict[tuple[type, int], Seen] = {}
        before: float | None = None
        for census in self.censuses:
            at = census.at(self.scale)
            found: list[Seen] = [*census.holders, *census.data]
            listed = {(type(seen), seen.id): seen for seen in found}
            gone: set[tuple[type, int]] = {(HolderSeen, number) for number in census.gone}
            if at != before:  # without any work between, nothing is said to have ended
                gone |= {key for key in latest if key[0] is DataSeen and key not in listed}
            latest |= listed
            for key in gone if census.between else ():
                latest.pop(key, None)
                series.pop(key, None)
            for key, seen in listed.items() if census.partial else latest.items():
                if key in gone:
                    continue
                known = series.setdefault(key, [])
                since = seen.before if isinstance(seen, DataSeen) and not known else None
                if since is not None and before is not None:
                    known.append(Sighting(before, replace(seen, entries=since), between=True))
                if known and at <= known[-1].at:
                    known.pop()  # of two at one position the later counts
                known.append(Sighting(at, seen, census.between))
            before = at
        return list(series.values())


class Evidence:
    """All that a record says of growth.

    Attributes:
        run: comparisons over the run, by scale.
        steps: those within a step, by step.
        situation: as of the last line that says it.
        roles: what was seen of the other processes of the job, by role.
        role: of such a process, what it is; None of the main one.
        counts: of such a process, the comparisons that have the main one's events; None of the main one.
    """

    def __init__(self, role: Role | None = None) -> None:
        self.run: dict[Scale, Comparison] = {
            scale: Comparison(scale, outside=role is not None) for scale in ("step", "microbatch", "second")
        }
        self.steps: dict[int, Comparison] = {}
        self.situation = Situation(position=TrainingPosition())
        self.roles: dict[str, Evidence] = {}
        self.role = role
        self.counts: Mapping[Scale, Comparison] | None = None

    @classmethod
    def of(cls, lines: Iterable[EvidenceLine]) -> Evidence:
        """Return what the lines of a record say."""
        evidence = cls()
        for line in lines:
            evidence.add(line)
        return evidence

    def of_role(self, role: str) -> Evidence:
        """Return what was seen of another process of the job."""
        if role not in self.roles:
            self.roles[role] = Evidence(Role(role=role, where="child"))
        return self.roles[role]

    def add(self, line: EvidenceLine) -> None:
        """Add a line of a record."""
        if isinstance(line, Role):
            self.of_role(line.role).role = line
        elif not isinstance(line, Situation) and line.role and self.role is None:
            self.of_role(line.role).add(line)
        elif isinstance(line, Situation):
            self.situation = line
            self.run["second"].begins = line.works_s
        elif isinstance(line, Readings):
            comparison = self.run[line.scale] if line.step is None else self.of_step(line.step)
            comparison.extend(line)
        elif line.within_step:
            self.of_step(line.position.step).censuses.append(line)
        else:
            for scale, comparison in self.run.items():
                if self.role is None or line.at(scale):  # else taken before its loop was seen
                    comparison.censuses.append(line)
                    comparison.now = max(comparison.now, line.at(scale))

    def of_step(self, step: int) -> Comparison:
        """Return the comparison within a step; a new one if there is none."""
        if step not in self.steps:
            self.steps[step] = Comparison("microbatch", step=step)
        return self.steps[step]

    @property
    def main(self) -> Comparison:
        """The comparison that growth over the run is judged on: over steps if there is one.

        Otherwise over backwards or time: the first with enough marks, or the one with more. The loop of a
        process that is read from outside may be seen late: without two censuses since then, time says more.
        """
        steps, backwards, time = self.run["step"], self.run["microbatch"], self.run["second"]
        seen_late = len(steps.censuses) < 2 <= len(time.censuses)
        if steps.marks and (self.role is None or (steps.marks >= ENOUGH_MARKS and not seen_late)):
            return steps
        return next(
            (scale for scale in (backwards, time) if scale.marks >= ENOUGH_MARKS),
            max(time, backwards, key=lambda scale: scale.marks),
        )

    @property
    def judged_on(self) -> Comparison:
        """The comparison that counters are judged on; for a run of few long steps, over its backwards.

        Never over time if the program trains: then that only shows how it was loaded.
        """
        trains = (self.run["step"], self.run["microbatch"])
        return next((scale for scale in trains if scale.marks >= ENOUGH_MARKS), self.main)
