"""Which versions of a library have an entry."""

from __future__ import annotations

import pytest

from memtriage.catalogue.entry import Holder, Span


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


def test_what_an_entry_does_not_say_is_the_most_careful() -> None:
    entry = Holder("a.b", "A", "a", "workspace", "a.b", "a tensor", find=lambda scene: ())
    assert (entry.policy, entry.forbidden, entry.spans) == ("automatic", ("graphs",), ())
    assert (entry.clear_all, entry.owner, entry.sites) == (None, None, ())
    assert not entry.after_collection and not entry.transient and entry.keeps
