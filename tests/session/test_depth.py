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


def test_room_is_the_depth_of_the_caller_and_one_more_for_exec() -> None:
    def room_of(by_exec: bool) -> int:
        room, before, get = RecursionRoom(), sys.getrecursionlimit(), sys.getrecursionlimit
        room.make(by_exec=by_exec)
        made = get() - before
        room.remove()
        return made

    def deeper(by_exec: bool) -> int:
        return room_of(by_exec)

    assert room_of(True) - room_of(False) == (1 if sys.version_info < (3, 12) else 0)
    assert deeper(False) - room_of(False) == 1


def test_room_may_be_removed_before_it_was_made() -> None:
    before = sys.getrecursionlimit()
    RecursionRoom().remove()
    assert sys.getrecursionlimit() == before


def test_a_lower_limit_of_the_program_is_kept_for_it() -> None:
    room, before, get = RecursionRoom(), sys.getrecursionlimit(), sys.getrecursionlimit
    room.make(by_exec=False)
    sys.setrecursionlimit(before - 100)
    room.remove()
    assert get() == before - 100
    sys.setrecursionlimit(before)
