"""Following a suspicion: censuses some marks apart, with allocation sites recorded in between."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType

from memtriage.account.census import Look, View
from memtriage.diagnose.judge import NativeHolder
from memtriage.diagnose.leaks import CensusPoint, GroupGrowth, accumulates, growth_between, persistent
from memtriage.model.census import Census, GroupDetail, GroupKey
from memtriage.model.paths import ANY_ITEM, HolderPath, Segment, SegmentKind
from memtriage.model.position import Scale
from memtriage.observe.containers import GrownContainer, container_lengths, grown_containers
from memtriage.observe.identity import Identities
from memtriage.observe.sites import SiteRecorder

_CLOSER_LOOK_AT = 12
_HOST_FLOOR = 4096
_TRANSIENT_OBJECTS = 8
"""What other threads work with and only their C frames refer to looks like garbage, too. From census to
census of a program without garbage up to 4 such objects came or went, beside some 40 of torch's import."""


@dataclass(slots=True)
class HostGrowth:
    """Growth of memory that is no tensor's, by holder or by line. Sizes in bytes."""

    path: HolderPath
    kind: str | None
    nbytes: int
    steps: int
    allocated_at: str | None
    stored_at: str | None = None


@dataclass(slots=True)
class Investigation:
    """What following one suspicion brought to light.

    Attributes:
        scale: what positions and rates count: steps, micro-batches of one step, or seconds.
        points: the censuses, oldest first.
        step: completed steps when it began.
        due: position at which the second census is to be taken.
        verify_at: position from which on a third is wanted; None while or once it is not.
        baseline: the run's first census.
        details: a closer look at the groups that grew.
        host: growth of other memory.
        native: what may hold memory that only C++ sees.
        collector_off: Python's cyclic collector was off.
        stopped: groups that grew within a step, and did not go on to its end or in a later step.
        period: backwards that a micro-batch consists of, as far as the counter shows it.
    """

    scale: Scale
    points: list[CensusPoint]
    step: int = 0
    due: int = 0
    verify_at: int | None = None
    baseline: CensusPoint | None = None
    details: dict[GroupKey, GroupDetail] = field(default_factory=dict)
    host: list[HostGrowth] = field(default_factory=list)
    native: list[NativeHolder] = field(default_factory=list)
    collector_off: bool = False
    stopped: set[GroupKey] = field(default_factory=set)
    period: int = 1

    def growths(self) -> list[GroupGrowth]:
        return [g for g in persistent(self.points, self.baseline) if g.key not in self.stopped]

    def garbage_grows(self) -> bool:
        """Whether objects that the collector will free came with every position, since the first census."""
        earlier = [] if self.baseline is None else [self.baseline]
        points = [*earlier, *self.points]
        more = points[-1].census.garbage - points[0].census.garbage
        steady = all(
            after.census.garbage - before.census.garbage >= after.position - before.position > 0
            for before, after in pairwise(points)
        )
        return not self.collector_off and steady and more > _TRANSIENT_OBJECTS

    def garbage_bytes(self, device: str) -> int:
        """The most that awaited the collector at one of the censuses, in bytes of storages."""
        if self.collector_off:
            return 0
        return max(
            sum(s.nbytes for s in point.census.storages if s.owner == "garbage" and s.device == device)
            for point in self.points
        )


