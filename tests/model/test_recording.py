"""Figures that are derived from a recording's columns."""

from __future__ import annotations

import pytest

from memtriage.model.recording import OWNERS
from support.recordings import training


@pytest.mark.parametrize("name", ["parameter", "saved for backward", "variable", "gradient"])
def test_the_course_of_an_owner_is_what_its_blocks_say(name: str) -> None:
    device, _ = training(leak=3 << 20)
    lives, owner = device.lives, OWNERS.index(name)
    rows = list(zip(lives.owner, lives.born, lives.died, lives.size, strict=True))
    course = [
        sum(size for of, born, died, size in rows if of == owner and born <= at and (died < 0 or at < died))
        for at in range(len(device.events))
    ]
    assert device.owner_timeline(owner).tolist() == course


def test_what_is_stranded_at_the_end_is_that_of_the_segments() -> None:
    device, _ = training()
    course = device.timeline
    assert (course.stranded >= 0).all() and course.stranded[-1] == device.end.stranded > 0
    assert len(device.events) == len(course.allocated)
