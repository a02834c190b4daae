"""JSON of any text that a program has, file names that are not UTF-8 included."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_ENCODER: Final = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """`value` as one line of JSON.

    File names that are not UTF-8 reach `sys.argv`, tracebacks and holder paths as lone surrogates: these are
    written as `\\udcXX`.

    Raises:
        TypeError: there is something in it that JSON cannot hold.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_printable(msgspec.to_builtins(value)))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
