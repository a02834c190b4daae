"""Every owner has its words."""

from __future__ import annotations

import re

import pytest

from memtriage.model.recording import OWNERS
from memtriage.report.html.shell import asset
from memtriage.report.snapshot_words import BOTTOM_FIRST, colour, meaning


@pytest.mark.parametrize("owner", OWNERS)
def test_an_owner_has_a_meaning_and_a_colour_of_its_own(owner: str) -> None:
    assert meaning(owner)
    assert re.search(rf"--{colour(owner)}: light-dark\(", asset("page.css"))
    assert [other for other in OWNERS if colour(other) == colour(owner)] == [owner]


def test_a_stack_has_every_owner_once() -> None:
    assert sorted(BOTTOM_FIRST) == sorted(OWNERS)
