"""Tracing of allocations that the watch borrows, and that the program does not see."""

from __future__ import annotations

import _tracemalloc
import tracemalloc
from collections.abc import Iterator

import pytest

from memtriage.observe.modes import Tracing


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    made = Tracing()
    made.install()
    yield made
    made.remove()
    assert not _tracemalloc.is_tracing() and tracemalloc.start is _tracemalloc.start


def test_borrowed_tracing_is_not_seen(tracing: Tracing) -> None:
    assert tracing.start(5) and _tracemalloc.is_tracing()
    assert not tracemalloc.is_tracing() and tracemalloc.get_traced_memory() == (0, 0)
    with pytest.raises(RuntimeError):
        tracemalloc.take_snapshot()
    tracemalloc.stop()
    assert tracing.borrowed and tracemalloc.get_traceback_limit() == 1
    with tracing.reading():
        assert tracemalloc.is_tracing()


def test_tracing_that_the_program_starts_is_its_own(tracing: Tracing) -> None:
    tracing.start(5)
    tracemalloc.start(2)
    assert not tracing.borrowed and tracemalloc.get_traceback_limit() == 2
    tracing.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()
