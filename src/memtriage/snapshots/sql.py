"""SQL over a memory snapshot: its events, its blocks and its segments as DuckDB tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.model.blocks import BlockState, Segment
from memtriage.model.recording import EVENT_KINDS, OWNERS, DeviceRecording, Recording, Stack
from memtriage.store.limited import LONGEST_QUERY_S, interrupted_after

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
from memtriage.store.query import quoted

TABLES: Final[dict[str, dict[str, str]]] = {
    "events": {
        "device": "`cuda:N`",
        "event": "number of the event on its device, from 0",
        "time_us": "microseconds since the epoch",
        "kind": "`alloc`, `free_requested`, `free_completed`, `segment_alloc`, `segment_free`, "
        "`segment_map`, `segment_unmap`, `oom`, `snapshot`, `other`",
        "address": "first byte of the block or segment; 0 for an `oom`",
        "size": "bytes as recorded: asked for (blocks), taken from the driver (segments)",
        "stream": "handle of the stream",
        "block": "the block that was allocated or freed: `blocks.block`",
        "site": "`file.py:line in function` of the call",
        "frames": "the call stack, innermost first",
        "allocated": "bytes in use after the event",
        "reserved": "bytes of segments after the event",
        "stranded": "free bytes that cannot go back to the driver, after the event",
    },
    "blocks": {
        "device": "`cuda:N`",
        "block": "number of the block on its device, from 0",
        "address": "first byte",
        "size": "bytes it takes in its segment",
        "requested": "bytes asked for",
        "stream": "handle of the stream it was allocated for",
        "pool": "id of its pool, `0.0` for the default pool",
        "owner": "what it is",
        "site": "`file.py:line in function` of its allocation",
        "frames": "the call stack of its allocation, innermost first",
        "born": "the event that allocated it; NULL if it is older than the first event",
        "died": "the event that freed it; NULL if it is alive",
        "gone": "the event from which its bytes could be used again; NULL if there is none",
        "born_us": "time of `born`",
        "died_us": "time of `died`",
        "alive": "whether it is in use at the snapshot",
    },
    "segments": {
        "device": "`cuda:N`",
        "address": "first byte",
        "size": "bytes",
        "stream": "handle of the stream whose allocations it serves",
        "pool": "id of its pool, `0.0` for the default pool",
        "expandable": "whether its pages are mapped one by one",
        "blocks": "blocks in use",
        "allocated": "bytes of those",
        "awaiting": "bytes that wait for a stream",
        "free": "free bytes",
        "stranded": "free bytes that cannot go back to the driver",
    },
}
"""Table, column, meaning. Sizes are bytes."""


class SnapshotQueryError(ValueError):
    """A query that DuckDB refuses, or that is not one `SELECT`."""


def query(recording: Recording, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one `SELECT` over the tables of `TABLES` and return the column names and the rows.

    The query sees nothing else: no file, no network, no Python variable, and it changes nothing.

    Raises:
        SnapshotQueryError: the text is not one `SELECT`, or DuckDB refuses it; says why.
    """
    import duckdb

    with duckdb.connect(":memory:") as connection:
        _fill(connection, recording)
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type is not duckdb.StatementType.SELECT:
                raise SnapshotQueryError(f"expected one SELECT statement, got: {_shortened(sql)}")
            with interrupted_after(connection):
                result = connection.execute(statements[0])
                return [column[0] for column in result.description or []], result.fetchall()
        except duckdb.InterruptException as error:
            limit = f"{LONGEST_QUERY_S:g} s"
            raise SnapshotQueryError(f"the query took longer than {limit}: ask for less") from error
        except duckdb.Error as error:
            raise SnapshotQueryError(f"the query failed: {error}; tables: {_tables_in_words()}") from error


def _fill(connection: DuckDBPyConnection, recording: Recording) -> None:
    """Copy the columns into DuckDB, then take away its access to everything else."""
    connection.execute(_SCHEMA)
    _insert(connection, "stacks", _stack_columns(recording.stacks), frames="string_split(frames, chr(10))")
    for device in recording.devices:
        name = quoted(device.device)
        _insert(connection, "event_rows", _event_columns(device), device=name)
        _insert(connection, "block_rows", _block_columns(device), device=name, pool=_pool_name(device))
        _insert(connection, "segments", _segment_columns(device), device=name)
    connection.execute(
        "SET enable_external_access = false; SET python_enable_replacements = false; "
        "SET lock_configuration = true"
    )


def _insert(
    connection: DuckDBPyConnection, table: str, columns: dict[str, NDArray[Any]], **expressions: str
) -> None:
    """Append columns to a table; `expressions` are SQL for columns that are not as they are given."""
    names = list(dict.fromkeys((*columns, *expressions)))
    chosen = ", ".join(expressions.get(name, name) for name in names)
    connection.register("given", columns)
    connection.execute(f"INSERT INTO {table} ({', '.join(names)}) SELECT {chosen} FROM given")
    connection.unregister("given")


