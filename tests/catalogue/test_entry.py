"""Which versions of a library have an entry."""

from __future__ import annotations

import pytest

from memtriage.catalogue.entry import Span


@pytest.mark.parametrize(
    ("span", "covered"),
    [
        (Span(), [(0, 9), (2, 0), (2, 13, 9), (2, 14), (3, 0)]),
        (Span((2, 0)), [(2, 0), (2, 13, 9), (2, 14), (3, 0)]),
        (Span((), (2, 14)), [(0, 9), (2, 0), (2, 13, 9)]),
        (Span((2, 0), (2, 14), "fuser.py"), [(2, 0), (2, 13, 9)]),
    ],
)
def test_versions_from_the_first_that_has_it_to_the_one_that_mends_it(
    span: Span, covered: list[tuple[int, ...]]
) -> None:
    versions = [(0, 9), (2, 0), (2, 13, 9), (2, 14), (3, 0)]
    assert [version for version in versions if span.covers(version)] == covered
