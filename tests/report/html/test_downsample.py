"""However few instants are kept, no extreme is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from memtriage.report.html.downsample import extremes, instants

_VALUES = st.integers(-(1 << 50), 1 << 50) | st.integers(0, 3)


@st.composite
def courses(draw: st.DrawFn) -> tuple[list[NDArray[np.int64]], int]:
    rows = draw(st.integers(1, 300))
    number = draw(st.integers(1, 3))
    made = [draw(arrays(np.int64, rows, elements=_VALUES)) for _ in range(number)]
    return made, draw(st.integers(2 + 2 * number, 80))


@given(courses())
def test_extremes_survive(case: tuple[list[NDArray[np.int64]], int]) -> None:
    shown, limit = case
    kept = instants(shown, limit)
    assert len(kept) <= limit
    assert kept[0] == 0 and kept[-1] == len(shown[0]) - 1
    assert (np.diff(kept) > 0).all()
    for course in shown:
        assert course[kept].min() == course.min()
        assert course[kept].max() == course.max()


@given(arrays(np.int64, st.integers(200, 400), elements=_VALUES), st.integers(20, 100))
def test_every_stretch_keeps_its_own_extremes(course: NDArray[np.int64], limit: int) -> None:
    kept = set(instants([course], limit).tolist())
    stretches = (limit - 2) // 2
    for number in range(stretches):
        start, end = number * len(course) // stretches, (number + 1) * len(course) // stretches
        inside = [course[row] for row in range(start, end) if row in kept]
        assert (min(inside), max(inside)) == (course[start:end].min(), course[start:end].max())


@given(courses())
def test_two_rows_of_each_course_are_its_extremes(case: tuple[list[NDArray[np.int64]], int]) -> None:
    shown, _ = case
    rows = extremes(shown)
    assert len(rows) <= 2 * len(shown)
    for course in shown:
        assert course[rows].min() == course.min()
        assert course[rows].max() == course.max()


def test_a_short_course_is_kept_whole() -> None:
    assert instants([np.arange(7)], 7).tolist() == list(range(7))
    assert instants([np.zeros(0, np.int64)], 5).tolist() == []


@pytest.mark.parametrize(
    ("given_courses", "limit"),
    [([], 5), ([np.arange(9), np.arange(8)], 5), ([np.arange(9)], 3)],
    ids=["none", "lengths differ", "no room"],
)
def test_what_cannot_be_done_is_refused(given_courses: list[NDArray[np.int64]], limit: int) -> None:
    with pytest.raises(ValueError):
        instants(given_courses, limit)
