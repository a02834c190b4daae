"""Room for the frames of the watch below the recursion limit, which the program does not see."""

from __future__ import annotations

import sys

import pytest

from memtriage.session.depth import RecursionRoom, enough_depth


def depth(at: int = 1) -> int:
    try:
        return depth(at + 1)
    except RecursionError:
        return at


def test_a_program_comes_as_deep_as_without_a_watch() -> None:
    room, before, get = RecursionRoom(), sys.getrecursionlimit(), sys.getrecursionlimit
    room.make(by_exec=False)
    try:
        assert sys.getrecursionlimit() == before and before - depth() <= 2  # this function, and one between
        sys.setrecursionlimit(before + 100)
        assert sys.getrecursionlimit() == before + 100 and before + 100 - depth() <= 2
        with pytest.raises(ValueError):
            sys.setrecursionlimit(0)
        with pytest.raises(TypeError):
            sys.setrecursionlimit("1")  # type: ignore[arg-type]
        sys.setrecursionlimit(before)
    finally:
        room.remove()
    assert sys.getrecursionlimit is get and get() == before


def test_enough_depth_for_the_end() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        with enough_depth():
            assert sys.getrecursionlimit() >= 1000
        assert sys.getrecursionlimit() == 300
    finally:
        sys.setrecursionlimit(before)
