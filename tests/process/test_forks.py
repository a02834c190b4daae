"""Cleanup in forked children: called in each, for as long as its object lives."""

from __future__ import annotations

import os

import pytest

from memtriage.process.forks import call_in_forked_children


class Watch:
    """Says through a pipe that it was called."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def cleanup(self) -> None:
        os.write(self.pipe, b"called")


def said_by_a_child(pipe: int, other_end: int) -> bytes:
    os.write(other_end, b".")  # so that there is something to read
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(pipe, 100)


def test_children_call_it_while_its_object_lives(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    watch = Watch(writing)
    call_in_forked_children(watch.cleanup)
    assert said_by_a_child(reading, writing) == b".called"
    del watch
    assert said_by_a_child(reading, writing) == b"."
    assert capfd.readouterr().err == ""  # where Python says what it ignores of a child's start
    os.close(reading)
    os.close(writing)
