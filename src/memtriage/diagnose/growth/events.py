"""Find the event that growth comes with: a step, a save, an evaluation, an epoch, a batch, a call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.attribution import DataRise, HolderRise
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.evidence import Comparison, Counter
from memtriage.diagnose.growth.track import Floats, Track
from memtriage.model.findings import Event
from memtriage.model.position import Scale

_OF_SCALE: Final[Mapping[Scale, Event]] = {"step": "step", "microbatch": "backward"}
_PREFERRED: Final[tuple[Event, ...]] = ("call", "batch", "evaluation", "save", "epoch")
"""Of events that explain a series as well, the first counts where nothing tells them apart."""


@dataclass(frozen=True, slots=True)
class EventPolicy:
    """When an event explains growth better than the positions of its scale do.

    Attributes:
        alike: events whose squared misfits differ by less than this factor explain a series as well. So does
            one that leaves no more than this beside a line over seconds, which explain nothing.
        uneven: growth by positions is even if readings are off the line by less than this part of what comes
            from one to the next.
    """

    alike: float = 1.5
    uneven: float = 0.25


POLICY: Final = EventPolicy()


def event_of(
    comparison: Comparison,
    shown_by: str,
    rate: float,
    events: Mapping[str, Track],
    came_with: Mapping[Event, int],
    rise: HolderRise | DataRise | None = None,
) -> tuple[Event | None, float]:
    """Return what growth comes with, and its bytes per event; per position where nothing explains it.

    Args:
        comparison: in which it was seen.
        shown_by: name of its counter.
        rate: bytes per position.
        events: counts of the run.
        came_with: bytes that came during each event.
        rise: of its holder, where it has one.
    """
    scale = comparison.scale
    if comparison.step is not None:
        return "microbatch", rate
    own, counter = _OF_SCALE.get(scale), comparison.counters.get(shown_by)
    best = None if counter is None else _best(counter, events, came_with, by_time=own is None)
    if best is not None and counter is not None and counter.growth.rate > 0:
        event, slope = best
        if rise is not None and rise.by_counter and rise.share > 0:
            return event, slope * min(1.0, rise.share)
        return event, slope * rate / counter.growth.rate
    return own, rate


def _best(
    counter: Counter, events: Mapping[str, Track], came_with: Mapping[Event, int], *, by_time: bool
) -> tuple[Event, float] | None:
    """Return the event whose count explains a counter best, and its slope; None if positions do."""
    points = counter.points.since(counter.growth.onset or 0.0)
    if len(points.at) < ESTIMATE.several:
        return None
    straight, _ = _fit(points.at, points.floors)
    apart = float(np.diff(points.at).mean())
    if not by_time and straight <= len(points.at) * (POLICY.uneven * counter.growth.rate * apart) ** 2:
        return None
    found: dict[Event, tuple[float, float]] = {}
    for name in _PREFERRED:
        track = events.get(name)
        if track is None or not len((counts := track.points()).at):
            continue
        at = np.interp(points.at, counts.at, counts.floors, left=0.0)
        misfit, slope = _fit(at, points.floors)
        if slope > 0 and misfit <= straight * (POLICY.alike if by_time else 1):
            found[name] = misfit / max(straight, 1.0), slope
    if not found:
        return None
    least = min(misfit for misfit, _ in found.values()) + float(np.finfo(float).tiny)
    alike = [name for name, (misfit, _) in found.items() if misfit <= POLICY.alike * least]
    event = max(alike, key=lambda name: (came_with.get(name, 0), -_PREFERRED.index(name)))
    return event, found[event][1]


def _fit(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the squared misfit of a straight line, and its slope."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread if spread else 0.0
    rest = y - slope * x
    return float(rest @ rest), slope
