"""Decide whether native memory grows because caches of generated code fill. Pure.

oneDNN generates code for each new shape and keeps it in bounded caches. If shapes vary, native memory grows
until these are full. Generated code is counted separately from malloc, so both can be compared: such a cache
only grows when new code comes, and any other growth also comes without new code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Floats, Points


@dataclass(frozen=True, slots=True)
class CodeCachePolicy:
    """Thresholds for attributing growth to code caches.

    Attributes:
        spans: equal spans of time; both counters are compared from each to the next.
        readings: least number of readings of the generated code.
        entries: bound of oneDNN's primitive cache, unless an environment variable changes it. Growth over
            more positions than this would have filled it.
        varies: if the code's growth differs between spans by less than this part of its mean, code came all
            the time: then growth without new code could not show.
        share: part of the growth that may come without new code.
        beside: most bytes of other memory per byte of code; it is 0.1 for convolutions, 0.35 for LSTMs.
    """

    spans: int = 8
    readings: int = 8
    entries: int = 1024
    varies: float = 0.3
    share: float = 0.3
    beside: float = 0.5


POLICY: Final = CodeCachePolicy()


def fills_with_code(memory: Points, code: Points, since: float) -> bool:
    """Return whether native memory only grows when code is generated, so that code caches may explain it.

    Args:
        memory: readings of malloc's counter.
        code: readings of the generated code's size, possibly fewer.
        since: position at which memory began to grow.
    """
    memory, code = memory.since(since), code.since(since)
    if len(code.at) < POLICY.readings or memory.span <= 0 or memory.span > POLICY.entries:
        return False
    edges = np.linspace(code.at[0], code.at[-1], POLICY.spans + 1)
    inside = (memory.at >= edges[0]) & (memory.at <= edges[-1])
    at, values = memory.at[inside], memory.means[inside]
    grown, generated = _between(at, values, edges), _between(at, np.interp(at, code.at, code.means), edges)
    if grown is None or generated is None or not (0 < grown.sum() <= POLICY.beside * generated.sum()):
        return False
    mean = generated.mean()
    spread = generated - mean
    if np.sqrt((spread**2).mean()) < POLICY.varies * mean:
        return True  # code came all the time: growth without it could not show
    slope = float(spread @ grown) / float(spread @ spread)
    without_code = float(grown.mean()) - slope * float(mean)
    return without_code <= POLICY.share * float(grown.mean())


def _between(at: Floats, values: Floats, edges: Floats) -> Floats | None:
    """Return the rise of the mean from each span to the next; None if a span has no reading."""
    spans = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(spans, minlength=len(edges) - 1)
    if not counts.all():
        return None
    rises: Floats = np.diff(np.bincount(spans, weights=values, minlength=len(edges) - 1) / counts)
    return rises
