"""Find the event that growth comes with: a step, a save, an evaluation, an epoch, a batch, a call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.evidence import Comparison
from memtriage.diagnose.growth.track import Floats, Track
from memtriage.model.findings import Event
from memtriage.model.position import Scale

_OF_SCALE: Final[Mapping[Scale, Event]] = {"step": "step", "microbatch": "backward"}
_PREFERRED: Final[tuple[Event, ...]] = ("call", "batch", "evaluation", "save", "epoch")
"""Of events that explain a series as well, the first counts where nothing tells them apart."""
_ALIKE: Final = 1.5
"""Events whose squared misfits differ by less than this factor explain a series as well. One that comes with
each position explains it no better than positions do; seconds explain nothing."""
_UNEVEN: Final = 0.25
"""Growth by positions is even if readings are off the line by less than this part of what comes from one to
the next."""


def event_of(
    comparison: Comparison,
    shown_by: str,
    rate: float,
    events: Mapping[str, Track],
    came_with: Mapping[Event, int],
) -> tuple[Event | None, float]:
    """Return what growth comes with, and its bytes per event; per position where no event explains it.

    Args:
        comparison, shown_by, rate: in which it was seen, by which counter, and its bytes per position.
        events, came_with: counts of the run, and bytes that came during each event.
    """
    if comparison.step is not None:
        return "microbatch", rate
    own, counter = _OF_SCALE.get(comparison.scale), comparison.counters.get(shown_by)
    points = None if counter is None else counter.points.since(counter.growth.onset or 0.0)
    if counter is None or counter.growth.rate <= 0 or points is None or len(points.at) < ESTIMATE.several:
        return own, rate
    straight, _ = _fit(points.at, points.floors)
    apart = float(np.diff(points.at).mean())
    if own and straight <= len(points.at) * (_UNEVEN * counter.growth.rate * apart) ** 2:
        return own, rate
    found: dict[Event, tuple[float, float]] = {}
    for name in _PREFERRED:
        if name in events and len((counts := events[name].points()).at):
            at = np.interp(points.at, counts.at, counts.floors, left=0.0)
            misfit, slope = _fit(at, points.floors)
            if slope > 0 and misfit <= straight * (1 / _ALIKE if own else _ALIKE):
                found[name] = misfit / max(straight, 1.0), slope
    if not found:
        return own, rate
    least = min(misfit for misfit, _ in found.values()) + float(np.finfo(float).tiny)
    alike = [name for name, (misfit, _) in found.items() if misfit <= _ALIKE * least]
    event = max(alike, key=lambda name: (came_with.get(name, 0), -_PREFERRED.index(name)))
    return event, found[event][1] * rate / counter.growth.rate


def _fit(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the squared misfit of a straight line, and its slope."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread if spread else 0.0
    rest = y - slope * x
    return float(rest @ rest), slope
