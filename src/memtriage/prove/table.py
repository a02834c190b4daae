"""A TOML table whose keys are taken one by one, so that each mistake in it gets an error that helps."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

_WORDS: Final[Mapping[type, str]] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
}
_TIME: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h)\s*")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


class TrialsError(ValueError):
    """A trials file, or what it names, cannot be used. The text is one line: given, expected, what to do."""


class Table:
    """Hands out a table's values by key, checked; `done` refuses the keys that nobody took.

    Args:
        values: the table.
        where: its place in words, e.g. `[[variant]] 2`.
        keys: all keys that may occur in it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, keys: Iterable[str]) -> None:
        self.where = where
        self._values = values
        known = sorted(keys)
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                advice = f"did you mean {near[0]!r}?" if near else "take it out"
                raise TrialsError(
                    f"unknown key {key!r} in {where}; expected one of {_listed(known)}: {advice}"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type[T], default: T) -> T:
        """Return the value of a key; the default where it is absent.

        Raises:
            TrialsError: it is of another type.
        """
        if key not in self._values:
            return default
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        # In Python true is a whole number, in TOML it is not.
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.wrong(key, _WORDS.get(kind, kind.__name__))
        return value

    def either(self, key: str, *kinds: type) -> Any:
        """Return the value of a key, which is of one of these types."""
        value = self._values.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.wrong(key, " or ".join(_WORDS[kind] for kind in kinds))
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a text that is not empty; the default where it is absent."""
        value = self.take(key, str, default)
        if key in self and not value.strip():
            raise self.wrong(key, "a text that is not empty")
        return value

    def count(self, key: str, default: int, least: int) -> int:
        """Return a whole number of at least `least`."""
        value = self.take(key, int, default)
        if value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; numbers in it are taken as they are written. Empty where absent."""
        items = self.take(key, list, [])
        if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise self.wrong(key, "a list of texts")
        return tuple(str(item) for item in items)

    def seconds(self, key: str, default: float | None) -> float | None:
        """Return a time span of more than 0, given as text (`30 min`) or as a number of seconds."""
        if key not in self:
            return default
        given = self._values[key]
        span = parse_seconds(given) if isinstance(given, str) else self.take(key, float, 0.0)
        if not span or span <= 0:
            raise self.wrong(key, "a time span such as '90 s', '30 min' or '2 h'")
        return span

    def table(self, key: str) -> dict[str, Any]:
        """Return a table inside this one; empty where absent."""
        return cast("dict[str, Any]", self.take(key, dict, {}))

    def tables(self, key: str) -> list[dict[str, Any]]:
        """Return an array of tables inside this one; empty where absent."""
        items = self.take(key, list, [])
        if not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, f"tables, each below its own [[{key}]]")
        return cast("list[dict[str, Any]]", items)

    def wrong(self, key: str, expected: str) -> TrialsError:
        """Return the error for a key whose value is not what was expected."""
        given = repr(self._values.get(key))
        shown = given if len(given) <= 60 else f"{given[:59]}…"
        return TrialsError(f"{key} = {shown} in {self.where}; expected {expected}: correct it")


def parse_seconds(text: str) -> float | None:
    """Return a time span in seconds; None when the text is none.

    >>> parse_seconds("1.5 min"), parse_seconds("20ms"), parse_seconds("soon")
    (90.0, 0.02, None)
    """
    match = _TIME.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
