"""Censuses of what grows, with allocation sites recorded shortly before each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

from memtriage.account.census import CensusView, Look
from memtriage.account.followed import Contents, FollowedHolders, changed
from memtriage.allocator.settings import MIN_BLOCK
from memtriage.diagnose.growth.history import HolderHistory, Holding
from memtriage.diagnose.growth.holders import AwaitingCollector, stops_when_full
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.proof import POLICY as PROOF
from memtriage.model.census import GroupDetail, GroupKey
from memtriage.model.evidence import CensusSeen, HolderSeen
from memtriage.model.paths import HolderPath, SegmentKind, has, is_native
from memtriage.model.position import Scale, TrainingPosition
from memtriage.observe.autograd import profiler_is_on
from memtriage.observe.host import has_children
from memtriage.observe.identity import Identities
from memtriage.observe.sites import SiteRecorder
from memtriage.process.stdlib import gc, time
from memtriage.session.schedule.ordinary_data import ComparedLengths, OrdinaryData


@dataclass(frozen=True, slots=True)
class InvestigationPolicy:
    """How much is recorded and read for a census.

    Attributes:
        detailed: growing holders, the largest first, whose details are read at a census.
        recorded: number of censuses for which sites are recorded: what has no site by then is allocated
            elsewhere, or seldom.
        recorded_over: the longest period, in positions, over which sites are recorded as a whole. The usual
            two positions may be without an allocation then.
    """

    detailed: int = 12
    recorded: int = 3
    recorded_over: int = 8


POLICY: Final = InvestigationPolicy()


@dataclass(slots=True)
class Investigation:
    """What the censuses on one scale showed.

    Attributes:
        scale: what positions and rates count.
        history: what each holder kept at each census.
        taken: positions of the censuses.
        data: ordinary data that grows.
        details: details of the holders that grew.
        waiting: what waited for the cyclic collector at each census.
        totals: bytes by device that all holders together kept at each census, with its position.
        collector_off: Python's cyclic collector was off at all censuses.
        profiled: torch's profiler was on at all censuses that were taken while the program ran.
        step: completed steps when it began, if it is within a step.
        period: positions from rise to rise, if growth is periodic: within a step, the backwards of a
            micro-batch.
        recorded: number of censuses before which allocation sites were recorded.
        stopped: holders that grew within a step, but not until its end nor in a later step.
    """

    scale: Scale
    history: HolderHistory = field(default_factory=HolderHistory)
    taken: list[float] = field(default_factory=list)
    data: OrdinaryData = field(default_factory=OrdinaryData)
    details: dict[GroupKey, GroupDetail] = field(default_factory=dict)
    waiting: list[AwaitingCollector] = field(default_factory=list)
    totals: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    collector_off: bool = True
    profiled: bool = False
    step: int | None = None
    period: float | None = None
    recorded: int = 0
    stopped: set[GroupKey] = field(default_factory=set)

    def counter_of(self, holding: Holding) -> str:
        """Return the name of the counter that sees a holder's memory."""
        detail = self.details.get(holding.key)
        return "shared" if detail is not None and detail.shared else holding.group.device

    def growing(self) -> list[Holding]:
        """Return holders that grew and have not stopped, largest growth first."""
        return [holding for holding in self.history.growing(self.period) if holding.key not in self.stopped]

    def held_rate(self, device: str, since: float) -> float | None:
        """Return bytes per position by which everything with a holder grew; None without two censuses.

        The last census before `since` counts, too.
        """
        before = max((position for position, _ in self.totals if position < since), default=since)
        held = [(position, totals.get(device, 0)) for position, totals in self.totals if position >= before]
        if len(held) < 2:
            return None
        (start, held_at_start), (end, held_at_end) = held[0], held[-1]
        return (held_at_end - held_at_start) / (end - start)

    def harmless_rate(self, device: str, since: float) -> float:
        """Return bytes per position by which bounded containers, logs and larger content grew together.

        They are counted as the counter does: a loss of 4 bytes takes a block on a GPU.
        """
        block = MIN_BLOCK if device.startswith("cuda:") else 0
        return sum(
            holding.rate(since, block)
            for holding in self.history
            if holding.group.device == device
            and (holding.logs or holding.swells or self._is_bounded(holding))
        )

    def _is_bounded(self, holding: Holding) -> bool:
        detail = self.details.get(holding.key, GroupDetail())
        return stops_when_full(detail, attached=holding.group.attached)

    def move(self, to: Callable[[float], float]) -> None:
        """Replace the position of each census, by an increasing function."""
        self.history.move(to)
        self.data.move(to)
        self.taken = [to(position) for position in self.taken]
        self.totals = [(to(position), totals) for position, totals in self.totals]
        self.waiting = [replace(waiting, position=to(waiting.position)) for waiting in self.waiting]
        for detail in self.details.values():
            detail.retained_at = None if detail.retained_at is None else to(detail.retained_at)

    @property
    def names_nothing(self) -> bool:
        """Whether no holder and no container is known to grow."""
        return not self.data.growing() and not self.growing()

    @property
    def shared_with_libraries(self) -> bool:
        """Whether other holders of what grows can only be found in libraries."""
        return any(detail.elsewhere and detail.retained is None for detail in self.details.values())

    @property
    def lacks_sites(self) -> bool:
        """Whether something grows whose allocation site is unknown and may still be found."""
        lacks = any(
            holding.key not in self.details or self.details[holding.key].allocated_at is None
            for holding in self.growing()[: POLICY.detailed]
        )
        return (lacks or self.data.lacks_sites) and self.recorded < POLICY.recorded


