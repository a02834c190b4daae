"""A time limit for queries that users write."""

from __future__ import annotations

import threading

import duckdb
import pytest

from memtriage.store.limited import interrupted_after

ENDLESS = "select count(*) from range(1_000_000_000) a, range(1_000_000_000) b"


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_query_without_end_is_interrupted() -> None:
    connection = duckdb.connect()
    with pytest.raises(duckdb.Error), interrupted_after(connection, 0.02):
        connection.execute(ENDLESS).fetchall()
    assert connection.execute("select 7").fetchall() == [(7,)]


def test_a_query_that_ends_in_time_is_not() -> None:
    connection = duckdb.connect()
    before = timers()
    with interrupted_after(connection):
        (timer,) = [timer for timer in timers() if timer not in before]
        assert timer.daemon  # a process does not wait for it
        assert connection.execute("select 7").fetchall() == [(7,)]
    assert timer.finished.is_set()  # type: ignore[attr-defined]
