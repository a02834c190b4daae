"""Take censuses as lines of the record, with allocation sites recorded shortly before those of what grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Final, get_args

from memtriage.account.census import CensusView, Look
from memtriage.account.followed import Contents, FollowedHolders, changed
from memtriage.allocator.settings import MIN_BLOCK
from memtriage.diagnose.growth.attribution import INTERVALS
from memtriage.model.census import Census
from memtriage.model.evidence import CensusSeen, HolderSeen
from memtriage.model.paths import is_native
from memtriage.model.position import Scale, TrainingPosition
from memtriage.observe.autograd import profiler_is_on
from memtriage.observe.identity import Identities
from memtriage.observe.process_tree import descendants
from memtriage.observe.sites import SiteRecorder
from memtriage.process.stdlib import gc, time
from memtriage.session.schedule.ordinary_data import OrdinaryData

_DETAILED: Final = 12
"""Growing holders, the largest first, whose details are read at a census."""
PERIOD: Final = 8
"""The longest, in positions, that is followed as one: sites are recorded over all of it, and micro-batches
may consist of so many backwards."""


@dataclass(slots=True)
class Following:
    """What the censuses of one comparison have in common: who is who.

    Attributes:
        within_step: it compares micro-batches of one step.
        in_libraries: certain growth has no holder so far, so all containers of libraries that grow are found.
        holders: numbers the holders.
        data: follows containers of ordinary data.
        recorded: how many of them had allocation sites.
        growing: holders that grew up to the last census, largest growth first, as that saw them.
        written: the last line of each.
        first: their sizes when they were first seen.
        last: the census to which containers of ordinary data are compared.
    """

    within_step: bool = False
    in_libraries: bool = False
    holders: FollowedHolders = field(default_factory=FollowedHolders)
    data: OrdinaryData = field(default_factory=OrdinaryData)
    recorded: int = 0
    growing: list[HolderSeen] = field(default_factory=list)
    written: dict[int, HolderSeen] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    last: CensusSeen | None = None

    @property
    def needs_libraries(self) -> bool:
        """Whether other holders of what grows can only be found by a walk over all libraries."""
        details = [seen.detail for seen in self.growing if seen.detail is not None]
        return any(each.elsewhere and each.retained is None for each in details)

    @property
    def lacks_sites(self) -> bool:
        """Whether something grows whose allocation site is unknown and may still be found.

        What has none by the time at which growth is proven is allocated elsewhere, or seldom.
        """
        lacks = any(
            seen.detail is None or seen.detail.allocated_at is None for seen in self.growing[:_DETAILED]
        )
        return (lacks or not self.growing or self.data.lacks_sites) and self.recorded < INTERVALS


class Investigator:
    """Takes censuses, and records allocation sites. Costs nothing in between.

    Args:
        script_root: folder of the user's script, for allocation sites.
        say: takes one line of text about what takes time, once per run.
        before: called before each census, for readings that a census would disturb.
        observed: gets the line of each census that is compared with others.

    Attributes:
        sites: the recorders of allocation sites.
        paused_s: seconds for which these censuses stopped the program.
        spent_s: seconds of the processor that they took.
    """

    def __init__(
        self,
        script_root: str | None,
        say: Callable[[str], None],
        before: Callable[[], None] = lambda: None,
        observed: Callable[[CensusSeen], None] = lambda census: None,
    ) -> None:
        self.paused_s = self.spent_s = 0.0
        self.sites = SiteRecorder(script_root)
        self._identities = Identities()
        self._say = say
        self._before = before
        self._observed = observed
        self._announced = False
        self._has_children = False
        self._objects_recorded = False

    def look(
        self,
        also: Callable[[CensusView], None],
        frames: Sequence[FrameType] | None = None,
        wanted: Callable[[Iterable[Any]], Sequence[Any]] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> Census:
        """Take a census that is compared with no other.

        Libraries hold most of a program's objects and few of its tensors. They are only walked as a whole if
        needed, because that takes most of a census's time.

        Args:
            also: called while the view is valid.
            frames: given if memory has just run out: the frames of the error (empty inside the failing
                allocation, whose frames still run). Nothing is read from the device then.
            wanted: which containers of libraries to find, as for `HeapWalk`; None to walk all libraries.
            prepare: called when the memory of the program has been read.
        """
        # Only an evaluation stack may lead to a loader, whose data workers copy page by page as they read it.
        begins_to_fork = not self._has_children and bool(descendants())
        if frames is not None or begins_to_fork:
            wanted = None
        self._has_children |= begins_to_fork
        if not self._announced:
            self._say("taking a census")
            self._announced = True
        self._before()
        prepare()
        with Look(frames or (), self._identities, wanted) as view:
            census = view.census()
            also(view)
        return census

    def record(self, remaining: int, period: float = 0, *, again: bool = False) -> None:
        """Record allocation sites over the last two positions before a census, or over a short period.

        Not earlier: recording costs much more than the step in which it is done.

        Args:
            remaining: marks (of steps, micro-batches, ...) until that census.
            period: marks from rise to rise; 0 if growth is not periodic.
            again: a census found no site, although sites were recorded before it. Growth may have an unknown
                period, so the CUDA allocator records for longer. Other recorders do not: while they are on,
                malloc's counter is not read.
        """
        over = 2 if period > PERIOD else max(2, math.ceil(period))
        longest = max(over, PERIOD) if again else over
        if not 0 < remaining <= longest:
            if self.sites.on:
                self.stop()  # that census has been postponed
            return
        self.sites.start()
        if remaining == 1:
            self.sites.trace_nodes()
        elif remaining <= over:
            self._objects_recorded = True
            self.sites.trace_objects()

    def follow(
        self,
        following: Following,
        position: TrainingPosition,
        also: Callable[[CensusView], None] | None = None,
        frames: Sequence[FrameType] | None = None,
        *,
        between: bool = True,
    ) -> Census:
        """Take the next census of a comparison, with details of what grew; then stop recording.

        Args:
            following: the comparison; gets the results.
            also, frames: as for `look`.
            between: whether the program is between two positions.
        """
        started, worked = time.perf_counter(), time.thread_time()
        libraries = following.needs_libraries
        following.recorded += self.sites.recording
        # Nodes only know the line that called an operation, not the line in it that allocates.
        recorded = self.sites.recording and self._objects_recorded
        self.sites.collect()
        line = CensusSeen(
            position=position,
            work_s=round(position.time_s - self.paused_s, 3),
            within_step=following.within_step,
            between=between and frames is None,
            interrupted=frames is not None and between,
            collector_off=not gc.isenabled(),
            profiled=profiler_is_on(),
        )

        def add(view: CensusView) -> None:
            try:
                self._add(following, line, view, recorded, interrupted=frames is not None)
            except MemoryError:  # near the limit: what grew is known, its details are not
                self._say("too little host memory for a closer look")
            if also is not None:
                also(view)

        try:
            # It makes tables. tracemalloc would follow each entry, but is off by now.
            begin = partial(following.data.begin, _apart(following.last, line))
            wanted = partial(following.data.of_libraries, small=following.in_libraries)
            census = self.look(add, frames, None if libraries else wanted, begin)
        finally:
            self.stop()
            took = time.perf_counter() - started
            self.paused_s += took
            self.spent_s += time.thread_time() - worked
        line.pause_s = round(took, 3)
        self._observed(line)
        return census

    def stop(self) -> None:
        """Stop recording and release what was recorded."""
        self.sites.stop()
        self.sites.forget()
        self._objects_recorded = False

    # --- at one census --------------------------------------------------------------------------------------

    def _add(
        self, following: Following, line: CensusSeen, view: CensusView, recorded: bool, *, interrupted: bool
    ) -> None:
        """Fill the line of a census."""
        census = view.census()
        line.between = line.between and census.partial is None
        # Reading the device would wait for it, when memory has run out.
        contents = Contents({}, {}) if interrupted else Contents(view.heads(), view.heads(last=True))
        holders = following.holders.add(census, contents, between=line.between)
        line.totals, line.waiting = _totals(census), census.waiting
        line.tracked, line.collections = view.graph.tracked, gc.get_stats()[-1]["collections"]
        first = {seen.id: following.first.get(seen.id, seen.size) for seen in holders}
        following.first = first if line.between else following.first | first
        grown = [seen for seen in holders if seen.size > following.first[seen.id] and not seen.renewed]
        following.growing = sorted(grown, key=lambda seen: following.first[seen.id] - seen.size)
        try:
            self._add_details(view, following.growing[:_DETAILED], recorded=recorded)
            if census.partial is None and not interrupted:
                following.last = line
                line.data = following.data.add(view, self.sites)
        finally:
            line.holders, line.gone = changed(holders, following.written, forget=line.between)

    def _add_details(self, view: CensusView, growing: Sequence[HolderSeen], *, recorded: bool) -> None:
        """Read the details of growing holders, and keep earlier ones that this census cannot give."""
        present = {group.key for group in view.census().groups}
        wanted = {key: seen for seen in growing if (key := (seen.device, seen.anchor)) in present}
        if not wanted:
            return
        details = view.details(
            list(wanted),
            self.sites.site_of,
            {key: seen.path for key, seen in wanted.items()},
            self.sites.named,
            # When growth may be proven; if holders did not keep all of it, again when most of it is new.
            alone=frozenset(
                key
                for key, seen in wanted.items()
                if seen.detail is None or seen.detail.outgrown_by(seen.nbytes)
            ),
        )
        for key, detail in details.items():
            earlier = wanted[key].detail
            if earlier is not None:
                if earlier.allocated_at is not None and (detail.allocated_at is None or not recorded):
                    detail.allocated_at = earlier.allocated_at  # without recorders few old nodes have a line
                if detail.retained is None:
                    detail.take_retained(earlier, wanted[key].nbytes, wanted[key].size)
            wanted[key].detail = detail


def _apart(before: CensusSeen | None, now: CensusSeen) -> float:
    """Return steps from one census to the next; without steps backwards, without both seconds."""
    if before is None:
        return 1.0
    return next(filter(None, (now.at(scale) - before.at(scale) for scale in get_args(Scale))), 1.0)


def _totals(census: Census) -> dict[str, int]:
    """Return bytes by device, as the counters count them, of everything that has a holder."""
    totals: dict[str, int] = {}
    for storage in census.storages:
        if storage.path is not None and not is_native(storage.path):
            on_gpu = storage.device.startswith("cuda:")
            nbytes = -(-storage.nbytes // MIN_BLOCK) * MIN_BLOCK if on_gpu else storage.nbytes
            totals[storage.device] = totals.get(storage.device, 0) + nbytes
    kept = sum(group.kept for group in census.groups if not is_native(group.anchor))
    return totals | {"cpu": totals.get("cpu", 0) + kept}
