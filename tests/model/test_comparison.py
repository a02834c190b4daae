"""What changed between two recordings."""

from __future__ import annotations

import pytest

from memtriage.model.comparison import ValueChange


@pytest.mark.parametrize(
    ("before", "after", "by"), [(3, 10, 7), (10, 3, -7), (0, 0, 0), (None, 3, None), (3, None, None)]
)
def test_a_change_needs_both_figures(before: int | None, after: int | None, by: int | None) -> None:
    assert ValueChange(before=before, after=after).by == by
