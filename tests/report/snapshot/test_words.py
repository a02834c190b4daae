"""Every owner has its words."""

from __future__ import annotations

import re

import pytest

from memtriage.model.recording import OWNERS
from memtriage.report.html.shell import asset
from memtriage.report.snapshot.words import BOTTOM_FIRST, color, meaning


@pytest.mark.parametrize("owner", OWNERS)
def test_an_owner_has_a_meaning_and_a_color_of_its_own(owner: str) -> None:
    assert meaning(owner)
    assert re.search(rf"--{color(owner)}: light-dark\(", asset("page.css"))
    assert [other for other in OWNERS if color(other) == color(owner)] == [owner]


def test_a_stack_has_every_owner_once() -> None:
    assert sorted(BOTTOM_FIRST) == sorted(OWNERS)
