"""What a judgment of growth finds: kinds and figures. `report/growth_words.py` makes sentences of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from memtriage.diagnose.growth.attribution import Open, Rise
from memtriage.diagnose.growth.estimate import Growth
from memtriage.diagnose.held import Held
from memtriage.model.evidence import DataSeen
from memtriage.model.findings import Certainty, Event, ProcessKind, Projection
from memtriage.model.judged import DetectionLimit, JudgedScale
from memtriage.model.paths import HolderPath, anchor_of
from memtriage.model.position import Scale

Per = Literal["step", "micro-batch", "second"]
Unexplained = Literal[
    "not named",
    "not listed from outside",
    "not read",
    "processes",
    "profiler",
    "native code",
    "other anonymous memory",
    "shared memory",
    "mapped shared memory",
]
"""Why nothing is known to hold what grows: no census covers it, or it is memory of C++ alone."""
Obstacle = Literal["no counter", "few", "may end", "unread", "restless", "small", "lived"]
"""Why growth on a device could not be judged."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Growth of a counter that no holder accounts for.

    Attributes:
        counter: its name.
        growth: of the counter.
        named: what censuses name of it.
        reasons: why it is only suspected.
    """

    counter: str
    growth: Growth
    named: float
    reasons: tuple[Open, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per position that censuses do not name."""
        return self.growth.rate - self.named


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What grows.

    Attributes:
        kind, device, certainty, also_held_by, allocated_at, stored_at: as a finding has them.
        step, projection, event, where, process: likewise.
        scale: what growth was counted in.
        shown_by: what grew, by how much and when.
        cause: why it grows: what the rules of mechanisms look at, objects of C++ in a container, or nothing
            that is known.
        rates: bytes of growth, the most telling unit first.
        recent: bytes per position of the latest part of the growth.
        nbytes, nbytes_step: its size at the end, and the step of the census that saw it.
        path: to its holder; None if no object is known.
        on_host: bytes of host memory that the same holder keeps, for a leak on a GPU.
        parts: leaks of this one cause, if they are several.
        spacing: positions of `rate` from one event to the next.
        comes_every: steps from one rise to the next, where these are regular and no event explains them.
        by_role: rates of several processes, if they are that.
        unread: why the objects of the process could not be read.
    """

    kind: Literal["leak", "garbage_cycle"] = "leak"
    device: str
    scale: Scale
    shown_by: Rise | Counted
    cause: Held | DataSeen | Unexplained
    certainty: Certainty
    rates: Mapping[Per, int]
    recent: float = 0.0
    nbytes: int
    nbytes_step: int | None = None
    path: HolderPath | None = None
    also_held_by: tuple[HolderPath, ...] = ()
    allocated_at: str | None = None
    stored_at: str | None = None
    step: int | None = None
    projection: Projection | None = None
    on_host: int = 0
    parts: tuple[Leak, ...] = ()
    event: Event | None = None
    spacing: float = 1.0
    comes_every: float | None = None
    where: ProcessKind = "main"
    process: str | None = None
    by_role: tuple[tuple[str, int], ...] = ()
    unread: str | None = None

    def times(self, factor: float) -> Leak:
        """Return it with so many times the growth."""
        rates = {per: round(factor * rate) for per, rate in self.rates.items()}
        return replace(self, rates=rates, recent=factor * self.recent)

    @property
    def rate(self) -> int:
        """Bytes of growth per step; without steps, per micro-batch or second."""
        return next(filter(None, self.rates.values()), 0)

    @property
    def anchor(self) -> HolderPath:
        """What the program itself holds; empty if no object is known."""
        return anchor_of(self.path or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedDevice:
    """Whether growth on a device could be judged, and how small a leak would have been found.

    Attributes:
        scale, points, limit: as `model.judged.Judged` has them.
        obstacle: why growth was not judged.
        figure: of the obstacle: a rate (`may end`), the last position at which the counter was read
            (`unread`), seconds of a process's life (`lived`), bytes that it has grown less than (`small`).
        waiting: most bytes that awaited the cyclic collector at a census, the class of most of them, and its
            position: they explain why the counter goes up and down.
    """

    scale: JudgedScale | None = None
    points: int = 0
    limit: DetectionLimit | None = None
    obstacle: Obstacle | None = None
    figure: float = 0.0
    waiting: tuple[int, str, float] | None = None