def _stack_columns(stacks: Sequence[Stack]) -> dict[str, NDArray[Any]]:
    return {
        "stack": np.arange(len(stacks), dtype=np.int32),
        "site": _texts(stack.site for stack in stacks),
        "frames": _texts("\n".join(stack.frames) for stack in stacks),
    }


def _event_columns(device: DeviceRecording) -> dict[str, NDArray[Any]]:
    events, course = device.events, device.timeline
    return {
        "event": np.arange(len(events), dtype=np.int32),
        "time_us": events.time_us,
        "kind": events.kind,
        "address": events.address,
        "size": events.size,
        "stream": events.stream,
        "block": events.life,
        "stack": events.stack,
        "allocated": course.allocated,
        "reserved": course.reserved,
        "stranded": course.stranded,
    }


def _block_columns(device: DeviceRecording) -> dict[str, NDArray[Any]]:
    lives = device.lives
    return {
        "block": np.arange(len(lives), dtype=np.int32),
        "address": lives.address,
        "size": lives.size,
        "requested": lives.requested,
        "stream": lives.stream,
        "pool": lives.pool,
        "owner": lives.owner,
        "stack": lives.stack,
        "born": lives.born,
        "died": lives.died,
        "gone": lives.gone,
    }


def _segment_columns(device: DeviceRecording) -> dict[str, NDArray[Any]]:
    segments = device.segments
    stranded = {pinned.segment.address: pinned.stranded for pinned in device.pinned}
    numbers = {
        "address": [segment.address for segment in segments],
        "size": [segment.size for segment in segments],
        "stream": [segment.stream for segment in segments],
        "blocks": [sum(block.state == "active" for block in segment.blocks) for segment in segments],
        "allocated": [_bytes_of(segment, "active") for segment in segments],
        "awaiting": [_bytes_of(segment, "awaiting") for segment in segments],
        "free": [_bytes_of(segment, "free") for segment in segments],
        "stranded": [stranded.get(segment.address, 0) for segment in segments],
    }
    return {
        **{name: np.asarray(column, dtype=np.int64) for name, column in numbers.items()},
        "pool": _texts(_pool_words(segment.pool) for segment in segments),
        "expandable": np.asarray([segment.expandable for segment in segments], dtype=bool),
    }


def _bytes_of(segment: Segment, state: BlockState) -> int:
    return sum(block.size for block in segment.blocks if block.state == state)


def _pool_name(device: DeviceRecording) -> str:
    return _pick("pool", [_pool_words(pool) for pool in device.pools])


def _pool_words(pool: tuple[int, int]) -> str:
    return f"{pool[0]}.{pool[1]}"


def _texts(texts: Iterable[str]) -> NDArray[Any]:
    # Names out of a pickle can hold lone surrogates, which DuckDB's UTF-8 cannot.
    return np.asarray([text.encode("utf-8", "replace").decode("utf-8") for text in texts], dtype=object)


def _pick(column: str, names: Iterable[str]) -> str:
    """Return SQL for the name that a column's number stands for."""
    return f"list_extract([{', '.join(map(quoted, names))}], {column} + 1)"


def _tables_in_words() -> str:
    return ", ".join(f"{table} ({', '.join(columns)})" for table, columns in TABLES.items())


_SHOWN: Final = 60


def _shortened(sql: str) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


_SCHEMA: Final = f"""
    CREATE TABLE stacks (stack INTEGER, site VARCHAR, frames VARCHAR[]);
    CREATE TABLE event_rows (
        device VARCHAR, event INTEGER, time_us BIGINT, kind UTINYINT, address BIGINT, size BIGINT,
        stream BIGINT, block INTEGER, stack INTEGER, allocated BIGINT, reserved BIGINT, stranded BIGINT
    );
    CREATE TABLE block_rows (
        device VARCHAR, block INTEGER, address BIGINT, size BIGINT, requested BIGINT, stream BIGINT,
        pool VARCHAR, owner UTINYINT, stack INTEGER, born INTEGER, died INTEGER, gone INTEGER
    );
    CREATE TABLE segments (
        device VARCHAR, address BIGINT, size BIGINT, stream BIGINT, pool VARCHAR, expandable BOOLEAN,
        blocks BIGINT, allocated BIGINT, awaiting BIGINT, free BIGINT, stranded BIGINT
    );
    CREATE VIEW events AS
    SELECT device, event, time_us, {_pick("kind", EVENT_KINDS)} AS kind, address, size, stream,
        nullif(block, -1) AS block, site, frames, allocated, reserved, stranded
    FROM event_rows LEFT JOIN stacks USING (stack);
    CREATE VIEW blocks AS
    SELECT device, block, address, size, requested, stream, pool, {_pick("owner", OWNERS)} AS owner, site,
        frames, nullif(born, -1) AS born, nullif(died, -1) AS died, nullif(gone, -1) AS gone,
        b.time_us AS born_us, d.time_us AS died_us, died = -1 AS alive
    FROM block_rows LEFT JOIN stacks USING (stack)
        LEFT JOIN (SELECT device, event AS born, time_us FROM event_rows) b USING (device, born)
        LEFT JOIN (SELECT device, event AS died, time_us FROM event_rows) d USING (device, died);
"""