class _Recorded:
    """Numbers holders and containers for the record, and knows what that says of them.

    All censuses of the run are compared with each other, whatever they were taken for. Those within a step
    have numbers of their own.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, within: Investigation | None) -> None:
        self._within = within
        self._holders: dict[bool, FollowedHolders] = {
            False: FollowedHolders() if within is None else self._holders[False],
            True: FollowedHolders(),
        }
        self._written: dict[bool, dict[int, HolderSeen]] = {
            False: {} if within is None else self._written[False],
            True: {},
        }
        self._data: dict[int | HolderPath, int] = {} if within is None else self._data

    def census(
        self, investigation: Investigation, point: CensusPoint, training: TrainingPosition, *, between: bool
    ) -> CensusSeen:
        """Return the line of an investigation's last census.

        Args:
            investigation: with its details.
            point: that census.
            training: where training stands.
            between: as `CensusSeen.between`.
        """
        within = investigation.step is not None
        if within and investigation is not self._within:
            self._begin(investigation)
        holders = self._holders[within].add(point.census, Contents(point.heads, point.tails), between=between)
        for seen in holders:
            seen.detail = investigation.details.get((seen.device, seen.anchor), seen.detail)
        holders, gone = changed(holders, self._written[within], forget=between)
        return CensusSeen(
            position=training,
            within_step=within,
            between=between,
            holders=holders,
            gone=gone,
            data=investigation.data.seen(self._data) if between and not within else [],
            totals=_totals(point),
            waiting=_waiting_by_class(point),
        )


class Investigator:
    """Takes censuses, and records allocation sites. Costs nothing in between.

    Args:
        script_root: folder of the user's script, for allocation sites.
        say: takes one line of text about what takes time, once per run.
        before: called before each census, for readings that a census would disturb.
        write: takes the line of each census that is compared with others.
    """

    def __init__(
        self,
        script_root: str | None,
        say: Callable[[str], None],
        before: Callable[[], None] | None = None,
        write: Callable[[CensusSeen], None] = lambda census: None,
    ) -> None:
        self._write = write
        self._recorded = _Recorded()
        self._sites = SiteRecorder(script_root)
        self._identities = Identities()
        self._say = say
        self._before = before
        self._announced = False
        self._libraries_hold_much = False
        self._objects_recorded = False

    @property
    def recording(self) -> bool:
        """Whether recorders are on. They take host memory of their own."""
        return self._sites.recording

    def recorder_tables(self) -> int:
        """Return the bytes of the recorders' tables, as the recorders count them."""
        return self._sites.tables()

    def in_malloc(self, tables: int) -> int:
        """Return how many bytes these tables add to malloc's counter."""
        return self._sites.in_malloc(tables)

    def census(
        self,
        position: float,
        also: Callable[[CensusView, CensusPoint], None] | None = None,
        frames: Sequence[FrameType] | None = None,
        wanted: Callable[[Iterable[Any]], Sequence[Any]] | None = None,
    ) -> CensusPoint:
        """Take one census.

        Libraries hold most of a program's objects and few of its tensors. They are only walked as a whole if
        needed, because that takes most of a census's time.

        Args:
            position: when it is taken.
            also: called while the view is valid.
            frames: given if memory has just run out: the frames of the error (empty inside the failing
                allocation, whose frames still run). Nothing is read from the device then.
            wanted: which containers of libraries to find, as for `HeapWalk`; None to walk all libraries.
        """
        # All containers of workers' data sets count, and only an evaluation stack may lead to their loader.
        if frames is not None or self._libraries_hold_much or has_children():
            wanted = None
        if not self._announced:
            self._say("taking a census")
            self._announced = True
        if self._before is not None:
            self._before()
        with Look(frames or (), self._identities, wanted) as view:
            self._libraries_hold_much |= wanted is not None and view.graph.all_libraries
            interrupted = frames is not None
            heads = {} if interrupted else view.heads()
            tails = {} if interrupted else view.heads(last=True)
            point = CensusPoint(position, view.census(), heads, interrupted, tails)
            if also is not None:
                also(view, point)
        return point

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        """Record allocation sites over the last two positions before a census, or over a short period.

        Not earlier: recording costs much more than the step in which it is done.

        Args:
            remaining: marks (of steps, micro-batches, ...) until that census.
            period: marks from rise to rise, if growth is periodic.
            again: a census found no site, although sites were recorded before it. Growth may have an unknown
                period, so the CUDA allocator records for longer. Other recorders do not: while they are on,
                malloc's counter is not read.
        """
        over = 2 if period is None or period > POLICY.recorded_over else max(2, math.ceil(period))
        longest = max(over, POLICY.recorded_over) if again else over
        if not 0 < remaining <= longest:
            if self._sites.on:
                self.stop()  # that census has been postponed
            return
        self._sites.start()
        if remaining > over:
            return
        if remaining == 1:
            self._sites.trace_nodes()
        else:
            self._objects_recorded = True
            self._sites.trace_objects()

    def follow(
        self,
        investigation: Investigation,
        position: float,
        also: Callable[[CensusView], None] | None = None,
        frames: Sequence[FrameType] | None = None,
        *,
        between: bool = True,
        libraries: bool = False,
        training: TrainingPosition | None = None,
    ) -> CensusPoint:
        """Take the next census of an investigation, with details of what grew; then stop recording.

        Args:
            investigation: gets the results.
            position: when it is taken, later than those before.
            also: called while the view is valid.
            frames: as for `census`.
            between: as for `HolderHistory.add`.
            libraries: walk all libraries.
            training: where training stands, for the record.
        """
        started = time.perf_counter()
        libraries = libraries or investigation.shared_with_libraries
        investigation.recorded += self._sites.recording
        # Nodes only know the line that called an operation, not the line in it that allocates.
        recorded = self._sites.recording and self._objects_recorded
        self._sites.collect()
        # This makes tables. tracemalloc would follow each entry, but is off by now.
        compared = investigation.data.compared()
        investigation.collector_off = investigation.collector_off and not gc.isenabled()
        if between:
            investigation.profiled = (investigation.profiled or not investigation.taken) and profiler_is_on()

        def add(view: CensusView, point: CensusPoint) -> None:
            try:
                self._add(investigation, view, point, between, recorded, compared)
            except MemoryError:  # near the limit: what grew is known, its details are not
                self._say("too little host memory for a closer look")
            if also is not None:
                also(view)

        try:
            point = self.census(position, add, frames, None if libraries else compared.of_libraries)
        finally:
            self.stop()
        if training is not None:
            between_positions = between and frames is None and point.census.partial is None
            seen = self._recorded.census(investigation, point, training, between=between_positions)
            seen.interrupted = frames is not None and between
            seen.profiled, seen.collector_off = profiler_is_on(), not gc.isenabled()
            seen.pause_s = round(time.perf_counter() - started, 3)
            self._write(seen)
        return point

    def in_backward(self, inside: bool) -> None:
        """Pause the recorders inside a backward."""
        if self._sites.recording:
            self._sites.in_backward(inside)

    def install(self) -> None:
        """Make ready to record, before the program runs."""
        self._sites.install()

    def remove(self) -> None:
        """Stop recording and remove the recorders."""
        self.stop()
        self._sites.remove()

    def stop(self) -> None:
        """Stop recording and release what was recorded."""
        self._sites.stop()
        self._sites.forget()
        self._objects_recorded = False

    # --- at one census --------------------------------------------------------------------------------------

    def _add(
        self,
        investigation: Investigation,
        view: CensusView,
        point: CensusPoint,
        between: bool,
        recorded: bool,
        compared: ComparedLengths,
    ) -> None:
        """Add a census to an investigation."""
        between = between and point.census.partial is None and not point.interrupted
        investigation.history.add(point, between=between)
        investigation.taken.append(point.position)
        investigation.waiting.append(_waiting(point))
        if between:
            investigation.totals.append((point.position, _totals(point)))
        present = {group.key for group in point.census.groups}
        growing = [holding for holding in investigation.growing() if holding.key in present]
        if growing:
            self._add_details(
                investigation,
                view,
                growing[: POLICY.detailed],
                point.position,
                last=not between,
                recorded=recorded,
            )
        if between:
            investigation.data.add(view, point.position, compared, self._sites)

    def _add_details(
        self,
        investigation: Investigation,
        view: CensusView,
        growing: Sequence[Holding],
        position: float,
        *,
        last: bool,
        recorded: bool,
    ) -> None:
        """Read the details of growing holders, and keep earlier ones that this census cannot give."""
        details = view.details(
            [holding.key for holding in growing],
            self._sites.site_of,
            {holding.key: holding.path for holding in growing},
            self._sites.named,
            alone=_retention_needed(investigation, growing, last=last),
        )
        for key, detail in details.items():
            if detail.retained is not None:
                detail.retained_at = position
            earlier = investigation.details.get(key)
            if earlier is None:
                continue
            if earlier.allocated_at is not None and (detail.allocated_at is None or not recorded):
                detail.allocated_at = earlier.allocated_at  # without recorders few old nodes have a line
            if detail.retained is None:
                detail.retained, detail.retained_of = earlier.retained, earlier.retained_of
                detail.retained_at = earlier.retained_at
                detail.also_held_by = earlier.also_held_by
        investigation.details |= details


