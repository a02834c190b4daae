"""The tables of a trials file as typed structs, and one clear line for each mistake in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

_TIME: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h)\s*")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_LONGEST_VALUE: Final = 60
"""Characters of a wrong value that an error shows: it stays one line of a terminal."""

STEP_MARK: Final = "step"
"""The mark at the end of an optimizer's step."""
TIME_SPAN: Final = "a time span such as '90 s', '30 min' or '2 h'"

# The description of a type is what an error says was expected.
Text = Annotated[str, Meta(pattern=r"\S", description="a text that is not empty")]
Flag = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
TimeSpan = Annotated[str | float, Meta(description=TIME_SPAN)]
Texts = Annotated[list[str | int | float], Meta(description="a list of texts")]
AllocatorOptions = Annotated[str | dict[str, Any], Meta(description="a text or a table")]
LimitText = Annotated[str | int | float, Meta(description="a text or a number")]
VariantNames = Annotated[str | list[str], Meta(description="a name or a list of names")]


class TrialsError(ValueError):
    """A trials file, or what it names, cannot be used. The text is one line: given, expected, what to do."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file. Defaults stand for absent keys."""


class PolicyTable(_Table, frozen=True):
    """`memtriage` in `[trials]` and in a variant."""

    phase: Flag | None = None
    host_tuning: Flag | None = None


class CommonTable(_Table, frozen=True):
    """The keys that `[trials]` gives to all variants, and that a variant may have, too."""

    args: Texts = []
    env: dict[str, Any] = {}
    allocator: AllocatorOptions | None = None
    memtriage: PolicyTable = PolicyTable()


class VariantTable(CommonTable, frozen=True):
    """`[[variant]]`."""

    name: Text | None = None


class TrialsTable(CommonTable, frozen=True):
    """`[trials]`."""

    name: Text | None = None
    script: Text | None = None
    module: Text | None = None
    python: Text | None = None
    directory: Text = "."
    ranks: Count = 1
    repeats: Count = 5
    """The fewest whose lowest and highest enclose the median with a confidence above 90 % (1 - 2 x 0.5^5)."""
    warmup: Count = 4
    """The first steps make optimizer state and compile."""
    timeout: TimeSpan | None = None
    mark: Text | None = None
    step: Text = STEP_MARK
    baseline: Text | None = None
    give_up_after: Count = 2


class TargetTable(_Table, frozen=True):
    """`[[target]]`."""

    metric: Text | None = None
    variant: VariantNames | None = None
    at_most: LimitText | None = None
    at_least: LimitText | None = None
    equals: Text | None = None


class TrialsFile(_Table, frozen=True):
    """All tables of a trials file. Grammar: docs/compare.md."""

    trials: TrialsTable | None = None
    variant: list[VariantTable] = []
    target: list[TargetTable] = []
    values: dict[str, Any] = {}


def read_tables(document: Mapping[str, Any]) -> TrialsFile:
    """Return the tables of a decoded trials file.

    Raises:
        TrialsError: a key is unknown, or its value is of another type; the first such mistake.
    """
    try:
        return msgspec.convert(document, TrialsFile)
    except msgspec.ValidationError as error:
        mistake = next(_mistakes(document, TrialsFile, "the file"), None)
        raise mistake or TrialsError(f"{error}; expected the tables of a trials file: correct it") from None


def wrong_value(key: str, value: object, where: str, expected: str) -> TrialsError:
    """Return the error for a key whose value is not what was expected.

    Args:
        value: as given; None where the key is absent.
        where: the table in words, e.g. `[[variant]] 2`.
    """
    given = repr(value)
    shown = given if len(given) <= _LONGEST_VALUE else f"{given[: _LONGEST_VALUE - 1]}…"
    return TrialsError(f"{key} = {shown} in {where}; expected {expected}: correct it")


def parse_seconds(text: str) -> float | None:
    """Return a time span in seconds; None when the text is none.

    >>> parse_seconds("1.5 min"), parse_seconds("20ms"), parse_seconds("soon")
    (90.0, 0.02, None)
    """
    match = _TIME.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def _mistakes(values: Mapping[str, Any], table: type[_Table], where: str) -> Iterator[TrialsError]:
    """Yield what is wrong in a table, in the order of its keys."""
    fields = {field.name: field.type for field in msgspec.structs.fields(table)}
    for key, value in values.items():
        if key not in fields:
            yield _unknown_key(key, where, sorted(fields))
            continue
        kind = fields[key]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            inner, is_array = _inner_table(kind), get_origin(kind) is list
            if inner is not None and not is_array and isinstance(value, dict):
                yield from _mistakes(value, inner, f"[{key}]" if table is TrialsFile else f"{where} {key}")
            elif inner is not None and is_array and _is_array_of_tables(value):
                for number, row in enumerate(value, 1):
                    yield from _mistakes(row, inner, f"[[{key}]] {number}")
            yield wrong_value(key, value, where, _expected(key, kind))


def _is_array_of_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _inner_table(kind: Any) -> type[_Table] | None:
    """Return the struct that a field holds: itself, as an option, or in a list."""
    if isinstance(kind, type) and issubclass(kind, _Table):
        return kind
    return next((inner for part in get_args(kind) if (inner := _inner_table(part)) is not None), None)


def _expected(key: str, kind: Any) -> str:
    """Return in words what a field may be."""
    for part in (kind, *get_args(kind)):
        for meta in getattr(part, "__metadata__", ()):
            return str(meta.description)
    return f"tables, each below its own [[{key}]]" if get_origin(kind) is list else "a table"


def _unknown_key(key: str, where: str, known: Iterable[str]) -> TrialsError:
    names = list(known)
    near = difflib.get_close_matches(key, names, 1)
    advice = f"did you mean {near[0]!r}?" if near else "take it out"
    expected = ", ".join(map(repr, names))
    return TrialsError(f"unknown key {key!r} in {where}; expected one of {expected}: {advice}")
