"""Numbers and texts packed for a page: a whole number takes 1.3 to 11 bytes, a text stands there once."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

EXACT: Final = 2**53
"""Whole numbers up to here are exact in a browser, whose only number type is the double."""

_TYPES: Final = (("u1", np.uint8), ("u2", np.uint16), ("u4", np.uint32))


LONGEST_TEXT: Final = 400
"""Characters of a text that a page shows; names of C++ templates have thousands."""


class Texts:
    """The texts of a page, each once; the rest of the page names them by their index.

    Attributes:
        all: the texts, in the order of their indices.
        characters: length of all of them together.
    """

    def __init__(self) -> None:
        self.all: list[str] = []
        self.characters = 0
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Return the index of a text, cut to `LONGEST_TEXT` characters."""
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self.all)
            shown = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
            self.all.append(shown)
            self.characters += len(shown)
        return index


def pack(values: NDArray[np.int64]) -> dict[str, Any]:
    """Return a column as `{"type", "unit", "from", "base64"}`: each value is `from + unit x` its entry.

    Entries are little-endian and of the smallest type that holds them exactly; sizes of blocks share a large
    unit (512 bytes, 2 MiB), which is what makes most columns small. Numbers are exact up to `EXACT`; beyond
    it they are as near as a double comes.
    """
    lowest, highest = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if max(abs(lowest), abs(highest), highest - lowest) > EXACT:
        return _column("f8", 1, 0, values.astype("<f8"))
    above = values - lowest
    unit = int(np.gcd.reduce(above)) or 1
    entries = above // unit
    for name, kind in _TYPES:
        if (highest - lowest) // unit <= np.iinfo(kind).max:
            return _column(name, unit, lowest, entries.astype(f"<{name}"))
    return _column("f8", unit, lowest, entries.astype("<f8"))


def _column(name: str, unit: int, lowest: int, entries: NDArray[Any]) -> dict[str, Any]:
    return {
        "type": name,
        "unit": unit,
        "from": lowest,
        "base64": base64.b64encode(entries.tobytes()).decode("ascii"),
    }