class Investigator:
    """Takes the censuses of an investigation. Costs nothing while there is no suspicion.

    Args:
        script_root: folder of the user's script, for allocation sites.
        progress: given in a few words what takes time, once in a run.
        before: called before each census, for what a census itself would disturb.
    """

    def __init__(
        self,
        script_root: str | None,
        progress: Callable[[str], None],
        before: Callable[[], None] | None = None,
    ) -> None:
        self.seconds = 0.0
        self._sites = SiteRecorder(script_root)
        self._identities = Identities()
        self._progress = progress
        self._before = before
        self._lengths: dict[int, tuple[int, int | None]] = {}
        self._announced = False

    @property
    def recording(self) -> bool:
        """Whether recorders are on, which themselves take host memory."""
        return self._sites.recording

    def census(
        self,
        position: int,
        also: Callable[[View], None] | None = None,
        frames: Sequence[FrameType] | None = None,
    ) -> CensusPoint:
        """One census; `also` is asked while its view is open.

        Args:
            position: when it is taken.
            also: asked for more while the view is valid.
            frames: given when memory has just run out: the frames of the error (empty inside the failing
                allocation, whose frames still run). Nothing is read from the device then.
        """
        started = time.perf_counter()
        if not self._announced:
            self._progress("taking a census")
            self._announced = True
        if self._before is not None:
            self._before()
        with Look(frames or (), self._identities) as view:
            interrupted = frames is not None
            heads = {} if interrupted else view.heads()
            point = CensusPoint(position, view.census(), heads, interrupted)
            if also is not None:
                also(view)
        self.seconds += time.perf_counter() - started
        return point

    def begin(self, scale: Scale, position: int) -> Investigation:
        """The first census."""

        def remember(view: View) -> None:
            self._lengths = container_lengths(view.graph)

        point = self.census(position, remember)
        self._sites.start()
        return Investigation(scale, [point], collector_off=not gc.isenabled())

    def record(self, remaining: int) -> None:
        """Records allocation sites over the last two positions before the second census.

        They cost much more than the step that they are recorded in, so no sooner.

        Args:
            remaining: steps (micro-batches, ...) until that census.
        """
        if remaining == 2:
            self._sites.trace_objects()
        elif remaining == 1:
            self._sites.trace_nodes()

    def conclude(
        self,
        investigation: Investigation,
        position: int,
        also: Callable[[View], None] | None = None,
        frames: Sequence[FrameType] | None = None,
    ) -> CensusPoint:
        """The second census, with a closer look at what grew; then the recorders go off.

        Arguments as `census` has them.
        """
        first = investigation.points[-1]
        self._sites.collect()

        def look_closer(view: View) -> None:
            here = CensusPoint(position, view.census(), {}, frames is not None)
            growths = [g for g in growth_between(first, here) if accumulates(g) or g.group.count == 1]
            wanted = growths[:_CLOSER_LOOK_AT]
            investigation.details = view.details(
                [growth.key for growth in wanted],
                self._sites.site_of,
                {growth.key: growth.path for growth in wanted},
                self._sites.named,
            )
            if investigation.scale == "step":
                grown = grown_containers(view.graph, self._lengths)
                distance = max(1, position - first.position)  # memory may run out in the very next step
                investigation.host = self._host_growth(view, grown, distance)
                investigation.native = _native_holders(view, grown, first, view.census(), distance)

            if also is not None:
                also(view)

        def as_memory_allows(view: View) -> None:
            try:
                look_closer(view)
            except MemoryError:  # near the limit: what grew is known, and a closer look is not
                self._progress("too little host memory for a closer look")

        try:
            point = self.census(position, as_memory_allows, frames)
        finally:
            self.stop()
        investigation.points.append(point)
        investigation.collector_off = investigation.collector_off and not gc.isenabled()
        return point

    def in_backward(self, inside: bool) -> None:
        """A backward begins or has ended."""
        if self._sites.recording:
            self._sites.in_backward(inside)

    def install(self) -> None:
        """Make ready to record, before the program runs."""
        self._sites.install()

    def remove(self) -> None:
        """Recorders off for good, and nothing of them left."""
        self.stop()
        self._sites.remove()

    def stop(self) -> None:
        """Recorders off; what was remembered between two censuses is let go."""
        self._sites.stop()
        self._sites.forget()
        self._lengths = {}

    def _host_growth(self, view: View, grown: list[GrownContainer], steps: int) -> list[HostGrowth]:
        by_line = self._sites.live_by_line()
        found = []
        for container in grown:
            nbytes = container.more * container.entry_bytes
            if nbytes < _HOST_FLOOR * steps or container.more * 4 < steps:
                continue
            # Sites were recorded over one step.
            wanted = nbytes / steps
            line = min(by_line, key=lambda each: abs(by_line[each] - wanted), default=None)
            known = line is not None and 0.5 * wanted <= by_line[line] <= 2 * wanted
            site = self._sites.named([line]) if line is not None and known else None
            path = (*view.path(container.position), ANY_ITEM)
            stored = view.stored_at(container.position, self._sites.named, site)
            found.append(HostGrowth(path, container.kind, nbytes, steps, site, stored))
        return found


def _native_holders(
    view: View, grown: list[GrownContainer], before: CensusPoint, now: Census, steps: int
) -> list[NativeHolder]:
    """Holders of objects whose memory only C++ knows of, and that get more from step to step."""
    found = []
    earlier = before.census.nodes_by_anchor
    for anchor, count in now.nodes_by_anchor.items():
        more = count - earlier.get(anchor, 0)
        if earlier.get(anchor, 0) and more >= steps:
            found.append(NativeHolder((*anchor, Segment(SegmentKind.GRAD_FN)), "autograd nodes", more))
    for container in grown:
        if container.native is not None and container.more * 2 >= steps:
            path = (*view.path(container.position), ANY_ITEM)
            found.append(NativeHolder(path, container.native, container.more))
    return sorted(found, key=lambda holder: -holder.more)
