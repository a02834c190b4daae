"""Which instants of a long course a chart shows: every stretch of it keeps its lowest and highest value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def instants(courses: Sequence[NDArray[np.int64]], limit: int) -> NDArray[np.int64]:
    """Return the rows to keep, ascending, at most `limit`.

    The rows are cut into equal stretches. Of each stretch the first lowest and the first highest value of
    every course is kept, and so are the very first and the very last row. Courses that are no longer than
    `limit` are kept whole.

    Args:
        courses: values at the same instants.
        limit: rows to return at most.

    Raises:
        ValueError: no course is given, their lengths differ, or `limit` has no room for the extremes.
    """
    if not courses or len({len(course) for course in courses}) != 1:
        raise ValueError("courses must be given, and of one length")
    rows = len(courses[0])
    if rows <= limit:
        return np.arange(rows, dtype=np.int64)
    stretches = (limit - 2) // (2 * len(courses))
    if stretches < 1:
        raise ValueError(f"{limit} rows have no room for the extremes of {len(courses)} courses")
    bounds = np.arange(stretches, dtype=np.int64) * rows // stretches
    kept = [np.asarray([0, rows - 1], dtype=np.int64)]
    for course in courses:
        for extreme in (np.minimum, np.maximum):
            kept.append(_first(course, extreme.reduceat(course, bounds), bounds))
    return np.unique(np.concatenate(kept))


def extremes(courses: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the rows of the first lowest and the first highest value of each course, ascending."""
    indices = [int(find(course)) for course in courses for find in (np.argmin, np.argmax)]
    return np.unique(np.asarray(indices, dtype=np.int64))


def _first(
    course: NDArray[np.int64], wanted: NDArray[np.int64], bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return, for each stretch, the first row that has the wanted value."""
    lengths = np.diff(bounds, append=len(course))
    hits = np.flatnonzero(course == np.repeat(wanted, lengths))
    return hits[np.searchsorted(hits, bounds)]
