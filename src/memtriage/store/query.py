"""SQL over records, across ranks and runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.store.limited import interrupted_after
from memtriage.store.locate import RecordError, all_records
from memtriage.store.records import End, HostSampleLine, Note, RecordedFinding, Start

_VIEWS: Final[dict[str, tuple[str, type[msgspec.Struct]]]] = {
    "starts": ("start", Start),
    "marks": ("mark", Mark),
    "hosts": ("host", HostSampleLine),
    "findings": ("finding", RecordedFinding),
    "ledgers": ("ledger", Ledger),
    "notes": ("note", Note),
    "ends": ("end", End),
}
"""View, the type of its lines, and the struct whose fields are its columns."""


def sql(paths: Iterable[Path], query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run a DuckDB query over all records below `paths` and return the column names and the rows.

    The views `starts`, `marks`, `hosts`, `findings`, `ledgers`, `notes` and `ends` have the fields of
    `memtriage.store.records` and `memtriage.model` as columns, and from the file's place `in_run`,
    `in_restart` and `in_rank` (0 for a process without rank). A file that several runs wrote gives the
    lines of all of them. Cut lines are left out.

    Raises:
        RecordError: a path does not exist or holds no record, or the query fails.
    """
    import duckdb

    files = [str(path) for path in all_records(paths)]
    with duckdb.connect() as connection:
        try:
            for view, (kind, struct) in _VIEWS.items():
                connection.execute(_create_view(view, kind, _columns(struct), files))
            with interrupted_after(connection):
                result = connection.execute(query)
                return [column[0] for column in result.description or []], result.fetchall()
        except duckdb.Error as error:
            raise RecordError(f"query failed: {error}") from error


def _create_view(name: str, kind: str, columns: dict[str, str], files: list[str]) -> str:
    types = ", ".join(f"{quoted(column)}: {quoted(sql_type)}" for column, sql_type in columns.items())
    return f"""
        CREATE VIEW {name} AS
        SELECT {", ".join(f'"{column}"' for column in columns)},
            regexp_extract(filename, '([^/]+)/[^/]+/[^/]+$', 1) AS in_run,
            TRY_CAST(regexp_extract(filename, '([^/]+)/[^/]+$', 1) AS INTEGER) AS in_restart,
            TRY_CAST(regexp_extract(filename, 'rank-([0-9]+)[.]jsonl$', 1) AS INTEGER) AS in_rank
        FROM read_json(
            [{", ".join(map(quoted, files))}],
            columns = {{'t': 'VARCHAR', {types}}},
            format = 'newline_delimited',
            filename = true,
            ignore_errors = true
        )
        WHERE t = '{kind}'"""


def _columns(struct: type[msgspec.Struct]) -> dict[str, str]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _sql_type(field.type) for field in info.fields}


def _sql_type(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.BoolType():
            return "BOOLEAN"
        case msgspec.inspect.IntType():
            return "BIGINT"
        case msgspec.inspect.FloatType():
            return "DOUBLE"
        case msgspec.inspect.ListType():
            return f"{_sql_type(info.item_type)}[]"
        case msgspec.inspect.DictType():
            return f"MAP({_sql_type(info.key_type)}, {_sql_type(info.value_type)})"
        case msgspec.inspect.StructType():
            fields = ", ".join(f'"{field.name}" {_sql_type(field.type)}' for field in info.fields)
            return f"STRUCT({fields})"
        case msgspec.inspect.UnionType():
            known = [item for item in info.types if not isinstance(item, msgspec.inspect.NoneType)]
            return _sql_type(known[0])
        case _:  # str, and literals of str
            return "VARCHAR"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