def _retention_needed(
    investigation: Investigation, growing: Sequence[Holding], *, last: bool
) -> frozenset[GroupKey]:
    """Return the holders whose retained size is to be computed: once, when their growth may be proven.

    Args:
        investigation: has the details known so far.
        growing: the holders that grew.
        last: no census follows this one.
    """
    return frozenset(
        holding.key
        for holding in growing
        if (last or len(holding.rising(investigation.period)) > PROOF.intervals)
        and (holding.key not in investigation.details or investigation.details[holding.key].retained is None)
    )


def _waiting_by_class(point: CensusPoint) -> dict[str, dict[str, int]]:
    """Return what waits for the cyclic collector at a census, by device and class."""
    by_class: dict[str, dict[str, int]] = {}
    for group in point.census.groups:
        if has(group.anchor, SegmentKind.GARBAGE_CYCLE):
            name = group.anchor[0].name
            for device, nbytes in ((group.device, group.nbytes), ("cpu", group.kept)):
                classes = by_class.setdefault(device, {})
                classes[name] = classes.get(name, 0) + nbytes
    return by_class


def _waiting(point: CensusPoint) -> AwaitingCollector:
    by_class = _waiting_by_class(point)
    return AwaitingCollector(
        point.position,
        {device: sum(classes.values()) for device, classes in by_class.items()},
        {device: max(classes, key=lambda name: classes[name]) for device, classes in by_class.items()},
    )


def _totals(point: CensusPoint) -> dict[str, int]:
    """Return bytes by device, as the counters count them, of everything that has a holder."""
    totals: dict[str, int] = {}
    for storage in point.census.storages:
        if storage.path is not None and not is_native(storage.path):
            on_gpu = storage.device.startswith("cuda:")
            nbytes = -(-storage.nbytes // MIN_BLOCK) * MIN_BLOCK if on_gpu else storage.nbytes
            totals[storage.device] = totals.get(storage.device, 0) + nbytes
    kept = sum(group.kept for group in point.census.groups if not is_native(group.anchor))
    return totals | {"cpu": totals.get("cpu", 0) + kept}
