"""A time limit for queries that users write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

LONGEST_QUERY_S: Final = 300.0
"""A query over a thousand ranks takes seconds; one without end would take all memory."""


@contextmanager
def interrupted_after(connection: DuckDBPyConnection, seconds: float = LONGEST_QUERY_S) -> Iterator[None]:
    """Interrupt what a connection runs in the block once it has taken so long: it raises `duckdb.Error`."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
